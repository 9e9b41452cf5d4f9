"""What the starters of single ranks under torchrun and the one who keeps torchrun tell each other, in a folder.

    asked         one line for each request to stop, the number of its signal
    end-3.json    how rank 3 ended, which its starter leaves: what blame asks for, and the rank's last lines

torchrun ends the ranks 30 s after it was told to stop, in the middle of a checkpoint if need be, and at once when one
of them fails; its own exit code is 1 whatever happened. So requests go past it through the folder, and a SIGTERM of
torchrun's means that another rank has failed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from steelyard.core import files
from steelyard.core.errors import Interrupted
from steelyard.core.host import die_with_parent
from steelyard.core.safe_parse import loads
from steelyard.launch.error_file import ErrorRecord
from steelyard.launch.root_cause import RankExit

FOLDER = "STEELYARD_KEPT"  # the variable that names it
ASKED = "asked"
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_PARENTS = 1.0


@dataclass(frozen=True)
class RankReport:
    """What a starter left."""

    end: RankExit
    is_hung: bool
    last: list[str]


def is_kept() -> bool:
    """Whether this starter is one of torchrun's, which someone keeps."""
    return FOLDER in os.environ


def requests(signals: list[int], stack: ExitStack) -> tuple[list[int], list[int]]:
    """Where requests to stop will stand, and where word that another rank has failed."""
    if not is_kept():
        return signals, []
    asked: list[int] = []
    is_over = threading.Event()
    thread = threading.Thread(target=_listen, args=(asked, is_over), daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)
    return asked, signals


def _listen(asked: list[int], is_over: threading.Event) -> None:
    path = Path(os.environ[FOLDER]) / ASKED
    while not is_over.wait(SECONDS_BETWEEN_LOOKS):
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        asked.extend(int(line) for line in lines[len(asked) :])


def leave(end: RankExit, is_hung: bool, last: list[str]) -> int:
    """Leave word of a rank's end; returns what its starter exits with.

    A rank that saved and stopped has not failed: torchrun would end the others, which may still be writing.
    """
    words = None if end.words is None else asdict(end.words)
    value = {"rank": end.rank, "code": end.code, "at": end.at, "sent": sorted(end.sent), "words": words}
    path = Path(os.environ[FOLDER]) / f"end-{end.rank}.json"
    files.write_json(path, value | {"hung": is_hung, "last": last})
    has_stopped = end.is_stopped or (end.words is not None and end.words.kind == Interrupted.__name__)
    return 0 if has_stopped and not is_hung else int(end.code != 0)


def found(folder: Path, rank: int) -> RankReport | None:
    """What the starter of a rank left; None where it had no time to."""
    try:
        value = loads((folder / f"end-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    words = None if value["words"] is None else ErrorRecord(**value["words"])
    end = RankExit(value["rank"], value["code"], value["at"], frozenset(value["sent"]), words)
    return RankReport(end, value["hung"], value["last"])


def end_with_torchrun() -> None:
    """Have the kernel kill this starter, and so its rank, when torchrun dies; torchrun itself does not ask for it."""
    ask = die_with_parent(os.getppid())
    if ask is not None:
        ask()


def end_with_parent() -> None:
    """End this starter, and so its rank, when mpirun is killed, which then tells nobody.

    The kernel would do so already when the thread of mpirun's ends that started it, so it is looked for instead.
    """
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_PARENTS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def killed(rank: int, at: float) -> RankExit:
    """A rank whose starter left no word."""
    return RankExit(rank, -signal.SIGKILL, at, frozenset(), None)
