"""Files between the supervisor of an elastic run and its node agents, in `launch/` of the run folder.

    request-123.0.2     "save" or "end", written by the supervisor: the ranks save and stop, or are killed
    clock               touched by the supervisor every two seconds: nodes whose supervisor is gone end their ranks
    end-123.0.2-a1      how the ranks of a node ended, written by its agent: the fields of `NodeEnd` as JSON

The run folder reaches every node, also one whose connection to the scheduler is lost.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from steelyard.core import files
from steelyard.core.errors import Interrupted
from steelyard.core.safe_parse import read_object
from steelyard.launch.launch_record import FOLDER

REQUEST, END, CLOCK = "request-", "end-", "clock"
SAVE, KILL = "save", "end"
SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_TO_WRITE = 30.0  # how a node ended, on a disk that is full
SUPERVISOR_LOST_AFTER = 30.0  # seconds without a touch of the clock, while this node touches its own file


@dataclass(frozen=True)
class NodeEnd:
    """The exit code of a node, whether its ranks only lost others, and its ranks that did not respond."""

    code: int
    only_noticed: bool = False
    hung: Sequence[int] = ()

    @property
    def has_stopped(self) -> bool:
        """Whether the ranks saved and stopped on request."""
        return self.code == Interrupted.exit_code

    @property
    def is_cause(self) -> bool:
        """Whether a rank failed on its own."""
        return self.code != 0 and not self.has_stopped and not self.only_noticed and not self.hung


class Requests:
    """The requests of the supervisor, as the node agent sees them while it watches its ranks."""

    def __init__(self, run: Path, attempt: str, stop_signals: list[int], alive: Path) -> None:
        self.path, self.stop_signals = run / FOLDER / f"{REQUEST}{attempt}", stop_signals
        self.is_orphan = False
        self._clock, self._alive = run / FOLDER / CLOCK, alive
        self._looked, self._saves = 0.0, False

    def is_over(self) -> bool:
        """Whether the ranks are to be killed. A request to save counts as a stop signal."""
        if time.monotonic() < self._looked + SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = time.monotonic()
        word = ""
        with suppress(OSError):
            word = self.path.read_text(encoding="ascii").strip()
        if word == SAVE and not self._saves:
            self._saves = True
            if not self.stop_signals:  # A second signal would end the ranks without a save.
                self.stop_signals.append(signal.SIGTERM)
        with suppress(OSError):
            self.is_orphan = self._alive.stat().st_mtime - self._clock.stat().st_mtime > SUPERVISOR_LOST_AFTER
        return word == KILL or self.is_orphan


def request(run: Path, attempt: str, word: str) -> None:
    """Ask all agents of an attempt to have their ranks save and stop, or to kill them."""
    files.write_text(run / FOLDER / f"{REQUEST}{attempt}", word)


def write(run: Path, attempt: str, node: str, end: NodeEnd) -> None:
    """Write how a node ended. If the disk stays full, the agent must exit: the supervisor sees that it is gone."""
    deadline = time.monotonic() + SECONDS_TO_WRITE
    while True:
        try:
            return files.write_json(run / FOLDER / f"{END}{attempt}-{node}", asdict(end))
        except OSError:
            if time.monotonic() > deadline:
                return None
        time.sleep(SECONDS_BETWEEN_LOOKS)


def read(run: Path, attempt: str, node: str) -> NodeEnd | None:
    """How a node ended; None if it has not ended."""
    try:
        return NodeEnd(**read_object(run / FOLDER / f"{END}{attempt}-{node}"))
    except TypeError:  # There is no complete record.
        return None
