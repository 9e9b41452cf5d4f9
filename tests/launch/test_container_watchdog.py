"""A container ends with whoever waits for it. Here a process in a session of its own stands in for one."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.launch import site_environment

pytestmark = pytest.mark.timeout(60)
# The client of a runtime: what it starts is no child of its and has what the client holds, as Podman's does.
CLIENT = """setsid "$1" -c 'from steelyard.launch import site_environment; import time, pathlib, os
site_environment.hold(1.0)
pathlib.Path("inside").write_text(str(os.getpid()))
time.sleep(60)' </dev/null >/dev/null 2>&1 &
touch started
while :; do sleep 0.05; done
"""


def until(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("killed", ["the keeper", "the client"])
def test_who_is_inside_dies_when_the_client_or_its_keeper_is_killed(tmp_path, killed):
    words = site_environment.with_watchdog(["bash", "-c", CLIENT, "client", sys.executable], str(tmp_path))
    keeper = subprocess.Popen(words, cwd=tmp_path)
    until(lambda: (tmp_path / "inside").exists() and (tmp_path / "inside").read_text())
    inside = int((tmp_path / "inside").read_text())
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    client = int(children[0])
    try:
        assert is_alive(inside)
        subprocess.run(["kill", "-KILL", str(keeper.pid if killed == "the keeper" else client)], check=True)
        until(lambda: not is_alive(inside))
        until(lambda: not list(tmp_path.glob("alive.*")))
    finally:
        subprocess.run(["kill", "-KILL", str(client), str(inside)], capture_output=True)
        keeper.kill()
        keeper.wait()


def test_it_ends_with_a_parent_that_was_killed(tmp_path):
    words = site_environment.with_watchdog(["sh", "-c", "echo $PPID > keeper; exec sleep 30"], str(tmp_path))
    parent = subprocess.Popen(["sh", "-c", '"$@" & wait', "mpirun", *words], cwd=tmp_path)
    until(lambda: (tmp_path / "keeper").exists() and (tmp_path / "keeper").read_text().strip())
    keeper = int((tmp_path / "keeper").read_text())
    [client, *_] = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    parent.kill()
    parent.wait()
    try:
        until(lambda: not is_alive(keeper))
    finally:
        subprocess.run(["kill", "-KILL", str(keeper), client], capture_output=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 15), (signal.SIGINT, 15), (signal.SIGUSR1, 10)])
def test_signals_reach_the_client_and_its_exit_code_comes_back(tmp_path, number, code):
    traps = "trap 'exit 15' TERM; trap 'exit 10' USR1; touch started; while :; do sleep 0.02; done"
    keeper = subprocess.Popen(site_environment.with_watchdog(["bash", "-c", traps], str(tmp_path)), cwd=tmp_path)
    until(lambda: (tmp_path / "started").exists())
    keeper.send_signal(number)
    assert keeper.wait(timeout=150) == code
    assert not list(tmp_path.glob("alive.*"))


def test_without_a_pipe_the_client_runs_all_the_same(tmp_path):
    command = site_environment.with_watchdog(
        ["sh", "-c", "echo ${STEELYARD_LIFELINE-none}; exit 3"], f"{tmp_path}/gone"
    )
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("none\n", 3), done.stderr
