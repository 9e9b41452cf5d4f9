"""lm-eval's interface to a model: log likelihood of a continuation, log likelihood of a text, and generation.

Imported only where lm-eval is installed.

Tensor suffixes: B batch, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.model import LM
from torch import Tensor

from steelyard.core.console import console
from steelyard.evaluate.generation import Sampling, Writer, text_of, tokens

Pair = tuple[list[int], list[int]]


class LmEvalModel(LM):  # type: ignore[misc]
    """A Steelyard model for lm-eval."""

    def __init__(self, writer: Writer, batch: int) -> None:
        super().__init__()
        self.writer, self.batch = writer, batch

    @property
    def tokenizer_name(self) -> str:
        """The key under which lm-eval caches prompts."""
        return self.writer.tokenizer.fingerprint

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log probability of each continuation after its context, and whether greedy decoding would give it."""
        return self._scored([self._pair(*request.args) for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log probability of whole texts. A long text is split into windows; each token is predicted once."""
        parts = [list(self._windows(self.writer.tokenizer.encode(request.args[0]))) for request in requests]
        scores = iter(self._scored([pair for pairs in parts for pair in pairs]))
        return [sum(next(scores)[0] for _ in pairs) for pairs in parts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The model's continuation of each context, up to the first stop string."""
        texts = []
        with console.progress("generate", len(requests), "texts") as progress:
            for context, settings in (request.args for request in requests):
                texts.append(self._generated(context, settings))
                progress.advance()
        return texts

    def _generated(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        ends = [until] if isinstance(until, str) else [end for end in until if end]
        sampling = Sampling(
            max_tokens=int(settings.get("max_gen_toks", settings.get("max_new_tokens", 256))),
            temperature=float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0,
            top_k=int(settings.get("top_k", 0)),
            top_p=float(settings.get("top_p", 1.0)),
        )
        writer, ids = self.writer, self._framed(context)
        text = ""
        for piece in text_of(tokens(writer.network, ids, sampling, writer.context, writer.ends), writer.tokenizer, ids):
            text += piece
            found = [place for place in map(text.find, ends) if place >= 0]
            if found:
                return text[: min(found)]
        return text

    def _framed(self, text: str) -> list[int]:
        """The ids of a context. There is always at least one token to predict from."""
        return self.writer.tokenizer.framed(text) or [self.writer.tokenizer.end_of_document]

    def _pair(self, context: str, continuation: str) -> Pair:
        """Both as ids, split where the context's ids end. A space between them belongs to the continuation."""
        stripped = context.rstrip()
        if not stripped:
            return self._framed(""), self.writer.tokenizer.encode(context + continuation if context else continuation)
        context, continuation = stripped, context[len(stripped) :] + continuation
        before = self._framed(context)
        return before, self._framed(context + continuation)[len(before) :]

    def _windows(self, ids: list[int]) -> Iterator[Pair]:
        """Windows of maximum size in which each token of a text is predicted once, the first after the end token."""
        size = self.writer.context
        stream = [self._framed("")[0], *ids]
        for first in range(1, len(stream), size):
            end = min(first + size, len(stream))
            start = max(0, end - 1 - size)
            yield stream[start:first], stream[first:end]

    def _scored(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        """Score continuations, the longest first, so that an out-of-memory error occurs at once or never."""
        order = sorted(range(len(pairs)), key=lambda number: -sum(map(len, pairs[number])))
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        with console.progress("score", len(pairs), "texts") as progress:
            for first in range(0, len(order), self.batch):
                numbers = order[first : first + self.batch]
                for number, score in zip(numbers, self._scored_batch([pairs[n] for n in numbers]), strict=True):
                    scores[number] = score
                progress.advance(len(numbers))
        return scores

    @torch.inference_mode()
    def _scored_batch(self, pairs: list[Pair]) -> list[tuple[float, bool]]:
        rows = [(before + after)[-self.writer.context - 1 :] for before, after in pairs]
        longest = max(map(len, rows)) - 1
        device = next(self.writer.network.parameters()).device
        inputs_BL = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):  # Attention is causal, so padding after a row has no effect on it.
            inputs_BL[number, : len(row) - 1] = torch.tensor(row[:-1])
        logits_BLV: Tensor = self.writer.network(inputs_BL.to(device))
        return [
            _score(logits_BLV[number, : len(row) - 1], row, min(len(after), len(row) - 1))
            for number, (row, (_, after)) in enumerate(zip(rows, pairs, strict=True))
        ]


def _score(logits_LV: Tensor, row: list[int], counted: int) -> tuple[float, bool]:
    """Sum of the log probabilities of the last `counted` tokens of a row, and whether each is the most likely."""
    if not counted:
        return 0.0, True
    labels_L = torch.tensor(row[-counted:], device=logits_LV.device)
    chances_LV = logits_LV[-counted:].float().log_softmax(dim=-1)
    score = chances_LV.gather(1, labels_L[:, None]).sum()
    return score.item(), bool((chances_LV.argmax(dim=-1) == labels_L).all())
