"""Communication through a folder between the process that runs torchrun and the node agents of single ranks.

    asked         one line per stop request: the number of its signal
    end-3.json    how rank 3 ended, written by its node agent: the fields of `RankExit`, and the rank's last lines

torchrun kills the ranks 30 s after a stop signal, even in the middle of a checkpoint, and at once when one of them
fails. Its own exit code is always 1. So stop requests bypass it through the folder, and a SIGTERM from torchrun means
that another rank has failed.
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
from steelyard.core.safe_parse import read_object
from steelyard.launch.error_file import ErrorRecord
from steelyard.launch.root_cause import RankExit

FOLDER = "STEELYARD_TORCHRUN_FOLDER"  # the environment variable with its path
ASKED = "asked"
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_BETWEEN_PARENTS = 1.0


@dataclass(frozen=True)
class RankReport:
    """What a node agent wrote about its rank."""

    end: RankExit
    is_hung: bool
    last: list[str]


def is_under_torchrun() -> bool:
    """Whether this node agent was started by a torchrun that `launch/torchrun.py` runs."""
    return FOLDER in os.environ


def requests(signals: list[int], stack: ExitStack) -> tuple[list[int], list[int]]:
    """A list that collects stop requests, and a list that becomes non-empty when another rank has failed."""
    if not is_under_torchrun():
        return signals, []
    received: list[int] = []
    is_over = threading.Event()
    thread = threading.Thread(target=_listen, args=(received, is_over), daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(is_over.set)
    return received, signals


def _listen(received: list[int], is_over: threading.Event) -> None:
    path = Path(os.environ[FOLDER]) / ASKED
    while not is_over.wait(SECONDS_BETWEEN_LOOKS):
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        received.extend(int(line) for line in lines[len(received) :])


def leave(end: RankExit, is_hung: bool, last: list[str]) -> int:
    """Write how a rank ended. Returns the exit code of its node agent.

    A rank that saved and stopped has not failed: otherwise torchrun would kill the others, which may still be writing.
    """
    words = None if end.words is None else asdict(end.words)
    value = {"rank": end.rank, "code": end.code, "at": end.at, "sent": sorted(end.sent), "words": words}
    path = Path(os.environ[FOLDER]) / f"end-{end.rank}.json"
    files.write_json(path, value | {"hung": is_hung, "last": last})
    has_stopped = end.is_stopped or (end.words is not None and end.words.kind == Interrupted.__name__)
    return 0 if has_stopped and not is_hung else int(end.code != 0)


def found(folder: Path, rank: int) -> RankReport | None:
    """What the node agent of a rank wrote; None if it was killed before."""
    value = read_object(folder / f"end-{rank}.json")
    if not value:
        return None
    words = None if value["words"] is None else ErrorRecord(**value["words"])
    end = RankExit(value["rank"], value["code"], value["at"], frozenset(value["sent"]), words)
    return RankReport(end, value["hung"], value["last"])


def end_with_torchrun() -> None:
    """Have the kernel kill this node agent, and so its rank, when torchrun dies. torchrun does not request this."""
    ask = die_with_parent(os.getppid())
    if ask is not None:
        ask()


def end_with_parent() -> None:
    """End this node agent, and so its rank, when mpirun is killed: a killed mpirun does not signal its ranks.

    The parent is polled. PR_SET_PDEATHSIG would fire as soon as the thread of mpirun ends that started this process.
    """
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_PARENTS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def killed(rank: int, at: float) -> RankExit:
    """The exit of a rank whose node agent wrote nothing."""
    return RankExit(rank, -signal.SIGKILL, at, frozenset(), None)
