"""Finds the root cause of a failed job: the first error of a rank that is not a consequence of another's."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.core.errors import Interrupted, RuntimeFailure
from steelyard.launch.error_file import ErrorRecord


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: `code` is negative for a signal, `sent` has the signals that the launcher sent it."""

    rank: int
    code: int
    at: float
    sent: frozenset[int]
    words: ErrorRecord | None

    @property
    def is_stopped(self) -> bool:
        """Whether it ended because the launcher stopped it, and not because of an error that it recorded before."""
        if self.words is None or self.words.lost_peer:
            return -self.code in self.sent
        return self.words.kind == Interrupted.__name__ and bool(self.sent)

    @property
    def only_noticed(self) -> bool:
        """Whether it ended because another rank was lost. NCCL's watchdog then aborts without an exception."""
        return self.code == -signal.SIGABRT if self.words is None else self.words.lost_peer


@dataclass(frozen=True)
class RootCause:
    """The message for the user, and the exit code of the job."""

    rank: int
    message: str
    exit_code: int
    has_words: bool


def find_root_cause(ends: Sequence[RankExit], hung: Sequence[int], was_asked: bool) -> RootCause | None:
    """The root cause of a job's end; None if nothing failed."""
    failed = [end for end in ends if end.code and not end.is_stopped]
    causes = [end for end in failed if is_own_failure(end)]
    if causes:
        return _cause(min(causes, key=_order))
    stopped = [end for end in ends if end.is_stopped]
    if was_asked and stopped:
        reported = next((end.words.message for end in stopped if end.words), "interrupted")
        return RootCause(0, reported, Interrupted.exit_code, has_words=True)
    if hung:
        who = f"rank {hung[0]}" if len(hung) == 1 else f"ranks {', '.join(map(str, hung))}"
        message = f"{who} stopped responding, and the other ranks timed out"
        return RootCause(hung[0], message, RuntimeFailure.exit_code, has_words=False)
    return _cause(min(failed, key=_order)) if failed else None


def is_own_failure(end: RankExit) -> bool:
    """Whether a rank failed, and not because it lost another one."""
    return bool(end.code) and not end.is_stopped and not end.only_noticed


def only_noticed(ends: Sequence[RankExit]) -> bool:
    """Whether ranks failed, all of them because they lost other ranks."""
    failed = [end for end in ends if end.code and not end.is_stopped]
    return bool(failed) and all(end.only_noticed for end in failed)


def _order(end: RankExit) -> tuple[bool, float, int]:
    """Sort key: rank 0 reports a shared error; otherwise the earliest error is the cause."""
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
