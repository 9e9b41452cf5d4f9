"""Letting a model write: sampling token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from steelyard import checkpoint, model
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer
from steelyard.train import device as devices


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the likeliest; top_k 0 leaves all in."""

    max_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 50
    seed: int = 0


def from_checkpoint(path: str | Path, prompt: str, sampling: Sampling) -> str:
    """Load a checkpoint or a run's newest one and continue the prompt."""
    saved = checkpoint.source(path)
    recipe = saved.run.recipe()
    if recipe.data.tokenizer is None:
        raise UserError(f"the recipe of {saved.run.path} names no tokenizer", mend="set data.tokenizer")
    tokenizer = tokenizers.load(recipe.data.tokenizer)
    return generate(_loaded(saved, recipe), tokenizer, prompt, sampling, recipe.data.sequence_length)


def generate(network: nn.Module, tokenizer: Tokenizer, prompt: str, sampling: Sampling, context: int) -> str:
    """The prompt and what the model makes of it, up to the end of the document."""
    device = next(network.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    ids = [tokenizer.end_of_document, *tokenizer.encode(prompt)]
    network.eval()
    with torch.inference_mode():
        for _ in range(sampling.max_tokens):
            window = torch.tensor([ids[-context:]], device=device)
            chosen = _choose(network(window)[0, -1].float(), sampling, generator)
            if chosen == tokenizer.end_of_document:
                break
            ids.append(chosen)
    return tokenizer.decode(ids)


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if 0 < sampling.top_k < len(logits_V):
        kept = logits_V.topk(sampling.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < kept, -torch.inf)
    chances = torch.softmax(logits_V / sampling.temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))


def _loaded(saved: checkpoint.Checkpoint, recipe: Recipe) -> nn.Module:
    with devices.choose(recipe):
        network = model.build(recipe.model)
    checkpoint.load(saved, {f"model.{name}": tensor.detach() for name, tensor in network.named_parameters()})
    return network
