"""Splits a long text into the windows that a model scores, and selects the predictions that count.

hf         consecutive windows of `length` tokens, scored independently: the first token of each is not predicted.
           Tokens that do not fill a window are dropped. The result is the mean over windows of their means.
hf, stride a window starts every `stride` tokens, and only tokens that no earlier window predicted count. Nothing is
           dropped. The result is the mean over all predictions.
megatron   labels are the whole text shifted by one, so that a window's last label is the first token of the next.
           The last window is padded with tokens that do not count. The sum is divided by the tokens minus one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from steelyard.core.errors import UserError

Protocol = Literal["hf", "megatron"]


@dataclass(frozen=True)
class Window:
    """Tokens from `start` up to `end` are inputs, and the token after each is predicted; the last `counted` count."""

    start: int
    end: int
    counted: int


@dataclass(frozen=True)
class WindowPlan:
    """All windows of a text, and a description of how they were chosen."""

    windows: list[Window]
    divisor: int
    dropped: int
    described: dict[str, str]


def plan(tokens: int, length: int, stride: int | None, protocol: Protocol) -> WindowPlan:
    """Split a text of `tokens` tokens into windows of `length`."""
    if stride is not None and not 0 < stride <= length:
        raise UserError(f"a stride of {stride} with windows of {length} skips tokens", where="--stride",
                        hint=f"choose 1 to {length}")  # fmt: skip
    stride = None if stride == length else stride
    if protocol == "megatron":
        return _megatron(tokens, length, stride or length)
    return _consecutive(tokens, length) if stride is None else _overlapping(tokens, length, stride)


def _consecutive(tokens: int, length: int) -> WindowPlan:
    count = tokens // length
    if not count or length < 2:
        raise UserError(
            f"the text has {tokens} tokens, which do not fill one window of {length}",
            hint=f"use --sequence-length {tokens} or less, or --protocol megatron, which pads the window",
        )
    windows = [Window(start, start + length - 1, length - 1) for start in range(0, count * length, length)]
    dropped = tokens - count * length
    described = {
        "windows": f"{count} of {length} tokens, not overlapping, scored independently",
        "stride": f"{length}, the whole window",
        "predicted": f"every token of a window except its first: {length - 1}",
        "divided": f"each window's sum by {length - 1}, then the sum of these means by {count}",
        "dropped tail": f"{dropped} tokens that do not fill a window",
    }
    return WindowPlan(windows, count * (length - 1), dropped, described)


def _overlapping(tokens: int, length: int, stride: int) -> WindowPlan:
    windows = list(_every(stride, tokens, length))
    predictions = sum(window.counted for window in windows)
    if not predictions:
        raise UserError(f"the text has {tokens} tokens: there is nothing to predict")
    described = {
        "windows": f"{len(windows)} of up to {length} tokens, overlapping",
        "stride": f"a window starts every {stride} tokens",
        "predicted": "tokens that no earlier window predicted: every token except the first",
        "divided": f"the sum over all predictions by their number, {predictions}",
        "dropped tail": "nothing; the last window is shorter",
    }
    return WindowPlan(windows, predictions, 0, described)


def _every(stride: int, tokens: int, length: int) -> Iterator[Window]:
    reached = 1  # The first token has no context.
    for start in range(0, tokens, stride):
        end = min(start + length, tokens)
        if end > reached:
            yield Window(start, end - 1, end - reached)
        reached = max(reached, end)
        if end == tokens:
            return


def _megatron(tokens: int, length: int, stride: int) -> WindowPlan:
    labels = tokens - 1
    if labels < 1:
        raise UserError(f"the text has {tokens} tokens: there is nothing to predict")
    windows = [Window(0, min(length, labels), min(length, labels))]
    for start in range(stride, labels, stride):
        end, seen = min(start + length, labels), start + length - stride
        if end > seen:
            windows.append(Window(start, end, end - seen))
    last = windows[-1]
    described = {
        "windows": f"{len(windows)} of {length} tokens of one stream, labels shifted by one over the whole stream",
        "stride": f"a window starts every {stride} tokens" + (", the whole window" if stride == length else ""),
        "predicted": "every token of the stream except the first",
        "divided": f"the sum over all predictions by the number of tokens minus one, {labels}",
        "dropped tail": f"nothing; {length - (last.end - last.start)} positions of the last window are masked",
    }
    return WindowPlan(windows, labels, 0, described)
