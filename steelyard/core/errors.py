"""The two ways a command can fail, and how that reads.

A `UserError` is a mistake in what was asked for: it exits with 2 and says what is wrong, where, and how to mend it.
A `Fault` is the machine's or the work's: it exits with 1 and says what was saved. Anything else that escapes is a bug.
"""

from __future__ import annotations


class SteelyardError(Exception):
    """An error meant to be read by a person: a message, a place, and a way out."""

    exit_code = 1
    shared = False  # Whether every rank of the job raises it, so that rank 0 alone should tell it.

    def __init__(self, message: str, *, where: str | None = None, mend: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.mend = mend

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        way_out = f"\n  {self.mend}" if self.mend else ""
        return f"{place}{self.message}{way_out}"


class UserError(SteelyardError):
    """A mistake of the user's."""

    exit_code = 2


class CorruptFileError(UserError):
    """A file that is not as its writer left it. The user's, since only another copy of it will help."""

    def __init__(self, message: str, *, where: str | None = None, mend: str = "copy or download it again") -> None:
        super().__init__(message, where=where, mend=mend)


class RuntimeFailure(SteelyardError):
    """A fault of the machine or of the work itself."""

    exit_code = 1


class Interrupted(BaseException):
    """Ctrl-C. Not an `Exception`, so that no handler in between mistakes it for a failure."""

    exit_code = 130

    def __init__(self, saved: str = "") -> None:
        super().__init__(saved)
        self.saved = saved
