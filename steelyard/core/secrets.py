"""Keeping secrets out of everything that is printed.

What a server or a library says may repeat a token, so text is scrubbed on its way out: of values that were hidden by
name, of secrets in the environment, and of whatever looks like a token of the hub. The console scrubs all it prints.
"""

from __future__ import annotations

import json
import os
import re

HIDDEN = "[hidden]"
SHORTEST = 8  # A shorter value would blot out ordinary words.
# As the end of a name or one of its words; what ends in a word for a file says only where one is. PWD is a folder.
_IN_ENVIRONMENT = re.compile(
    r"""(?xi)
    (TOKEN|APIKEY|_KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|SSHPASS|(^|_)PASS|(^|_)PAT|_PWD)$
    | (^|_)(TOKENS?|API_?KEYS?|ACCESS_KEYS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PAT|CREDENTIALS?|CONNECTION_STRING|
            WEBHOOK|DSN)(?=_|$)(?!.*_(PATH|FILE|DIR|HOME)$)
    """
)
_SHAPES = (
    (re.compile(r"\bhf_(?:oauth_|jwt_)[\w.-]+|\bhf_[A-Za-z0-9]{20,}"), HIDDEN),
    (re.compile(r"(?i)\b(bearer) [\w.~+/=-]{16,}"), rf"\1 {HIDDEN}"),
    (re.compile(r"(://)[^/\s@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)([?&](?:X-Amz-[\w-]+|Signature|Policy|Key-Pair-Id|token)=)[^&\s'\"]+"), rf"\1{HIDDEN}"),
)
_known: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _IN_ENVIRONMENT.search(name) is not None


def hide(secret: str) -> None:
    """Have this value never printed by this process."""
    if len(secret) >= SHORTEST:
        _known.add(secret)


def scrub(text: str) -> str:
    """The text without secrets."""
    named = {name: value for name, value in os.environ.items() if value and _IN_ENVIRONMENT.search(name)}
    for name, value in named.items():
        if len(value) < SHORTEST and name in text:  # Hidden where it is named, as in a list of the environment.
            beside = rf"(\b{re.escape(name)}['\"]?\s*[=:,]\s*['\"]?){re.escape(value)}"
            text = re.sub(beside, rf"\1{HIDDEN}", text)
    # A key of several lines is printed line by line.
    whole = {form for value in named.values() for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1])}
    in_environment = {part for value in whole for part in (value, *value.splitlines())}
    for secret in sorted(_known | in_environment, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text
