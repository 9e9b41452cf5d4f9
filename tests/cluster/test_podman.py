"""Jobs inside a real Podman, in an image made here without a network and kept in a storage of its own."""

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Yard, everything, losses

PROGRAM = shutil.which("podman")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROGRAM is None, reason="podman is not installed (make test-cluster installs it)"),
]
IMAGE = "localhost/tiny:1"
SHOWN = ("bin", "usr", "lib", "lib64")  # The host's; the image has only the folders.
STORAGE = '[storage]\ndriver = "vfs"\nrunroot = "{0}/run"\ngraphroot = "{0}/storage"\n'
# Some virtual machines let root raise no limits, and mix two kinds of control groups, which crun refuses.
CONTAINERS = """[containers]
default_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]
[engine]
lock_type = "file"
tmp_dir = "{folder}/tmp"
{runtime}
"""
SITE = """
[boxed.slurm]
cpus_per_rank = 1
partition = "a10"

[boxed.environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{source}"
HOSTILE = "a 'b' $(touch {here}/pwned)\\nand \\"more\\""

[boxed.container]
kind = "podman"
image = "localhost/tiny:1"
binds = {binds}
python = "{python}"
"""


@pytest.fixture(scope="module")
def boxed(yard: Yard, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The words that name the site; `podman` itself finds this storage by its environment."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "storage.conf").write_text(STORAGE.format(folder))
    patch = pytest.MonkeyPatch()
    patch.setenv("CONTAINERS_STORAGE_CONF", str(folder / "storage.conf"))
    patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
    files, complaint = resource.getrlimit(resource.RLIMIT_NOFILE)[1], ""
    for runtime in ("", 'runtime = "runc"'):
        (folder / "containers.conf").write_text(CONTAINERS.format(files=files, folder=folder, runtime=runtime))
        podman("import", "-", IMAGE, given=root())
        done = podman("run", "--rm", "--init", "--network=host", "--volume=/usr:/usr", "--volume=/lib:/lib",
                      "--volume=/lib64:/lib64", IMAGE, "/usr/bin/true", code=None)  # fmt: skip
        if done.returncode == 0:
            break
        complaint = done.stderr.decode()
    else:
        patch.undo()
        pytest.skip(f"podman runs no container here: {complaint[-300:]}")
    source = yard.environment["PYTHONPATH"]
    hostile = yard.path / "a b;$(touch pwned)"
    hostile.mkdir()
    (hostile / "file").write_text("seen")
    prefixes = {sys.prefix, str(Path(sys.base_prefix).resolve()), source}
    binds = [*sorted({*(f"/{name}" for name in SHOWN), *prefixes}), f"{hostile}:/mnt/in side"]
    sites = folder / "sites.toml"
    sites.write_text(SITE.format(source=source, here=yard.path, binds=json.dumps(binds), python=sys.executable))
    yield ["--sites", str(sites), "--site", "boxed"]
    podman("rm", "--all", "--force")
    patch.undo()


def root() -> bytes:
    """Empty folders for what will be shown inside, and a file that only this image has."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name in (*SHOWN, "etc", "proc", "sys", "dev", "run", "tmp", "root", "mnt"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        entry = tarfile.TarInfo("etc/this-image")
        entry.size = 3
        archive.addfile(entry, io.BytesIO(b"yes"))
    return made.getvalue()


def podman(*words: str, given: bytes = b"", code: int | None = 0) -> subprocess.CompletedProcess:
    done = subprocess.run([str(PROGRAM), *words], input=given, capture_output=True, timeout=600)
    assert code in (None, done.returncode), done.stderr.decode()
    return done


def containers() -> str:
    return podman("ps", "--all", "--quiet").stdout.decode()


def test_a_command_sees_the_image_and_every_name_as_it_is(yard: Yard, boxed: list[str]):
    reported = yard.steelyard("shell", *boxed, "--", "/bin/cat", "/etc/this-image", "/mnt/in side/file").stdout
    assert reported == "yesseen"
    reported = yard.steelyard(
        "shell", *boxed, "--", sys.executable, "-c", "import os; print(os.environ['HOSTILE'])"
    ).stdout
    assert reported == f"a 'b' $(touch {yard.path}/pwned)\nand \"more\"\n"
    assert not list(yard.path.rglob("pwned"))


def test_two_ranks_train_here_and_a_job_killed_at_once_leaves_no_container(yard: Yard, boxed: list[str]):
    words = ["alike.toml", "parallel.data=2", "train.steps=100000", "--on", "local", *boxed, "--name", "boxed here"]
    run = yard.submit(*words)
    yard.until_step(run, 3)
    samples = run / "logs" / f"{os.uname().nodename}.gpu"

    def shows_both_ranks() -> bool:
        whole = (line for line in samples.read_text().splitlines(keepends=True) if line.endswith("\n"))
        return any(len(json.loads(line)["devices"][0]["processes"]) == 2 for line in whole)

    yard.lab.until(shows_both_ranks, "a sample with both ranks", 120)
    assert containers()
    yard.steelyard("cancel", str(run), "--now")
    deadline = time.monotonic() + 300
    while containers():
        assert time.monotonic() < deadline, everything(run)
        time.sleep(0.2)
    assert yard.state(run) == "cancelled"
    assert not list((run / "launch").glob("alive.*"))


def test_a_job_of_slurms_runs_in_a_container_and_saves_when_it_is_cancelled(yard: Yard, boxed: list[str]):
    words = ["alike.toml", "parallel.data=2", "train.steps=100000", "--on", "slurm", *boxed, "--name", "boxed there"]
    run = yard.submit(*words)
    yard.until_step(run, 3)
    yard.steelyard("cancel", str(run))
    assert yard.until_state(run, "cancelled", "failed", "finished") == "cancelled"
    assert (run / "checkpoints").is_dir(), everything(run)
    assert sorted(losses(run))[:3] == [1, 2, 3]
    yard.lab.until(lambda: not containers(), "the end of the containers", 120)
