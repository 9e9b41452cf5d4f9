"""Access to the hub: the token, and the translation of library errors into one message with a hint."""

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
AGAIN = "run the same command again"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def token() -> str | None:
    """The current token, if there is one. From now on it is masked in all output."""
    from huggingface_hub import get_token

    secret = get_token()
    if secret:
        secrets.hide(secret)
    return secret


def read_token(file: Path | None = None) -> str:
    """Read a token from a file, a pipe, or a prompt without echo. Never from the command line."""
    if file is not None:
        if not file.is_file():
            raise UserError(f"there is no file {file}")
        text = file.read_text(encoding="utf-8", errors="replace")
    elif sys.stdin.isatty():
        with warnings.catch_warnings():
            warnings.simplefilter("error", getpass.GetPassWarning)  # Fail instead of showing the token.
            try:
                text = getpass.getpass("Hub token (not shown): ")
            except getpass.GetPassWarning:
                hint = "pipe the token in, or use --token-file"
                raise UserError("this terminal would show the token", hint=hint) from None
    else:
        text = sys.stdin.readline()
    secret = text.strip()
    if not secret or len(secret.split()) != 1 or not secret.isprintable() or not secret.isascii():
        raise UserError("this is not a token: a token is one word", hint="copy one from the hub's settings page")
    secrets.hide(secret)
    return secret


def login(secret: str) -> str:
    """Store a token for later commands, where `huggingface_hub` stores it, and return the name of its user."""
    from huggingface_hub import login as store

    secrets.hide(secret)
    with hub_errors("login", hint="the token was not stored"):
        store(token=secret, add_to_git_credential=False)
        return str(_whoami(secret)["name"])


def whoami() -> dict[str, Any]:
    """The name and organizations of the user of the current token."""
    secret = token()
    if secret is None:
        raise UserError("you are not logged in to the hub", hint=LOG_IN)
    with hub_errors("whoami"):
        answer = _whoami(secret)
        return {"name": answer["name"], "organizations": [each["name"] for each in answer.get("orgs", [])]}


def _whoami(secret: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    return dict(HfApi().whoami(token=secret))


@contextlib.contextmanager
def hub_errors(about: str, hint: str = AGAIN) -> Iterator[None]:
    """Translate errors of the library in the block into one error, and mask tokens in its output."""
    token()
    with _through_console():
        try:
            yield
        except (SteelyardError, IsADirectoryError, NotADirectoryError, FileExistsError, PermissionError):
            raise
        except Exception as error:
            # No chained cause: its message may contain a request header.
            raise _translated(error, about, hint) from None


def _translated(error: Exception, about: str, hint: str) -> SteelyardError:
    from huggingface_hub import constants, errors

    chain = _chain(error)
    for cause in chain:
        if isinstance(cause, errors.HfHubHTTPError):
            return _http_error(cause, about, hint)
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return UserError(f"{about}: HF_HUB_OFFLINE is set, so the hub is not contacted", hint="unset it")
        if isinstance(cause, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
            return UserError(f"{about} is not in the cache, and HF_HUB_OFFLINE is set", hint="unset it")
        if isinstance(cause, errors.HFValidationError):
            return UserError(
                f"{about} is not a valid model name on the hub", hint="a name is user/model: letters, digits, - _ ."
            )
        if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
            path = f": {cause.filename}" if cause.filename else ""
            return RuntimeFailure(secrets.scrub(f"{about}: {cause.strerror}{path}"), hint=hint)
    reason = _first_line(str(chain[-1])) or type(chain[-1]).__name__
    return RuntimeFailure(secrets.scrub(f"{about}: the request to {_endpoint()} failed: {reason}"), hint=hint)


def _http_error(error: Any, about: str, hint: str) -> SteelyardError:
    """The error for an HTTP error response of the hub."""
    from huggingface_hub import errors

    status = error.response.status_code
    message = secrets.scrub(_first_line(error.server_message or str(error)))
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{about} is gated: its owners must grant access", hint=f"request access on {_endpoint()}/{about}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{about} has no such revision", hint="pass one of its branches, tags or commits")
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return UserError(
            f"{about} is not on {_endpoint()}, or the token has no access", hint=f"if it is private: {LOG_IN}"
        )
    if status == 401:
        return UserError(f"{about}: the hub does not accept the token", hint=LOG_IN)
    if status == 403:
        return UserError(f"{about}: the token does not allow this: {message}", hint=f"use one that does: {LOG_IN}")
    return RuntimeFailure(f"{about}: the hub answered {status}: {message}", hint=hint)


def _chain(error: BaseException) -> list[BaseException]:
    """An error and its causes, outermost first."""
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
    """Print the log of the library through the console, which masks tokens, and disable its progress bars."""
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
