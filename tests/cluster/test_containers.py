"""A job inside a real Apptainer image, made here without a network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.conftest import Yard, everything, losses

CACHED = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "steelyard" / "apptainer" / "bin"
PROGRAM = shutil.which("apptainer", path=f"{os.environ['PATH']}:{CACHED}")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PROGRAM is None, reason="there is no apptainer (tools/cluster_apptainer fetches one)"),
]
SITE = """
[boxed.slurm]
cpus_per_rank = 1
partition = "a10"

[boxed.environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{source}"
INSIDE = "an image"

[boxed.prepend]
PATH = ["{bin}"]

[boxed.container]
kind = "apptainer"
image = "{image}"
binds = {binds}
python = "{python}"
options = ["--no-privs"]  # of a root who may be less than root in a virtual machine
"""


@pytest.fixture(scope="module")
def image(yard: Yard) -> Path:
    """Empty folders for what will be shown inside, and a file that only this image has."""
    root = yard.path / "root"
    for name in ("bin", "usr", "lib", "lib64", "etc", "proc", "sys", "dev", "tmp", "root", "var/tmp"):
        (root / name).mkdir(parents=True)
    (root / "etc" / "this-image").write_text("yes")
    for name in ("passwd", "group", "resolv.conf", "hosts", "localtime"):
        (root / "etc" / name).touch()
    made = yard.path / "tiny.sif"
    words = ["unshare", "--net", str(PROGRAM), "-q", "build", "--force", str(made), str(root)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"apptainer builds no image here: {done.stderr[-300:]}")
    return made


def test_a_job_runs_inside_an_image_made_offline(yard: Yard, image: Path):
    source = yard.environment["PYTHONPATH"]
    prefixes = {sys.prefix, str(Path(sys.base_prefix).resolve()), source}
    binds = json.dumps(sorted({"/bin", "/usr", "/lib", "/lib64", *prefixes}))
    sites = yard.path / "boxed.toml"
    sites.write_text(
        SITE.format(source=source, image=image, binds=binds, python=sys.executable, bin=Path(str(PROGRAM)).parent)
    )
    where = ["--sites", str(sites), "--site", "boxed"]
    said = yard.steelyard("shell", *where, "--", "/bin/cat", "/etc/this-image")
    assert said.stdout == "yes"
    run = yard.submit("alike.toml", "train.steps=3", "--on", "slurm", *where, "--name", "boxed")
    yard.until_state(run, "finished", "failed")
    assert sorted(losses(run)) == [1, 2, 3], everything(run)
    assert "apptainer exec" in (run / "launch" / "job.sh").read_text()
