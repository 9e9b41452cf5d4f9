"""The rendezvous of the nodes of a job, through files in the run folder, which all nodes share.

    launch/rendezvous.json    {"attempt": "123.0", "address": "a1", "followers": ["124.0"]}, by the node of rank 0
    launch/arrived-1.json     {"attempt": "124.0"}: the first node of follower job 1 has started and waits
    launch/met-123.0          the rendezvous of a job is complete: the attempts of all jobs, one per line
    launch/stopped-123.0      the ranks saved and stopped after a stop signal
    launch/lost-123.0         ranks here failed because they lost other ranks
    launch/failed-123.0       ranks here failed on their own

An attempt is a job id and its restart count, which distinguishes this rendezvous from earlier ones. A master and its
followers are several jobs, which start at different times and count their restarts separately. Files of earlier
followers are not trusted: the master deletes them, and a running follower writes its file again. A follower accepts
only a rendezvous.json that contains its own attempt.

No port is written. Ranks ask rank 0 for its port under the name of the attempt (`parallel/port_discovery.py`). Rank 0
binds a free port itself, since a port chosen here could be in use by the time torch is imported.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure
from steelyard.core.safe_parse import read_object
from steelyard.launch.backends import Place
from steelyard.launch.launch_record import FOLDER

RENDEZVOUS, ARRIVED, MET, STOPPED, LOST, FAILED = "rendezvous.json", "arrived-", "met-", "stopped-", "lost-", "failed-"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_LOOKS_OF_FOLLOWERS = 1.0  # They may wait for hours.
SECONDS_TO_ARRIVE = 600.0  # for nodes of one job, which start together


def join(
    run: Path,
    attempt: str,
    node: int,
    group: int | None,
    followers: int,
    stop_signals: list[int],
    stack: ExitStack,
    place: Place = Place(),  # noqa: B008
) -> tuple[str, str] | None:
    """The address of rank 0 and the attempt to ask for there; None if a stop signal arrives first.

    `node` counts across all jobs of the run. `place` says which node of its own job this is.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    if node == 0:
        found = _publish(folder, attempt, followers, stop_signals, place.address or socket.gethostname())
    else:
        arrived = folder / f"{ARRIVED}{group}.json" if group and place.node == 0 else None
        if arrived is not None:
            stack.callback(lambda: arrived.unlink(missing_ok=True))
        found = _await_meeting(folder, attempt, arrived, stop_signals, is_patient=followers > 0)
    if found is None:
        return None
    if group is not None and place.node == 0:
        attempts = [str(found["attempt"]), *map(str, found["followers"])]
        files.write_text(folder / f"{MET}{attempt}", "".join(f"{each}\n" for each in attempts))
    return str(found["address"]), str(found["attempt"])


def stopped(run: Path, attempt: str) -> int:
    """Record that the ranks stopped after a stop signal. Returns the exit code of the node.

    The exit code is 0: srun kills the other nodes when one fails, and they may still be writing. The job script checks
    for the file instead.
    """
    (run / FOLDER / f"{STOPPED}{attempt}").touch()
    return 0


def failed(run: Path, attempt: str, only_noticed: bool) -> None:
    """Record whether ranks here failed on their own, for the job script: srun returns the highest exit code only."""
    with suppress(OSError):  # A full disk may be the reason for the failure.
        (run / FOLDER / f"{LOST if only_noticed else FAILED}{attempt}").touch()


def _publish(
    folder: Path, attempt: str, followers: int, stop_signals: list[int], address: str
) -> dict[str, Any] | None:
    """Wait for all followers and publish the address of rank 0."""
    (folder / RENDEZVOUS).unlink(missing_ok=True)
    places = [folder / f"{ARRIVED}{number}.json" for number in range(1, followers + 1)]
    for place in places:
        place.unlink(missing_ok=True)
    while not all(arrived := [_read(place, "attempt") for place in places]):
        if stop_signals:
            return None
        _list_folder(folder)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    there = [str(each["attempt"]) for each in arrived if each]
    found = {"attempt": attempt, "address": address, "followers": there}
    files.write_json(folder / RENDEZVOUS, found)
    return found


def _await_meeting(
    folder: Path, attempt: str, arrived: Path | None, stop_signals: list[int], is_patient: bool
) -> dict[str, Any] | None:
    """Wait for the node of rank 0. With followers there is no timeout, since any of the jobs may be queued."""
    deadline = time.monotonic() + SECONDS_TO_ARRIVE
    while not stop_signals:
        names = _list_folder(folder)
        if arrived is not None and arrived.name not in names:
            files.write_json(arrived, {"attempt": attempt})
        found = _read(folder / RENDEZVOUS, "attempt", "address", "followers")
        if found and attempt in (found["attempt"], *found["followers"]):
            return found
        if not is_patient and time.monotonic() > deadline:
            raise RuntimeFailure(
                f"the node of rank 0 did not publish its address within {SECONDS_TO_ARRIVE:.0f} s",
                hint=f"check its log, and whether all nodes see {folder}",
            )
        time.sleep(SECONDS_BETWEEN_LOOKS_OF_FOLLOWERS if is_patient else SECONDS_BETWEEN_LOOKS)
    return None


def _list_folder(folder: Path) -> set[str]:
    """The names in the folder. Listing it makes a network filesystem refresh its cache."""
    with suppress(OSError):
        return {path.name for path in folder.iterdir()}
    return set()


def _read(path: Path, *keys: str) -> dict[str, Any] | None:
    found = read_object(path)
    return found if set(keys) <= found.keys() else None
