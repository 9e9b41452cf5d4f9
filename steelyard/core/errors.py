"""The two kinds of errors that a user sees. Any other exception that reaches the command line is a bug.

- `UserError`: wrong input or options. Exit code 2. The message has three parts: what is wrong, where, and a hint.
- `RuntimeFailure`: the machine or the run failed. Exit code 1. The message says what was saved.
"""

from __future__ import annotations


class SteelyardError(Exception):
    """An error with a message for the user: what is wrong, where, and a hint on what to do."""

    exit_code = 1
    shared = False  # Whether every rank of the job raises it, so that only rank 0 prints it.

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        hint = f"\n  hint: {self.hint}" if self.hint else ""
        return f"{place}{self.message}{hint}"


class UserError(SteelyardError):
    """Wrong input or options."""

    exit_code = 2


class CorruptFileError(UserError):
    """A file whose content does not match what was written. A `UserError`, since only another copy helps."""

    def __init__(self, message: str, *, where: str | None = None, hint: str = "copy or download it again") -> None:
        super().__init__(message, where=where, hint=hint)


class RuntimeFailure(SteelyardError):
    """The machine or the run failed."""

    exit_code = 1


class Interrupted(BaseException):
    """Ctrl-C. A `BaseException`, so that `except Exception` does not catch it."""

    exit_code = 130

    def __init__(self, saved: str = "") -> None:
        super().__init__(saved)
        self.saved = saved
