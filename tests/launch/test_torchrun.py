"""A real torchrun under its keeper: requests to stop, failures and hung ranks end as they do under our own starter."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import torchrun
from steelyard.launch.backends import local
from steelyard.launch.job_spec import JobSpec, NodeGroup
from steelyard.launch.submit import SubmitRequest, preview
from tests import preloaded
from tests.conftest import kill

# A rank without torch: what it says at its end it leaves as ranks of steelyard's do.
RANK = """
import os, signal, sys, time
from pathlib import Path
from steelyard.launch.error_file import ERROR_FILE, ErrorRecord, leave
rank = int(os.environ["RANK"])
assert os.environ["TORCHELASTIC_RUN_ID"] and os.environ["MASTER_ADDR"] == "127.0.0.1", "not torchrun's"
def end(kind, message, code, lost=False):
    leave(Path(os.environ[ERROR_FILE]), ErrorRecord(kind, message, code, time.time(), lost))
    sys.exit(code)
def save(number, frame):
    time.sleep(1 + 6 * rank)  # Longer than ranks have who must notice a failure.
    Path(f"saved-{rank}").touch()
    end("Interrupted", "interrupted; saved", 130)
signal.signal(signal.SIGTERM, save)
Path(f"rank-{rank}").write_text(str(os.getpid()))
while not Path("rank-0").exists() or not Path("rank-1").exists(): time.sleep(0.05)
"""


class Job:
    """A kept torchrun with two ranks that do something."""

    def __init__(self, folder: Path, work: str) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        (folder / "rank.py").write_text(RANK + work)
        order = JobSpec(
            run=folder, name="x", site=SiteSection(), groups=[NodeGroup(1, 2)], command=[sys.executable, "rank.py"],
            workdir=str(folder), python=sys.executable, submitted="now",
        )  # fmt: skip
        source = {"PYTHONPATH": str(Path(torchrun.__file__).parents[2])}
        self.process = preloaded.Popen(
            local.torchrun_command(order), cwd=folder, env=os.environ | source, stderr=subprocess.PIPE, text=True
        )

    def until_ranks_run(self) -> list[int]:
        files = [self.folder / f"rank-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def end(self) -> tuple[int, str]:
        reported = self.process.communicate(timeout=600)[1]
        wait_until(lambda: not self.left(), 60)
        log = (self.folder / "logs" / f"{socket.gethostname()}.err").read_text()
        assert reported in log
        return self.process.returncode, reported

    def left(self) -> list[int]:
        """Processes that stand in the job's folder."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cwd").readlink() == self.folder and "Z" not in (entry / "stat").read_text().split()[2]:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


def wait_until(holds, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "this did not come about in time"
        time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    jobs: list[Job] = []

    def start(work: str) -> Job:
        jobs.append(Job(tmp_path, work))
        return jobs[-1]

    yield start
    for job in jobs:
        kill(job.process)
        for number in job.left():
            os.kill(number, signal.SIGKILL)


def test_the_script_of_a_local_run_is_a_line_of_torchrun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from steelyard.core.recipe import load_recipe

    recipe = load_recipe("quickstart", ["parallel.tensor=2"])
    [script] = preview(SubmitRequest("local", SiteSection(), recipe))[0]["scripts"].values()
    words = shlex.split(script.splitlines()[-1])
    assert {"torch.distributed.run", "--standalone", "--nproc-per-node=2"} <= set(words)
    [script] = preview(SubmitRequest("local", SiteSection(port=23456), recipe))[0]["scripts"].values()
    assert "--master-port=23456" in shlex.split(script.splitlines()[-1])
    [script] = preview(SubmitRequest("local", SiteSection(), words=["doctor"]))[0]["scripts"].values()
    assert "torch" not in script  # Doctor runs where there is none.


@pytest.mark.slow
def test_a_request_to_stop_lets_every_rank_save(start):
    job = start("time.sleep(99)")
    job.until_ranks_run()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == (130, "note: interrupted; saved\n")
    assert {path.name for path in job.folder.glob("saved-*")} == {"saved-0", "saved-1"}


@pytest.mark.slow
def test_the_rank_that_failed_is_named_and_not_those_that_noticed(start):
    job = start(
        "if rank: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(1); end('Fault', 'x', 1, True)"
    )
    assert job.end() == (1, "error: rank 1 was killed by SIGKILL\n  out of memory? see dmesg\n")


@pytest.mark.slow
def test_a_rank_that_stopped_answering_is_named_and_ended(start):
    job = start("if rank: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1); end('LostPeer', 'timed out', 1, True)")
    job.until_ranks_run()
    assert job.end() == (1, "error: rank 1 stopped responding, and the other ranks timed out\n")


@pytest.mark.slow
def test_when_the_keeper_is_killed_torchrun_and_the_ranks_die(start):
    job = start("time.sleep(99)")
    job.until_ranks_run()
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not job.left(), 60)


def test_a_torchrun_that_cannot_start_is_told(tmp_path, capfd):
    (tmp_path / "logs").mkdir()
    code = torchrun.main(["--run", str(tmp_path), "--ranks", "2", "--", "sh", "-c", "echo no torch here; exit 7"])
    assert code == 1
    assert capfd.readouterr().err == "error: torchrun ended with exit code 7 before any rank did\n  | no torch here\n"
