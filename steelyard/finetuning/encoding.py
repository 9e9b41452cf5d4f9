"""Conversations as ids, each token known to be learned or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import Conversation
from steelyard.finetuning.templates import Rendered, Span, Template
from steelyard.text.tokenizer import Tokenizer

Loss = Literal["assistant", "completion", "all"]


@dataclass(frozen=True)
class Encoded:
    """A conversation's tokens, and which of them are learned: predicted, and counted in the loss."""

    ids: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_]

    @property
    def places(self) -> int:
        """Room it takes in a row: every token but the last is read to predict the next."""
        return len(self.ids) - 1


@dataclass
class EncodeStats:
    """What became of the conversations."""

    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """What the user should know."""
        names = {
            "bad": "rows that could not be read, left out",
            "overlong": "conversations longer than a row, left out",
            "truncated": "conversations cut to the length of a row",
            "untrained": "conversations without a token to learn, left out",
        }
        return [f"{self.counts[key]} {what}" for key, what in names.items() if self.counts[key]]


def encode(conversation: Conversation, template: Template, tokenizer: Tokenizer, loss: Loss) -> Encoded:
    """Write a conversation out and cut it into tokens. A token is learned if a character of an answer is in it."""
    return located(conversation, template, tokenizer, loss)[0]


def located(
    conversation: Conversation, template: Template, tokenizer: Tokenizer, loss: Loss
) -> tuple[Encoded, str, npt.NDArray[np.int64]]:
    """The same, with the text and the characters, from and up to, of each token."""
    rendered = Rendered(template.text(conversation), ()) if loss == "all" else template.render(conversation)
    ids, found = tokenizer.located(rendered.text)
    places = np.asarray(found, dtype=np.int64).reshape(-1, 2)
    learned = np.full(len(ids), loss == "all", dtype=np.bool_)
    for span in rendered.spans[-1:] if loss == "completion" else rendered.spans:
        learned |= _touches(places[:, 0], places[:, 1], span)
    return Encoded(np.asarray(ids, dtype=np.int32), learned), rendered.text, places


def _touches(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64], span: Span) -> npt.NDArray[np.bool_]:
    """Tokens with a character in the span; one that stands for none (part of a character's bytes) is where it is."""
    last = np.maximum(end, first + 1)
    touches: npt.NDArray[np.bool_] = (first < span[1]) & (last > span[0])
    return touches


def fitting(
    encoded: Iterable[tuple[Encoded, str]], length: int, overlong: str, untrained: str, tally: EncodeStats
) -> Iterator[Encoded]:
    """What can be trained on: cut to rows of `length`, with something to learn. The rest is counted or refused."""
    for sample, where in encoded:
        if sample.places > length:
            if overlong == "refuse":
                raise UserError(
                    f"the conversation has {len(sample.ids)} tokens, and a row room for {length + 1}",
                    where=where,
                    hint='raise data.sequence_length, or set finetune.overlong to "truncate" or "drop"',
                )
            tally.counts["overlong" if overlong == "drop" else "truncated"] += 1
            if overlong == "drop":
                continue
            sample = Encoded(sample.ids[: length + 1], sample.learned[: length + 1])
        if not sample.learned[1:].any():
            if untrained == "refuse":
                raise UserError(
                    "no token of this conversation would be learned",
                    where=where,
                    hint='it has no answer, or none in reach; finetune.untrained = "drop" leaves it out and counts it',
                )
            tally.counts["untrained"] += 1
            continue
        tally.counts["kept"] += 1
        yield sample
