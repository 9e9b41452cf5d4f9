"""Which rank's error is the one to tell: the first that is not the mere consequence of another."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.core.errors import Interrupted, RuntimeFailure
from steelyard.launch.error_file import ErrorRecord


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: `code` is negative for a signal, `sent` are the signals it had from the launcher."""

    rank: int
    code: int
    at: float
    sent: frozenset[int]
    words: ErrorRecord | None

    @property
    def is_stopped(self) -> bool:
        """Whether it ended because the launcher said so, and not for a reason that it had left word of before."""
        if self.words is None or self.words.lost_peer:
            return -self.code in self.sent
        return self.words.kind == Interrupted.__name__ and bool(self.sent)

    @property
    def only_noticed(self) -> bool:
        """Whether it ended because another was gone. NCCL's watchdog does not raise then, it aborts."""
        return self.code == -signal.SIGABRT if self.words is None else self.words.lost_peer


@dataclass(frozen=True)
class RootCause:
    """What a person is told, and what the job exits with."""

    rank: int
    message: str
    exit_code: int
    has_words: bool


def blame(ends: Sequence[RankExit], hung: Sequence[int], was_asked: bool) -> RootCause | None:
    """The cause of a job's end; None when nothing failed."""
    failed = [end for end in ends if end.code and not end.is_stopped]
    causes = [end for end in failed if not end.only_noticed]
    if causes:
        return _cause(min(causes, key=_order))
    stopped = [end for end in ends if end.is_stopped]
    if was_asked and stopped:
        reported = next((end.words.message for end in stopped if end.words), "interrupted")
        return RootCause(0, reported, Interrupted.exit_code, has_words=True)
    if hung:
        who = f"rank {hung[0]}" if len(hung) == 1 else f"ranks {', '.join(map(str, hung))}"
        message = f"{who} stopped answering, and the others gave up waiting"
        return RootCause(hung[0], message, RuntimeFailure.exit_code, has_words=False)
    return _cause(min(failed, key=_order)) if failed else None


def only_noticed(ends: Sequence[RankExit]) -> bool:
    """Whether ranks failed, and none of them for a reason of its own."""
    failed = [end for end in ends if end.code and not end.is_stopped]
    return bool(failed) and all(end.only_noticed for end in failed)


def _order(end: RankExit) -> tuple[bool, float, int]:
    """A shared error is told by rank 0, who found it; others by who was first."""
    if end.words is None:
        return False, end.at, end.rank
    return end.words.shared, 0.0 if end.words.shared else end.words.time, end.rank


def _cause(end: RankExit) -> RootCause:
    words = end.words
    if words is not None:
        alone = words.shared or words.kind == Interrupted.__name__
        message = words.message if alone else f"rank {end.rank}: {words.message}"
        return RootCause(end.rank, message, words.exit_code, has_words=True)
    if end.code < 0:
        name = signal.Signals(-end.code).name
        hint = "\n  out of memory? see dmesg" if -end.code == signal.SIGKILL else ""
        return RootCause(
            end.rank, f"rank {end.rank} was killed by {name}{hint}", RuntimeFailure.exit_code, has_words=False
        )
    return RootCause(end.rank, f"rank {end.rank} ended with exit code {end.code}", end.code, has_words=False)
