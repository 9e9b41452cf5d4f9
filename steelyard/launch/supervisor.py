"""One process that supervises the ranks of a run on this machine, instead of a scheduler.

Backends without a scheduler start it in its own session, so that it outlives the terminal. It starts the run's script,
forwards signals, and writes how the script ended to `launch/ended.json`:

    {"state": "finished", "exit_code": 0, "elapsed": 12, "time": ISO}

A process is identified by its pid, start time and host: pids are reused, and shared folders are read from other
machines.
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
from steelyard.core.safe_parse import read_object
from steelyard.launch.backends import JobState, Record, neutral
from steelyard.launch.launch_record import FOLDER, Launch
from steelyard.launch.rendezvous_file import STOPPED

ENDED = "ended.json"
SECONDS_TO_SAVE = 30.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
HERE = "here"  # The attempt of ranks that mpirun starts, for the file that says that they stopped on request.
START_TIME = 19  # Field 22 of /proc/PID/stat, counted after the process name, which may contain anything.


def start(run: Path, command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Start a supervisor for a command. Returns its pid, start time and host."""
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
    """The start time of a process in kernel ticks since boot; None if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[START_TIME])


def is_alive(process: dict[str, Any]) -> bool | None:
    """Whether the supervisor still runs; None if this machine cannot know."""
    if process.get("host") != socket.gethostname():
        return None
    return process.get("started") is not None and started(int(process["pid"])) == process["started"]


def ended(run: Path) -> dict[str, Any] | None:
    """How a supervisor ended; None if it has not ended."""
    found = read_object(run / FOLDER / ENDED)
    return neutral(found) if {"state", "exit_code", "elapsed"} <= found.keys() else None


def note_end(run: Path, state: str, code: int, elapsed: int | None) -> None:
    """Write how the script ended."""
    with suppress(OSError):  # A full disk; readers notice that the process does not exist.
        files.write_json(run / FOLDER / ENDED, {"state": state, "exit_code": code, "elapsed": elapsed, "time": now()})


def stop(process: dict[str, Any], number: int = signal.SIGTERM) -> bool:
    """Send a signal to exactly the process that was started. Returns whether it still ran."""
    if not is_alive(process):
        return False
    with suppress(ProcessLookupError):
        os.kill(int(process["pid"]), number)
    return True


def poll(run: Path, launch: Launch) -> Record:
    """The state of a supervisor on this machine; for another machine, what it has written so far."""
    process, how = launch.process or {}, ended(run)
    record = {
        "job": launch.jobs[0] if launch.jobs else "0", "state": JobState.RUNNING, "reason": "",
        "nodes": str(process.get("host", "")), "exit_code": None, "elapsed": None, "time_limit": None, "restarts": 0,
    }  # fmt: skip
    if how is not None:
        return record | {key: how[key] for key in ("state", "exit_code", "elapsed")}
    alive = is_alive(process)
    if alive is None:
        return record | {"reason": f"supervised on {process.get('host')}, which is not this machine"}
    if alive:
        return record
    return record | {"state": JobState.FAILED, "reason": "its supervisor was killed, or the machine went down"}


def cancel(run: Path, launch: Launch, number: int) -> None:
    """Send a signal to the supervisor of a launch and wait while the ranks save."""
    process = launch.process or {}
    if is_alive(process) is None:
        raise UserError(f"its supervisor runs on {process.get('host')}", hint="cancel it there")
    stop(process, number)
    deadline = time.monotonic() + SECONDS_TO_SAVE
    while is_alive(process) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not is_alive(process) and ended(run) is None:  # It was killed before it could write the file.
        note_end(run, JobState.CANCELLED, 128 + number, None)


def main(arguments: list[str]) -> int:
    """Supervise: `python -m steelyard.launch.supervisor RUN COMMAND...`."""
    run, command = Path(arguments[0]), arguments[1:]
    began, received = time.monotonic(), []
    stopped = run / FOLDER / f"{STOPPED}{HERE}"
    stopped.unlink(missing_ok=True)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent())

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        with suppress(ProcessLookupError):
            child.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    code = child.wait()
    code = 128 - code if code < 0 else Interrupted.exit_code if code == 0 and stopped.exists() else code
    is_cancelled = received and code >= Interrupted.exit_code - 2
    state = JobState.FINISHED if code == 0 else JobState.CANCELLED if is_cancelled else JobState.FAILED
    elapsed = round(time.monotonic() - began)
    note_end(run, state, code, elapsed)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
