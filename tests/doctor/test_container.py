"""`--container`: an image that lacks libraries, run in real namespaces with real mounts, without any image tool."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.doctor import container, diagnose, site_profile, undo_log
from steelyard.doctor.paths import sites_file
from steelyard.launch import sites
from tests.doctor.conftest import named
from tests.doctor.test_repair import tree

# `apptainer exec --bind A:B --env K=V IMAGE python3 ...`: binds below /opt are really mounted, in their own namespace.
RUNTIME = r"""
import os, sys
words, binds, env = sys.argv[2:], [], {}
assert words.pop(0) == "--cleanenv"
while words[0].startswith("--"):
    kind, value = words[0], words[1]
    words = words[2:]
    if kind == "--bind":
        binds.append(value.split(":"))
    else:
        env[value.split("=", 1)[0]] = value.split("=", 1)[1]
image, command = words[0], words[1:]
assert command[0] == "python3", command
env = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "/image/own", "PYTHONPATH": image + "/packages"} | env
mounts = "mount -t tmpfs none /opt\nif [ -d /usr/local/cuda ]; then mount -t tmpfs none /usr/local/cuda; fi\n"
for host, inside in binds:
    if inside.startswith("/opt/"):
        mounts += f"mkdir -p '{inside}' && mount --bind '{host}' '{inside}'\n"
script = "set -e\n" + mounts + 'exec "$@"'
real = os.environ["REAL_PYTHON"]
words = ["unshare", os.environ["UNSHARE"], "sh", "-c", script, "sh", real, "-S", *command[1:]]
os.execve("/usr/bin/unshare", words, env)
"""


@pytest.fixture
def image(bench):
    """A host with conda's cuDNN and a CUDA, and an image whose torch misses cuDNN and finds its own NCCL."""
    if shutil.which("unshare") is None or not Path("/opt").is_dir():
        pytest.skip("needs unshare and /opt")
    options = next(
        (
            o
            for o in ("-m", "-rm")
            if not subprocess.run(
                ["unshare", *o.split(), "mount", "-t", "tmpfs", "none", "/opt"], capture_output=True
            ).returncode
        ),
        None,
    )
    if options is None:
        pytest.skip("mounts in a namespace are not allowed here")
    packages = bench.torch("libcudnn.so.8", "libnccl.so.2", search="$ORIGIN/../../nvidia/nccl/lib")
    bench.packages.clear()  # It is the image's, not the host's.
    bench.versioned(packages / "nvidia/nccl/lib/libnccl.so.2", "libnccl.so.2", 21904)
    place = bench.path / "pytorch_24.01-py3.sif"
    place.mkdir()
    packages.rename(place / "packages")
    bench.versioned(bench.path / "conda/lib/libcudnn.so.8.9.7", "libcudnn.so.8", 8907)
    bench.library(bench.path / "conda/lib/libcudnn_ops_infer.so.8.9.7", "libcudnn_ops_infer.so.8")
    for name in ("bin/nvcc", "include/cuda.h"):
        (bench.path / "cuda" / name).parent.mkdir(parents=True)
        (bench.path / "cuda" / name).write_text("")
    runtime = bench.path / "runtime.py"
    runtime.write_text(RUNTIME)
    bench.program(
        "apptainer", f'REAL_PYTHON={sys.executable} UNSHARE="{options}" exec {sys.executable} -S {runtime} "$@"'
    )
    bench.environment = {"CONDA_PREFIX": str(bench.path / "conda"), "CUDA_HOME": str(bench.path / "cuda")}
    return place


def test_an_image_is_made_whole_from_outside_and_undo_leaves_no_trace(bench, image):
    machine = bench.machine()
    before = tree(bench.path / "home")
    found = diagnose.examine_image(machine, str(image), "campus", lambda question: True)
    assert named(found.findings, "libcudnn.so.8").verdict == "ok"
    assert [finding.verdict for finding in found.after] == ["ok"]
    assert found.after[0].words == "all 2 libraries load"
    site = tomllib.loads(sites_file(machine).read_text())["campus"]
    links = bench.path / "home/.local/share/steelyard/doctor/images/pytorch_24.01-py3.sif"
    assert site["container"] == {
        "kind": "apptainer",
        "image": str(image),
        "binds": [
            f"{links}:/opt/steelyard/links",
            f"{bench.path}/conda/lib:/opt/steelyard/libraries/0",
            f"{bench.path}/cuda/bin:/usr/local/cuda/bin",
            f"{bench.path}/cuda/include:/usr/local/cuda/include",
        ],
    }
    assert site["environment"] == {"CUDA_HOME": "/usr/local/cuda", "CUDA_ROOT": "/usr/local/cuda"}
    assert site["prepend"] == {"LD_LIBRARY_PATH": ["/opt/steelyard/links", "/image/own"]}
    assert {path.name: str(path.readlink()) for path in links.iterdir()} == {
        "libcudnn.so.8": "/opt/steelyard/libraries/0/libcudnn.so.8.9.7",
        "libcudnn_ops_infer.so.8": "/opt/steelyard/libraries/0/libcudnn_ops_infer.so.8.9.7",
    }
    assert sites.find("campus", file=sites_file(machine))[1].container.kind == "apptainer"
    again = diagnose.examine_image(machine, str(image), "campus", lambda question: pytest.fail("nothing is left to do"))
    assert not again.planned
    undo_log.undo(machine)
    assert tree(bench.path / "home") == before


def test_a_library_that_the_host_lacks_too_is_named(bench, image):
    shutil.rmtree(bench.path / "conda")
    found = diagnose.examine_image(bench.machine(), str(image), "campus", lambda question: True)
    finding = named(found.findings, "libcudnn.so.8")
    assert finding.verdict == "fail"
    assert "nvidia-cudnn" in finding.hint
    assert found.verdict == "fail"


def test_an_image_without_torch_is_left_alone(bench, image):
    shutil.rmtree(image / "packages")
    found = diagnose.examine_image(bench.machine(), str(image), "campus", lambda question: True)
    assert "no torch" in found.findings[0].words
    assert not found.planned


def test_an_image_that_is_not_there_or_has_no_runtime_is_told(bench):
    machine = bench.machine()
    with pytest.raises(UserError, match="there is no image"):
        container.choose(machine, "gone.sif")
    (bench.path / "a.sqsh").write_text("")
    with pytest.raises(RuntimeFailure, match="needs enroot"):
        container.choose(machine, str(bench.path / "a.sqsh"))
    with pytest.raises(UserError, match="is not an image"):
        container.choose(machine, "--privileged")
    bench.says("docker", "")
    assert container.choose(machine, "name/of:image").kind == "docker"


def test_the_runtime_that_has_an_image_is_taken(bench):
    bench.program("docker", """[ "$1" != image ] || { echo "No such image" >&2; exit 1; }""")
    bench.says("podman", "[]")
    assert container.choose(bench.machine(), "localhost/tiny:1").kind == "podman"


def test_docker_is_told_in_the_line_that_says_why_and_by_hand_as_docker_is_called(bench):
    bench.program("docker", "echo 'docker: no such thing' >&2; echo \"See 'docker run --help'.\" >&2; exit 125")
    with pytest.raises(RuntimeFailure, match="docker: no such thing") as reported:
        diagnose.examine_image(bench.machine(), "gone:1", "campus", lambda question: True)
    assert "docker run --rm" in str(reported.value)


def test_a_runtime_that_fails_is_told_in_its_own_words(bench):
    bench.program("apptainer", "echo 'FATAL: could not open image' >&2; exit 255")
    (bench.path / "a.sif").write_text("")
    with pytest.raises(RuntimeFailure, match="could not open image"):
        diagnose.examine_image(bench.machine(), str(bench.path / "a.sif"), "campus", lambda question: True)


SITES = """# Where we run.
default = "campus"   # most of us

[campus]
modules = ["apptainer", "cuda/12.4"]  # as of May
slurm.account = "nlp"

[campus.container]
kind = "apptainer"
image = "/old.sif"
binds = ["/data", "/old:/opt/steelyard/links"]  # the data

[campus.environment]
NCCL_DEBUG = "WARN"

[other]
slurm.partition = "gpu1"
"""


def test_a_profile_keeps_its_comments_and_what_it_had(tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text(SITES)
    text = site_profile.edited(
        path, "campus", {"kind": "apptainer", "image": "/new.sif"}, ["/links:/opt/steelyard/links"],
        {"CUDA_HOME": "/usr/local/cuda"}, {"LD_LIBRARY_PATH": ["/opt/steelyard/links"]},
    )  # fmt: skip
    for comment in ("# Where we run.", "# most of us", "# as of May"):
        assert comment in text
    written = tomllib.loads(text)
    assert written["campus"]["container"] == {
        "kind": "apptainer", "image": "/new.sif", "binds": ["/data", "/links:/opt/steelyard/links"],
    }  # fmt: skip
    assert written["campus"]["environment"] == {"NCCL_DEBUG": "WARN", "CUDA_HOME": "/usr/local/cuda"}
    assert written["campus"]["prepend"] == {"LD_LIBRARY_PATH": ["/opt/steelyard/links"]}
    assert written["other"] == {"slurm": {"partition": "gpu1"}}
    assert written["default"] == site_profile.default(path) == "campus"


@pytest.mark.parametrize(("text", "message"), [("a = [", "not TOML"), ("campus = 3\n", "is not a table")])
def test_a_profile_that_cannot_be_edited_is_left_and_told(tmp_path, text, message):
    path = tmp_path / "sites.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        site_profile.edited(path, "campus", {}, [], {}, {})
