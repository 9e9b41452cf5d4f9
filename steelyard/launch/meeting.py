"""How the nodes of a job learn where their ranks meet: through the run folder, which all of them see.

    launch/meeting.json     {"attempt": "123.0", "address": "a1", "port": 23456}, written by the node of rank 0
    launch/arrived-1.json   {"attempt": ...}: the first node of follower job 1 is there, and waits
    launch/stopped-123.0    the ranks saved and stopped because they were asked to

Within one job the attempt (job and restart) tells this meeting from the last. A master and its followers are several
jobs, which start at different times and count their restarts for themselves: there the master waits until every
follower has arrived, and a follower believes the address only once someone listens there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import Fault
from steelyard.launch.local import free_port
from steelyard.launch.record import FOLDER

MEETING, STOPPED = "meeting.json", "stopped-"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_ARRIVE = 600.0  # For nodes of one job, which start together.
choose_port = free_port


def meet(
    run: Path, attempt: str, node: int, group: int | None, followers: int, port: int | None, asked: list[int],
    stack: ExitStack,
) -> tuple[str, int] | None:  # fmt: skip
    """Address and port of rank 0; None when asked to stop before they were known."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    if node == 0:
        if followers and not _await_followers(folder, followers, asked):
            return None
        found = {"attempt": attempt, "address": _own_name(), "port": port or free_port()}
        files.write_json(folder / MEETING, found)
        return str(found["address"]), int(str(found["port"]))
    if group:
        arrived = folder / f"arrived-{group}.json"
        if os.environ.get("SLURM_PROCID", "0") == "0":
            files.write_json(arrived, {"attempt": attempt})
            stack.callback(lambda: arrived.unlink(missing_ok=True))
    return _await_meeting(folder / MEETING, attempt if not group else None, asked, is_patient=followers > 0)


def stopped(run: Path, attempt: str) -> int:
    """Leave word that the ranks were asked to stop, and did; returns what a node then exits with.

    A node that ends with an error has srun end the others at once, which may still be writing. So it is no error, and
    the script of the job looks for this word.
    """
    (run / FOLDER / f"{STOPPED}{attempt}").touch()
    return 0


def _await_followers(folder: Path, followers: int, asked: list[int]) -> bool:
    (folder / MEETING).unlink(missing_ok=True)
    while not all((folder / f"arrived-{number}.json").exists() for number in range(1, followers + 1)):
        if asked:
            return False
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return True


def _await_meeting(path: Path, attempt: str | None, asked: list[int], is_patient: bool) -> tuple[str, int] | None:
    """Wait for the node of rank 0; with followers, of which any may be queued, for as long as it takes."""
    deadline = time.monotonic() + SECONDS_TO_ARRIVE
    while not asked:
        with suppress(OSError):
            next(path.parent.iterdir(), None)  # Has a network filesystem look again.
        found = _read(path)
        if found and attempt == found["attempt"]:
            return str(found["address"]), int(found["port"])
        if found and attempt is None and _listens(found):
            return str(found["address"]), int(found["port"])
        if not is_patient and time.monotonic() > deadline:
            raise Fault(
                f"the node of rank 0 did not say where to meet within {SECONDS_TO_ARRIVE:.0f} s",
                mend=f"see its log, and whether all nodes see {path.parent}",
            )
        time.sleep(SECONDS_BETWEEN_LOOKS if attempt else 1.0)
    return None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"attempt", "address", "port"} <= found.keys() else None


def _listens(found: dict[str, Any]) -> bool:
    try:
        with socket.create_connection((str(found["address"]), int(found["port"])), timeout=2):
            return True
    except OSError:
        return False


def _own_name() -> str:
    """The name by which the scheduler, and so every node, knows this one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
