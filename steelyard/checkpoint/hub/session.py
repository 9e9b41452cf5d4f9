"""Talking to the hub: the token, and one clear error for whatever goes wrong on the way."""

from __future__ import annotations

import contextlib
import errno
import getpass
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.core import secrets
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, SteelyardError, UserError

LOG_IN = "steelyard hub login, or set HF_TOKEN"
AGAIN = "the same command tries again"
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def token() -> str | None:
    """The token in use, if there is one. It is hidden from everything that is printed from now on."""
    from huggingface_hub import get_token

    found = get_token()
    if found:
        secrets.hide(found)
    return found


def read_token(file: Path | None = None) -> str:
    """A token from a file, from a pipe, or from a prompt that does not show it. Never from the command line."""
    if file is not None:
        if not file.is_file():
            raise UserError(f"there is no file {file}")
        text = file.read_text(encoding="utf-8", errors="replace")
    elif sys.stdin.isatty():
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)  # Rather no token than one on the screen.
            try:
                text = getpass.getpass("Token of the hub (it is not shown): ")
            except getpass.GetPassWarning:
                hint = "pipe the token in, or use --token-file"
                raise UserError("this terminal would show the token", hint=hint) from None
    else:
        text = sys.stdin.readline()
    read = text.strip()
    if not read or len(read.split()) != 1 or not read.isprintable() or not read.isascii():
        raise UserError("that is no token: it should be one word", hint="copy one from the hub's settings page")
    secrets.hide(read)
    return read


def login(secret: str) -> str:
    """Keep a token for later commands, where `huggingface_hub` keeps it, and return whose it is."""
    from huggingface_hub import login as keep

    secrets.hide(secret)
    with talking("login", hint="nothing was kept"):
        keep(token=secret, add_to_git_credential=False)
        return str(_whoami(secret)["name"])


def whoami() -> dict[str, Any]:
    """Whose token is in use: name and organizations."""
    secret = token()
    if secret is None:
        raise UserError("you are not logged in to the hub", hint=LOG_IN)
    with talking("whoami"):
        answer = _whoami(secret)
        return {"name": answer["name"], "organizations": [each["name"] for each in answer.get("orgs", [])]}


def _whoami(secret: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    return dict(HfApi().whoami(token=secret))


@contextlib.contextmanager
def talking(about: str, hint: str = AGAIN) -> Iterator[None]:
    """A conversation with the hub. What goes wrong in it becomes one error, and what the library says is scrubbed."""
    token()
    with _through_console():
        try:
            yield
        except (SteelyardError, IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError):
            raise
        except Exception as error:
            # The chain is cut: the messages of what lies below may repeat a header.
            raise _explained(error, about, hint) from None


def _explained(error: Exception, about: str, hint: str) -> SteelyardError:
    from huggingface_hub import constants, errors

    chain = _chain(error)
    for cause in chain:
        if isinstance(cause, errors.HfHubHTTPError):
            return _answered(cause, about, hint)
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return UserError(f"{about}: HF_HUB_OFFLINE is set, so the hub is not asked", hint="unset it")
        if isinstance(cause, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
            return UserError(f"{about} is not in the cache, and HF_HUB_OFFLINE is set", hint="unset it")
        if isinstance(cause, errors.HFValidationError):
            return UserError(f"{about} is no name on the hub", hint="a name is user/model: letters, digits, - _ .")
        if isinstance(cause, OSError) and cause.errno in OF_THE_DISK:
            place = f": {cause.filename}" if cause.filename else ""
            return RuntimeFailure(secrets.scrub(f"{about}: {cause.strerror}{place}"), hint=hint)
    reason = _first_line(str(chain[-1])) or type(chain[-1]).__name__
    return RuntimeFailure(secrets.scrub(f"{about}: the hub at {_endpoint()} did not answer well: {reason}"), hint=hint)


def _answered(error: Any, about: str, hint: str) -> SteelyardError:
    """An answer of the hub's that is not what was asked for."""
    from huggingface_hub import errors

    status = error.response.status_code
    said = secrets.scrub(_first_line(error.server_message or str(error)))
    if isinstance(error, errors.GatedRepoError):
        return UserError(f"{about} is given only to those its owners admit", hint=f"ask on {_endpoint()}/{about}")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{about} has no such revision", hint="name a branch, a tag or a commit of it")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return UserError(f"{about} is not on {_endpoint()}, or not for this token to see", hint=f"if yours: {LOG_IN}")
    if status == 401:
        return UserError(f"{about}: the hub does not accept the token", hint=LOG_IN)
    if status == 403:
        return UserError(f"{about}: the token does not allow this: {said}", hint=f"use one that does: {LOG_IN}")
    return RuntimeFailure(f"{about}: the hub answered {status}: {said}", hint=hint)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what caused it, the outermost first."""
    chain = [error]
    while (below := chain[-1].__cause__ or chain[-1].__context__) is not None and below not in chain:
        chain.append(below)
    return chain


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _endpoint() -> str:
    from huggingface_hub import constants

    return secrets.scrub(constants.ENDPOINT)


class _ToConsole(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console.say(record.getMessage())


@contextlib.contextmanager
def _through_console() -> Iterator[None]:
    """Have the library's own voice pass the console, which scrubs it, and its progress bars give way to ours."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    handlers, propagates, had_bars = logger.handlers[:], logger.propagate, not are_progress_bars_disabled()
    logger.handlers, logger.propagate = [_ToConsole()], False
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: console.warn(str(message))
            yield
    finally:
        logger.handlers, logger.propagate = handlers, propagates
        if had_bars:
            enable_progress_bars()
