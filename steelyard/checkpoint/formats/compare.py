"""Describe a checkpoint, and compare two."""

from __future__ import annotations

import math
from typing import Any

import torch

from steelyard import model
from steelyard.checkpoint.formats.source import TABLES, CheckpointSource, holds_adapters, load_into, misfits
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.sizes.param_count import parameters

# Settings that do not change what the weights compute.
OF_TRAINING = ("dropout", "attention_dropout", "init_std", "vocab_multiple")
PROMPT = "The quick brown fox jumps over the lazy dog."


def info(source: CheckpointSource) -> dict[str, Any]:
    """Describe a checkpoint without reading its weights, with the tensors that do not fit its model."""
    return {
        "path": str(source.path),
        "format": source.format,
        "layout": source.layout,
        "parameters": parameters(source.config).total,
        "step": source.step,
        "dtype": str(source.dtype).removeprefix("torch."),
        "tokenizer": source.tokenizer is not None,
        "model": source.config.model_dump(exclude_none=True),
        "problems": [] if holds_adapters(source) else misfits(source, source.config),
    }


def diff(a: CheckpointSource, b: CheckpointSource) -> dict[str, Any]:
    """The differences between two checkpoints: settings, names, sizes, and the largest difference of a weight.

    They `differ` if a weight differs, or a setting that changes what the weights compute. Training settings (dropout,
    standard deviation of initial weights) are listed, but do not count; padding rows of the vocabulary are ignored.
    """
    sizes_a, sizes_b = _comparable(a), _comparable(b)
    settings_a, settings_b = a.config.model_dump(), b.config.model_dump()
    both = [name for name in sizes_a if sizes_b.get(name) == sizes_a[name]]
    largest, where, differing = 0.0, None, 0
    with console.progress("compare", sum(math.prod(sizes_a[name]) for name in both), "weights") as progress:
        for name in both:
            rows = sizes_a[name][0]
            tensor_a, tensor_b = (source.tensor(name)[:rows] for source in (a, b))
            difference = _largest_difference(tensor_a, tensor_b)
            differing += difference > 0
            if difference > largest:
                largest, where = difference, name
            progress.advance(math.prod(sizes_a[name]))
    settings = {
        key: [settings_a.get(key), settings_b.get(key)]
        for key in sorted(settings_a.keys() | settings_b.keys())
        if settings_a.get(key) != settings_b.get(key)
    }
    # Tensors that only one checkpoint has, or that have different sizes, were not compared.
    is_whole = len(both) == len(sizes_a) == len(sizes_b)
    return {
        "differ": differing > 0 or not is_whole or not settings.keys() <= set(OF_TRAINING),
        "settings": settings,
        "only_in_a": sorted(sizes_a.keys() - sizes_b.keys()),
        "only_in_b": sorted(sizes_b.keys() - sizes_a.keys()),
        "other_sizes": {
            name: [sizes_a[name], sizes_b[name]]
            for name in sizes_a
            if name in sizes_b and sizes_a[name] != sizes_b[name]
        },
        "compared": len(both),
        "differing": differing,
        "largest_difference": largest,
        "largest_at": where,
    }


def _comparable(source: CheckpointSource) -> dict[str, tuple[int, ...]]:
    sizes = source.sizes()
    named = {name: sizes[name] for name in source.names() if name in sizes}
    return {name: (source.config.vocab, *size[1:]) if name in TABLES else size for name, size in named.items()}


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    largest = (a.double() - b.double()).abs().max().item()
    return math.inf if math.isnan(largest) else largest


def logits_difference(a: CheckpointSource, b: CheckpointSource, prompt: str) -> float:
    """The largest difference between the logits of two models on a prompt, both computed in fp32."""
    with_tokenizer = next((source for source in (a, b) if source.tokenizer is not None), None)
    if with_tokenizer is not None:
        ids = with_tokenizer.load_tokenizer().encode(prompt)
    else:
        console.warn("neither checkpoint has a tokenizer: the bytes of the prompt are used as token ids")
        ids = [byte % a.config.vocab for byte in prompt.encode()]
    if not ids:
        raise UserError("the prompt has no tokens")
    if max(ids) >= min(a.config.vocab, b.config.vocab):
        raise UserError(f"the prompt has the token id {max(ids)}, which is not in the vocabulary of one of the models")
    logits = [_logits(source, ids) for source in (a, b)]
    common = min(a.config.vocab, b.config.vocab)
    return _largest_difference(logits[0][..., :common], logits[1][..., :common])


def _logits(source: CheckpointSource, ids: list[int]) -> torch.Tensor:
    network = model.build(source.config)
    load_into(source, network)
    network.eval()
    with torch.inference_mode():
        logits: torch.Tensor = network(torch.tensor([ids]))
    return logits
