"""A node agent that is a fork of a loaded process, as on the lab's Slurm, gets signals and ends like any other."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import preloaded

RANK = "trap 'echo asked; exit 3' TERM; echo $PPID >agent; while :; do sleep 0.1; done"


def until(holds, what: str) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "kills_fork"), [(signal.SIGTERM, False), (signal.SIGKILL, False), (signal.SIGKILL, True)]
)
def test_a_forked_agent_gets_signals_and_ends_with_the_process_it_stands_for(tmp_path, number, kills_fork):
    (tmp_path / "logs").mkdir()  # As in every run folder.
    with preloaded.loaded_host(tmp_path / "warm") as (loaded, variables):
        agent = subprocess.Popen(
            [sys.executable, "-P", "-m", "steelyard.launch.node_agent", "--run", ".", "--", "bash", "-c", RANK],
            cwd=tmp_path, env=os.environ | variables,
        )  # fmt: skip
        until(lambda: (tmp_path / "agent").is_file() and (tmp_path / "agent").read_text(), "the rank")
        fork = int((tmp_path / "agent").read_text())
        assert fork != agent.pid
        assert parent_of(fork) == loaded
        os.kill(fork if kills_fork else agent.pid, number)
        assert agent.wait(timeout=120) == (3 if number == signal.SIGTERM else -signal.SIGKILL)
        until(lambda: not Path(f"/proc/{fork}").exists(), "the end of the fork")
        if number == signal.SIGTERM:
            assert "asked" in "".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))
