"""Check the markers of a chat template, the text that it writes around messages, against the tokenizer.

A marker that is unknown to the tokenizer cannot be learned: the model would see the same unknown token for every
marker. One that is split into several tokens works, but is longer than a special token, so it is only reported.
"""

from __future__ import annotations

import contextlib
import re

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import BadRow, Conversation, Message, Role
from steelyard.finetuning.templates import NAMED, Template
from steelyard.text.tokenizer import Tokenizer

SPECIAL = re.compile(r"<\|[\w-]+\|>")
CONTENTS = ("a", "1", "\u3042", "\u4e2d", "\uac00", "\u0627", "\u0430")  # Some vocabulary knows one of them.
ROLES: tuple[tuple[Role, ...], ...] = (("user", "assistant"), ("system", "user", "assistant"))


def check(template: Template, tokenizer: Tokenizer) -> None:
    """Raise an error if a marker is unknown to the tokenizer; warn if one is not a single token."""
    unknown = dict.fromkeys(marker for roles in ROLES for marker in _unknown_markers(template, tokenizer, roles))
    if unknown:
        raise UserError(
            f"the chat template {template.name} writes {', '.join(map(repr, unknown))}, "
            f"which the tokenizer {tokenizer.source} does not know",
            hint=f"set finetune.template to another one of {', '.join(NAMED)}, or to a file",
        )
    split = {marker: len(tokenizer.encode(marker)) for marker in sorted(set(SPECIAL.findall(template.source)))}
    listed = ", ".join(f"{marker} ({count} tokens)" for marker, count in split.items() if count > 1)
    if listed:
        console.warn(f"the template {template.name} uses markers that are not single tokens: {listed}")


def _unknown_markers(template: Template, tokenizer: Tokenizer, roles: tuple[Role, ...]) -> list[str]:
    """The unknown parts of a conversation whose messages are known to the tokenizer."""
    content = next((text for text in CONTENTS if tokenizer.unknown_id not in tokenizer.encode(text)), "")
    text = ""
    with contextlib.suppress(BadRow):  # Not every template takes a system message.
        text = template.text(Conversation(tuple(Message(role, content) for role in roles)))
    ids, spans = tokenizer.located(text)
    return [text[slice(*span)] for id_, span in zip(ids, spans, strict=True) if id_ == tokenizer.unknown_id]
