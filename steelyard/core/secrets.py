"""Removes secrets from everything that is printed or written.

Messages of a server or a library may repeat a token, so all output is scrubbed: of values passed to `hide`, of secrets
in the environment, of passwords in URLs, of `NAME=value` with the name of a secret, and of anything that looks like a
token of the hub. The console scrubs everything it prints; recorded command lines go through `redact`. Recipes and
sites, which are copied to many places, must not hold secrets (`is_secret`).
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

HIDDEN = "[hidden]"
SHORTEST = 8  # Shorter values would match ordinary words.
# At the end of a name, or as one of its words, unless the name ends in a word for a path. PWD is a folder.
_IN_ENVIRONMENT = re.compile(
    r"""(?xi)
    (TOKEN|APIKEY|_KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|SSHPASS|(^|_)PASS|(^|_)PAT|_PWD)$
    | (^|_)(TOKENS?|API_?KEYS?|ACCESS_KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PAT|CREDENTIALS?|CONNECTION_STRING|
            WEBHOOK|DSN)(?=_|$)(?!.*_(PATH|FILE|DIR|HOME)$)
    """
)
# Names of keys and options. In lower case `token` alone is a secret, but `eos_token` is not.
_NAME = re.compile(
    r"(?i)(?:.*[_.-])?(?:password|passwd|passphrase|secret|credentials?|(?:api|access|private|secret|account)[_-]?key"
    r"|(?:access|api|auth|bearer|bot|hf|hub|refresh|session)[_-]?token)|(?:.*\.)?token"
)
_VALUE = rf"(?!{re.escape(HIDDEN)}|<|\.\.\.)[^\s'\"]+"  # no placeholder
_ASSIGNED = re.compile(rf"(?<![\w.&?-])([\w.-]+)(=['\"]?)({_VALUE})")
_OPTION = re.compile(rf"(?<![\w-])--([\w.-]+)(\s+['\"]?)(?!-){_VALUE}")
_QUERY = (
    r"(?:[\w-]*[_-])?(?:key|token|sig|signature|secret|password|passwd|pwd|credential)|X-Amz-[\w-]+|Policy|Key-Pair-Id"
)
_USER = r"(?!git@)[^/\s@:]+"
_USER_AND_PASSWORD = (
    r"[^/\s@:]*:(?!\d+/)[^\s@'\"]*(?:@[^\s@/'\"]*)*"  # A password may contain slashes; a port is not one.
)
_SHAPES = (
    (re.compile(r"\b(?:hf_(?:oauth_|jwt_)[\w.-]+|hf_[A-Za-z0-9]{20,}|gh[oprsu]_\w{20,}|glpat-[\w-]{20,})"), HIDDEN),
    (re.compile(r"(?i)\b(bearer) [\w.~+/=-]{16,}"), rf"\1 {HIDDEN}"),
    (re.compile(rf"(://)(?:{_USER}|{_USER_AND_PASSWORD})@(?!sha256:)"), rf"\1{HIDDEN}@"),
    (re.compile(rf"(?i)([?&](?:{_QUERY})=)[^&\s'\"]+"), rf"\1{HIDDEN}"),
)
_known: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return _IN_ENVIRONMENT.search(name) is not None


def hide(secret: str) -> None:
    """Register a value that this process must never print."""
    if len(secret) >= SHORTEST:
        _known.add(secret)


def scrub(text: str) -> str:
    """The text without secrets."""
    named = {name: value for name, value in os.environ.items() if value and _IN_ENVIRONMENT.search(name)}
    for name, value in named.items():
        if len(value) < SHORTEST and name in text:  # Hidden only next to its name, as in a dump of the environment.
            beside = rf"(\b{re.escape(name)}['\"]?\s*[=:,]\s*['\"]?){re.escape(value)}"
            text = re.sub(beside, rf"\1{HIDDEN}", text)
    # A key of several lines is printed line by line.
    whole = {form for value in named.values() for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1])}
    in_environment = {part for value in whole for part in (value, *value.splitlines())}
    for secret in sorted(_known | in_environment, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    return _without_shapes(text)


def _without_shapes(text: str) -> str:
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    text = _OPTION.sub(lambda match: f"--{match[1]}{match[2]}{HIDDEN}" if _NAME.fullmatch(match[1]) else match[0], text)
    return _ASSIGNED.sub(_assigned, text)


def _assigned(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    return name + sign + (HIDDEN if _names_secret(name, value) else _ASSIGNED.sub(_assigned, value))


def _names_secret(name: str, value: str) -> bool:
    """Whether `name=value` holds a secret: an option, a key, or an environment variable in capitals."""
    is_count = "TOKENS" in name and value.replace("_", "").isdigit()
    is_variable = name.isupper() and is_secret_name(name) and not is_count
    return is_variable or _NAME.fullmatch(name.lstrip("-")) is not None


def is_secret(text: str) -> bool:
    """Whether text contains something that looks like a secret, independent of this process's environment."""
    return _without_shapes(text) != text


def redact(value: Any) -> Any:
    """A copy without secrets, for a file that others may read: of a string, or of nested lists and dicts.

    A list of strings is a command line: after `--password` or `TOKEN=` the rest of the argument is hidden.
    """
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, dict):
        return {key: redact(each) for key, each in value.items()}
    if isinstance(value, list):
        pairs = zip(["", *value], value, strict=False)
        return [_redacted(each, str(before)) if isinstance(each, str) else redact(each) for before, each in pairs]
    return value


def _redacted(word: str, before: str) -> str:
    if before.startswith("--") and _NAME.fullmatch(before[2:]):
        return HIDDEN
    name, sign, value = word.partition("=")
    return f"{name}={HIDDEN}" if sign and _names_secret(name, value) else scrub(word)
