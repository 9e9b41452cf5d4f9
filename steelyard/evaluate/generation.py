"""Generates text one token at a time, with a KV cache.

A model sees at most `context` tokens. When the text becomes longer, the oldest tokens are dropped and the rest is
computed again. The rest leaves room for the tokens still to be generated, but is at least half of the context.
A `PrefixCache` keeps the cache between texts: of the next one only the tokens after the common beginning are computed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.checkpoint.formats.hf_metadata import end_ids
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.evaluate.decode_graph import Decoder
from steelyard.evaluate.load_model import context_of, loaded, tokenizer_for
from steelyard.model import Batch, Cache, LanguageModel
from steelyard.sparsity import pruned_source as sparse
from steelyard.text.tokenizer import Tokenizer
from steelyard.training.device import device_for, dtype_for

UNFINISHED = "\ufffd"  # A tokenizer decodes incomplete UTF-8 sequences to this character.
TOKENS_TO_LOOK_BACK = 6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the most likely one; top_k 0 and top_p 1 keep all."""

    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 1.0
    seed: int = 0


class PrefixCache:
    """A KV cache that is kept between texts, and the ids of the tokens in it."""

    def __init__(self) -> None:
        self.cache, self.ids = Cache(0), list[int]()
        self._decoder: Decoder | None = None

    def decoder(self, network: LanguageModel) -> Decoder:
        """The decode step of a model with this cache."""
        if self._decoder is None or self._decoder.network is not network:
            self._decoder = Decoder(network, self.cache)
        return self._decoder

    def unread(self, ids: Sequence[int], capacity: int) -> Sequence[int]:
        """Keep the common beginning of the cached and these ids, and return the others: at least the last one."""
        pairs = enumerate(zip(self.ids, ids[:-1], strict=False))
        common = next((place for place, (cached, new) in pairs if cached != new), min(len(self.ids), len(ids) - 1))
        self.cache.forget(common)
        self.cache.capacity = max(self.cache.capacity, capacity)
        self.ids = list(ids[:common])
        return ids[common:]

    def forget(self) -> None:
        """Empty the cache."""
        self.cache.forget()
        self.ids = []


class Writer:
    """A model with its tokenizer, context length and end tokens, for generation."""

    def __init__(self, network: LanguageModel, tokenizer: Tokenizer, context: int, ends: Collection[int]) -> None:
        self.network, self.tokenizer, self.context, self.ends = network, tokenizer, context, frozenset(ends)
        self.written = 0

    def text(self, prompt: str, sampling: Sampling) -> str:
        """The prompt and its continuation, up to the end of the document."""
        return prompt + "".join(self.stream(prompt, sampling))

    def stream(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        """The continuation of the prompt, as it is generated."""
        return self.stream_after(self.tokenizer.framed(prompt) or [self.tokenizer.end_of_document], sampling)

    def stream_after(
        self, ids: Sequence[int], sampling: Sampling, ends: Collection[int] = (), memory: PrefixCache | None = None
    ) -> Iterator[str]:
        """The continuation of these tokens, up to an end token of the model or one of `ends`."""
        if len(ids) > self.context:
            seen = _tokens_to_reread(len(ids), sampling.max_tokens, self.context)
            problem = f"the prompt has {len(ids)} tokens, but the model's context is {self.context}"
            console.warn(f"{problem}: only the last {seen} are used")
        self.written = 0
        chosen = tokens(self.network, ids, sampling, self.context, self.ends.union(ends), memory)
        return text_of(self._counted(chosen), self.tokenizer, ids)

    def _counted(self, chosen: Iterable[int]) -> Iterator[int]:
        for token in chosen:
            self.written += 1
            yield token


def writer(
    path: str | Path,
    tokenizer: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    mask: str | None = None,
    base: str | None = None,
) -> Writer:
    """Load a checkpoint of any format for generation, with a mask applied if there is one."""
    source = sparse.opened(path, mask, base)
    vocabulary = tokenizer_for(source, tokenizer)
    if vocabulary.vocab_size > source.config.padded_vocab:
        raise UserError(
            f"the tokenizer {vocabulary.source} has {vocabulary.vocab_size} ids, the model has {source.config.vocab}",
            hint="give the model's own tokenizer with --tokenizer",
        )
    where = device_for(device)
    network = loaded(source, where, dtype_for(dtype, source, where))
    return Writer(network, vocabulary, context_of(source), ends_of(source, vocabulary))


def from_checkpoint(path: str | Path, prompt: str, sampling: Sampling) -> str:
    """Load a checkpoint and continue the prompt."""
    return writer(path).text(prompt, sampling)


def result(writer: Writer, prompt: str, pieces: Iterable[str]) -> dict[str, Any]:
    """The text of all pieces, with the number of tokens and the speed."""
    begun = time.monotonic()
    text = "".join(pieces)
    seconds = time.monotonic() - begun
    return {
        "prompt": prompt,
        "text": text,
        "tokens": writer.written,
        "tokens_per_second": round(writer.written / seconds, 2),
    }


def ends_of(source: CheckpointSource, tokenizer: Tokenizer) -> set[int]:
    """The ids that end a text: those in the checkpoint's config, else the tokenizer's."""
    return set(end_ids(source.hf_metadata)) or ({tokenizer.end_id} if tokenizer.end_id is not None else set())


def tokens(
    network: LanguageModel,
    prompt: Sequence[int],
    sampling: Sampling,
    context: int,
    ends: Collection[int],
    memory: PrefixCache | None = None,
) -> Iterator[int]:
    """The tokens that the model generates after the prompt, without the end token."""
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    memory = memory or PrefixCache()
    new = memory.unread(ids, min(context, len(ids) + sampling.max_tokens))
    for left in range(sampling.max_tokens, 0, -1):
        if memory.cache.length + len(new) > context:
            memory.forget()
            new = ids[-_tokens_to_reread(len(ids), left, context) :]
        chosen = _choose(_next_logits(network, new, memory), sampling, generator)
        memory.ids.extend(new)
        if chosen in ends:
            return
        ids.append(chosen)
        new = [chosen]
        yield chosen


def _tokens_to_reread(length: int, left: int, context: int) -> int:
    """How many of the last tokens are computed again if not all fit. The last generated token is never an input."""
    return min(length, max(context - left + 1, context // 2, 1))


@torch.inference_mode()
def _next_logits(network: LanguageModel, new: Sequence[int], memory: PrefixCache) -> Tensor:
    if len(new) == 1 and memory.cache.length:
        return memory.decoder(network).logits(new[0])[0]
    device = next(network.parameters()).device
    logits_BLV: Tensor = network(Batch(torch.tensor([new], device=device), logits_to_keep=1), cache=memory.cache)
    return logits_BLV[0, -1]


@torch.inference_mode()
def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a token. Only the `top_k` best logits leave the GPU; the generator is on the CPU on every device."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.float()
    best = logits_V.topk(sampling.top_k) if 0 < sampling.top_k < len(logits_V) else logits_V.sort(descending=True)
    logits_V, ids_V = best.values.cpu(), best.indices.cpu()
    chances_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        # The most likely token always stays, the others while the sum of those before them is below top_p.
        chances_V = chances_V.where(chances_V.cumsum(dim=0) - chances_V < sampling.top_p, 0.0)
        chances_V[0] = chances_V[0].clamp(min=torch.finfo(chances_V.dtype).tiny)
    return int(ids_V[torch.multinomial(chances_V, 1, generator=generator)])


def text_of(chosen: Iterable[int], tokenizer: Tokenizer, before: Sequence[int]) -> Iterator[str]:
    """The text of tokens as they are generated. Each piece is returned when its characters are complete.

    A piece is what its tokens add to the text of the few tokens before. Decoded alone they may differ, since some
    tokenizers drop a space at the beginning.
    """
    ids = list(before[-TOKENS_TO_LOOK_BACK:])
    first, shown = 0, len(ids)
    decoded = tokenizer.decode(ids)
    for token in chosen:
        ids.append(token)
        text = tokenizer.decode(ids[first:])
        if len(text) > len(decoded) and not text.endswith(UNFINISHED):
            yield text[len(decoded) :]
            first, shown = shown, len(ids)
            decoded = tokenizer.decode(ids[first:])
    rest = tokenizer.decode(ids[first:])[len(decoded) :]
    if rest:
        yield rest
