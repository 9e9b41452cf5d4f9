"""Encodes conversations as token ids with a loss mask."""

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
    """A conversation's tokens, and its loss mask: the tokens whose prediction counts in the loss."""

    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]

    @property
    def length(self) -> int:
        """Its length in a row: every token except the last is an input."""
        return len(self.ids) - 1


@dataclass
class EncodeStats:
    """Counts of conversations that were kept, truncated or dropped."""

    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """A line for each kind of dropped or truncated row, and for unknown tokens."""
        names = {
            "bad": "unreadable rows dropped",
            "overlong": "conversations longer than a row dropped",
            "truncated": "conversations truncated to the length of a row",
            "untrained": "conversations without a token in the loss dropped",
            "unknown": "tokens are unknown to the tokenizer",
        }
        return [f"{self.counts[key]} {what}" for key, what in names.items() if self.counts[key]]


def encode(conversation: Conversation, template: Template, tokenizer: Tokenizer, loss: Loss) -> Encoded:
    """Render and tokenize a conversation. A token counts in the loss if it contains a character of an answer."""
    rendered = Rendered(template.text(conversation), ()) if loss == "all" else template.render(conversation)
    ids, pairs = tokenizer.located(rendered.text)
    offsets = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    loss_mask = np.full(len(ids), loss == "all", dtype=np.bool_)
    for span in rendered.spans[-1:] if loss == "completion" else rendered.spans:
        loss_mask |= _touches(offsets[:, 0], offsets[:, 1], span)
    return Encoded(np.asarray(ids, dtype=np.int32), loss_mask)


def _touches(first: npt.NDArray[np.int64], end: npt.NDArray[np.int64], span: Span) -> npt.NDArray[np.bool_]:
    """Tokens with a character in the span; a token without one (bytes of a split character) counts at its offset."""
    last = np.maximum(end, first + 1)
    touches: npt.NDArray[np.bool_] = (first < span[1]) & (last > span[0])
    return touches


def fitting(
    encoded: Iterable[tuple[Encoded, str]], length: int, overlong: str, untrained: str, stats: EncodeStats
) -> Iterator[Encoded]:
    """Samples truncated to rows of `length` with at least one token in the loss. Others are counted or raise."""
    for sample, where in encoded:
        if sample.length > length:
            if overlong == "refuse":
                raise UserError(
                    f"the conversation has {len(sample.ids)} tokens, but a row holds only {length + 1}",
                    where=where,
                    hint='increase data.sequence_length, or set finetune.overlong to "truncate" or "drop"',
                )
            stats.counts["overlong" if overlong == "drop" else "truncated"] += 1
            if overlong == "drop":
                continue
            sample = Encoded(sample.ids[: length + 1], sample.loss_mask[: length + 1])
        if not sample.loss_mask[1:].any():
            if untrained == "refuse":
                raise UserError(
                    "no token of this conversation counts in the loss",
                    where=where,
                    hint='it has no answer, or only after truncation; finetune.untrained = "drop" skips and counts it',
                )
            stats.counts["untrained"] += 1
            continue
        stats.counts["kept"] += 1
        yield sample
