"""One process that supervises the ranks of a run on this machine, in the place of a scheduler.

Backends without a scheduler start it in a session of its own, so that it outlives the terminal. It starts the run's
script, passes signals on, and writes how it ended to `launch/ended.json`:

    {"state": "finished", "exit_code": 0, "elapsed": 12, "time": ISO}

A process is known by its number, the moment it started and its host: numbers are used again, and shared folders are
read from other machines.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from steelyard.core import files
from steelyard.core.errors import Interrupted, UserError
from steelyard.core.host import die_with_parent
from steelyard.core.run import now
from steelyard.core.safe_parse import loads
from steelyard.launch.backends import JobState, Record, neutral
from steelyard.launch.launch_record import FOLDER, Launch
from steelyard.launch.rendezvous_file import STOPPED

ENDED = "ended.json"
SECONDS_TO_SAVE = 30.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
HERE = "here"  # The attempt of ranks that mpirun starts, for the word that they were asked to stop and did.
START_TIME = 19  # Field 22 of /proc/PID/stat, counted behind the name, which may hold anything.


def start(run: Path, command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Start a supervisor for a command and return who it is."""
    (run / FOLDER).mkdir(exist_ok=True)
    (run / FOLDER / ENDED).unlink(missing_ok=True)
    with open(run / "logs" / "launcher.log", "ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "steelyard.launch.supervisor", str(run.resolve()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    return {"pid": child.pid, "started": started(child.pid), "host": socket.gethostname()}


def started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since the machine did; None for a process that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[START_TIME])


def is_alive(who: dict[str, Any]) -> bool | None:
    """Whether it still runs; None when that cannot be seen from this machine."""
    if who.get("host") != socket.gethostname():
        return None
    return who.get("started") is not None and started(int(who["pid"])) == who["started"]


def ended(run: Path) -> dict[str, Any] | None:
    """How a supervisor ended, if it has."""
    try:
        found = loads((run / FOLDER / ENDED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return neutral(found) if isinstance(found, dict) and {"state", "exit_code", "elapsed"} <= found.keys() else None


def note_end(run: Path, state: str, code: int, elapsed: int | None) -> None:
    """Write down how it ended."""
    with suppress(OSError):  # A full disk; whoever looks will see that the process is gone.
        files.write_json(run / FOLDER / ENDED, {"state": state, "exit_code": code, "elapsed": elapsed, "time": now()})


def stop(who: dict[str, Any], number: int = signal.SIGTERM) -> bool:
    """Send a signal to the very process that was started; returns whether it was still there."""
    if not is_alive(who):
        return False
    with suppress(ProcessLookupError):
        os.kill(int(who["pid"]), number)
    return True


def poll(run: Path, launch: Launch) -> Record:
    """The state of a supervisor on this machine, or of one elsewhere as far as it has said it."""
    who, how = launch.process or {}, ended(run)
    record = {
        "job": launch.jobs[0] if launch.jobs else "0", "state": JobState.RUNNING, "reason": "",
        "nodes": str(who.get("host", "")), "exit_code": None, "elapsed": None, "time_limit": None, "restarts": 0,
    }  # fmt: skip
    if how is not None:
        return record | {key: how[key] for key in ("state", "exit_code", "elapsed")}
    alive = is_alive(who)
    if alive is None:
        return record | {"reason": f"supervised on {who.get('host')}, which is not this machine"}
    if alive:
        return record
    return record | {"state": JobState.FAILED, "reason": "its supervisor was killed, or the machine went down"}


def cancel(run: Path, launch: Launch, number: int) -> None:
    """Send a signal to the supervisor of a launch, and give the ranks time to save."""
    who = launch.process or {}
    if is_alive(who) is None:
        raise UserError(f"its supervisor runs on {who.get('host')}", hint="cancel it there")
    stop(who, number)
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while is_alive(who) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not is_alive(who) and ended(run) is None:  # It had no time to say so itself.
        note_end(run, JobState.CANCELLED, 128 + number, None)


def main(arguments: list[str]) -> int:
    """Supervise: `python -m steelyard.launch.supervisor RUN COMMAND...`."""
    run, command = Path(arguments[0]), arguments[1:]
    began, asked = time.monotonic(), []
    stopped = run / FOLDER / f"{STOPPED}{HERE}"
    stopped.unlink(missing_ok=True)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent())

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        with suppress(ProcessLookupError):
            child.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    code = child.wait()
    code = 128 - code if code < 0 else Interrupted.exit_code if code == 0 and stopped.exists() else code
    is_cancelled = asked and code >= Interrupted.exit_code - 2
    state = JobState.FINISHED if code == 0 else JobState.CANCELLED if is_cancelled else JobState.FAILED
    elapsed = round(time.monotonic() - began)
    note_end(run, state, code, elapsed)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
