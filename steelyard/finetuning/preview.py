"""Preview of the training data: conversations as text with their loss mask, and statistics of the dataset."""

from __future__ import annotations

import contextlib
import html
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.core import files
from steelyard.finetuning.conversation import BadRow, Conversation
from steelyard.finetuning.dpo import PairSamples
from steelyard.finetuning.encoding import EncodeStats, Loss, encode
from steelyard.finetuning.sft import SftJob
from steelyard.finetuning.sft_dataset import conversations, paths_of, preferences

IN_LOSS, MASKED, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
pre { white-space: pre-wrap; background: #f6f6f4; padding: 1em; border-radius: 6px; color: #888 }
b { font-weight: normal; color: #0a5; background: #e2f6ea } table { border-collapse: collapse }
td { padding: .1em 1.5em .1em 0 }
"""


Spans = list[tuple[str, bool]]


@dataclass(frozen=True)
class Preview:
    """Some conversations as spans of text with their loss mask, their titles, and statistics of the whole dataset."""

    samples: list[Spans]
    titles: list[str]
    figures: dict[str, Any]


def preview(job: SftJob, samples: int) -> Preview:
    """The first conversations, or preference pairs, and statistics of all of them."""
    rows = job.training
    if isinstance(rows, PairSamples):
        every = [side for pair in rows.pairs for side in pair]
        counted: dict[str, Any] = {"pairs": len(rows.pairs), "answers": len(every)}
        full: dict[str, Any] = {
            "identical_pairs": sum(np.array_equal(chosen.ids, other.ids) for chosen, other in rows.pairs)
        }
    else:
        every = list(rows.conversations)
        counted = {"conversations": len(every)}
        full = {"packing_efficiency": round(rows.efficiency, 4)}
    lengths = np.array([len(each.ids) for each in every])
    loss_tokens = int(sum(each.loss_mask[1:].sum() for each in every))
    figures = {
        **counted,
        "rows": rows.per_epoch,
        "steps": job.recipe.train.steps,
        "tokens": int(lengths.sum()),
        "loss_tokens": loss_tokens,
        "masked": int(lengths.sum()) - loss_tokens,
        "unknown": job.stats.counts["unknown"],
        "longest": int(lengths.max()),
        "median": int(np.median(lengths)),
        **full,
        **{key: job.stats.counts[key] for key in ("truncated", "overlong", "untrained", "bad")},
        "template": job.template.name,
    }
    first = list(islice(_titled(job), samples * (2 if isinstance(rows, PairSamples) else 1)))
    return Preview([spans for _, spans in first], [title for title, _ in first], figures)


def _titled(job: SftJob) -> Iterator[tuple[str, Spans]]:
    """Every conversation, or both answers of every pair, with a title. Rows that the template rejects are skipped."""
    tune = job.recipe.finetune
    assert tune is not None
    paths = paths_of(tune.data)
    if isinstance(job.training, PairSamples):
        for number, pair in enumerate(preferences(paths, tune, EncodeStats()), start=1):
            with contextlib.suppress(BadRow):
                both = [runs(each, job, "completion") for each in (pair.chosen, pair.rejected)]
                yield from zip((f"pair {number}, chosen", f"pair {number}, rejected"), both, strict=True)
    else:
        for number, each in enumerate(conversations(paths, tune, EncodeStats()), start=1):
            with contextlib.suppress(BadRow):
                yield f"conversation {number}", runs(each, job, tune.loss)


def runs(conversation: Conversation, job: SftJob, loss: Loss) -> Spans:
    """A conversation's decoded tokens, split where the loss mask changes, and truncated like a row."""
    encoded = encode(conversation, job.template, job.tokenizer, loss)
    ids = encoded.ids[: job.recipe.data.sequence_length + 1].tolist()
    loss_mask = [False, *encoded.loss_mask[1 : len(ids)].tolist()]  # The first token is never predicted.
    spans, end, shown = [], 0, ""
    for key, run in groupby(loss_mask):
        end += len(list(run))
        # Decoded from the start, because some decoders remove the space at the start of what they get.
        text = job.tokenizer.decode(ids[:end], skip_special_tokens=False)
        spans.append((text[len(shown) :], key))
        shown = text
    return spans


def as_result(shown: Preview) -> dict[str, Any]:
    """The preview as a JSON object."""
    samples = [[{"text": text, "in_loss": in_loss} for text, in_loss in spans] for spans in shown.samples]
    return shown.figures | {"samples": samples, "titles": shown.titles}


def as_text(shown: Preview) -> str:
    """The preview as text. Text in the loss is green on a terminal, otherwise between « and »."""
    coloured = sys.stdout.isatty()
    lines = [f"{key:20} {value}" for key, value in shown.figures.items()]
    for title, spans in zip(shown.titles, shown.samples, strict=True):
        text = "".join(_marked(text, in_loss, coloured) for text, in_loss in spans)
        lines += ["", f"--- {title}", text]
    return "\n".join(lines)


def _marked(text: str, in_loss: bool, coloured: bool) -> str:
    if coloured:
        return f"{IN_LOSS if in_loss else MASKED}{text}{PLAIN}"
    return f"«{text}»" if in_loss else text


def write_html(shown: Preview, path: Path) -> None:
    """Write the preview as one HTML file."""
    rows = "".join(f"<tr><td>{key}</td><td>{html.escape(str(value))}</td></tr>" for key, value in shown.figures.items())
    sections = "".join(_section(*each) for each in zip(shown.titles, shown.samples, strict=True))
    page = f"<!doctype html><meta charset=utf-8><title>Tokens in the loss</title><style>{STYLE}</style>"
    files.write_text(path, f"{page}<h1>Tokens in the loss</h1><table>{rows}</table>{sections}\n")


def _section(title: str, spans: Spans) -> str:
    texts = (f"<b>{html.escape(text)}</b>" if in_loss else html.escape(text) for text, in_loss in spans)
    return f"<h2>{title}</h2><pre>{''.join(texts)}</pre>"
