"""Keeping secrets out of everything that is printed.

What a server or a library says may repeat a token, so text is scrubbed on its way out: of values that were hidden by
name, of secrets in the environment, and of whatever looks like a token of the hub. The console scrubs all it prints.
"""

from __future__ import annotations

import os
import re

HIDDEN = "[hidden]"
SHORTEST = 8  # A shorter value would blot out ordinary words.
_IN_ENVIRONMENT = re.compile(r"(TOKEN|API_KEY|SECRET|PASSWORD)$")
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
    in_environment = {value for name, value in os.environ.items() if _IN_ENVIRONMENT.search(name)}
    for secret in sorted(_known | in_environment, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    for shape, instead in _SHAPES:
        text = shape.sub(instead, text)
    return text
