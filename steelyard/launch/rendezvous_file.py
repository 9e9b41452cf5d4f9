"""How the nodes of a job learn where their ranks meet: through the run folder, which all of them see.

    launch/meeting.json     {"attempt": "123.0", "address": "a1", "followers": ["124.0"]}, by the node of rank 0
    launch/arrived-1.json   {"attempt": "124.0"}: the first node of follower job 1 is there, and waits
    launch/met-123.0        a master or follower has met the others: the attempts of all of them, one on each line
    launch/stopped-123.0    the ranks saved and stopped because they were asked to
    launch/lost-123.0       of a master and followers: ranks here noticed the loss of others, and
    launch/failed-123.0     ranks here failed by themselves

An attempt is a job and how often it was started again, and so tells this meeting from the last. A master and its
followers are several jobs, which start at different times and count their restarts for themselves. What an earlier
follower has left is not believed: the master takes away what it finds, and a follower that is alive says it again. A
follower believes only a meeting that names its own attempt.

No port is written. Ranks ask rank 0 for its port under the name of the attempt (`parallel/port_discovery.py`); rank 0
binds a free one itself, since a port chosen here could be taken by the time torch has been imported.
"""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure
from steelyard.core.safe_parse import loads
from steelyard.launch.backends import Place
from steelyard.launch.launch_record import FOLDER

MEETING, ARRIVED, MET, STOPPED, LOST, FAILED = "meeting.json", "arrived-", "met-", "stopped-", "lost-", "failed-"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BETWEEN_LOOKS_OF_FOLLOWERS = 1.0  # They may look for hours.
SECONDS_TO_ARRIVE = 600.0  # For nodes of one job, which start together.


def meet(
    run: Path,
    attempt: str,
    node: int,
    group: int | None,
    followers: int,
    asked: list[int],
    stack: ExitStack,
    place: Place = Place(),  # noqa: B008
) -> tuple[str, str] | None:
    """The address of rank 0, and under which name to ask there; None when asked to stop before they were known.

    `node` counts through all jobs of the run, `place` says which node of its own job this is.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    if node == 0:
        found = _call(folder, attempt, followers, asked, place.address or socket.gethostname())
    else:
        arrived = folder / f"{ARRIVED}{group}.json" if group and place.node == 0 else None
        if arrived is not None:
            stack.callback(lambda: arrived.unlink(missing_ok=True))
        found = _await_meeting(folder, attempt, arrived, asked, is_patient=followers > 0)
    if found is None:
        return None
    if group is not None and place.node == 0:
        attempts = [str(found["attempt"]), *map(str, found["followers"])]
        files.write_text(folder / f"{MET}{attempt}", "".join(f"{each}\n" for each in attempts))
    return str(found["address"]), str(found["attempt"])


def stopped(run: Path, attempt: str) -> int:
    """Leave word that the ranks were asked to stop, and did; returns what a node then exits with.

    A node that ends with an error has srun end the others at once, which may still be writing. So it is no error, and
    the script of the job looks for this word.
    """
    (run / FOLDER / f"{STOPPED}{attempt}").touch()
    return 0


def failed(run: Path, attempt: str, only_noticed: bool) -> None:
    """Leave word whether ranks here failed by themselves, for the script of one of several jobs."""
    with suppress(OSError):  # The disk may be what failed them.
        (run / FOLDER / f"{LOST if only_noticed else FAILED}{attempt}").touch()


def _call(folder: Path, attempt: str, followers: int, asked: list[int], address: str) -> dict[str, Any] | None:
    """Wait for all followers and tell where to meet."""
    (folder / MEETING).unlink(missing_ok=True)
    places = [folder / f"{ARRIVED}{number}.json" for number in range(1, followers + 1)]
    for place in places:
        place.unlink(missing_ok=True)
    while not all(arrived := [_read(place, "attempt") for place in places]):
        if asked:
            return None
        _look_again(folder)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    there = [str(each["attempt"]) for each in arrived if each]
    found = {"attempt": attempt, "address": address, "followers": there}
    files.write_json(folder / MEETING, found)
    return found


def _await_meeting(
    folder: Path, attempt: str, arrived: Path | None, asked: list[int], is_patient: bool
) -> dict[str, Any] | None:
    """Wait for the node of rank 0; with followers, of which any may be queued, for as long as it takes."""
    deadline = time.monotonic() + SECONDS_TO_ARRIVE
    while not asked:
        names = _look_again(folder)
        if arrived is not None and arrived.name not in names:
            files.write_json(arrived, {"attempt": attempt})
        found = _read(folder / MEETING, "attempt", "address", "followers")
        if found and attempt in (found["attempt"], *found["followers"]):
            return found
        if not is_patient and time.monotonic() > deadline:
            raise RuntimeFailure(
                f"the node of rank 0 did not say where to meet within {SECONDS_TO_ARRIVE:.0f} s",
                hint=f"see its log, and whether all nodes see {folder}",
            )
        time.sleep(SECONDS_BETWEEN_LOOKS_OF_FOLLOWERS if is_patient else SECONDS_BETWEEN_LOOKS)
    return None


def _look_again(folder: Path) -> set[str]:
    """What lies in the folder; being asked, a network filesystem looks again."""
    with suppress(OSError):
        return {path.name for path in folder.iterdir()}
    return set()


def _read(path: Path, *keys: str) -> dict[str, Any] | None:
    try:
        found = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and set(keys) <= found.keys() else None
