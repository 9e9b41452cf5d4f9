"""Magnitude, Wanda and SparseGPT in one file that imports nothing of Steelyard, as a reference for `steelyard prune`.

    python benchmarks/one_shot_reference.py SMOL --calibration learn.txt --text measure.txt --method wanda
    python benchmarks/one_shot_reference.py SMOL --text measure.txt --score pruned-by-steelyard

SMOL is a Hugging Face folder of a Llama. All matrices of all layers are pruned to 2:4, layer by layer: the inputs of a
layer come from the pruned layers before it, and the matrices of a layer are pruned by the inputs they have before any
of them is pruned, as in the published code of SparseGPT and Wanda. Windows are drawn as `steelyard prune` draws them:
`numpy.random.RandomState(0)`, any token may be the first. Ties go to the lower index (`torch.topk` or `sort`).
Perplexity is over windows of the same length without overlap, by transformers, in fp32.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

METHODS = ("magnitude", "wanda", "sparsegpt")
BLOCK, DAMPING = 128, 0.01


def main() -> None:
    """Prune and score by the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True, help="scored")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--score", nargs="*", default=[], help="score these folders as well")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, help="scored windows; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)

    def tokens(path: Path) -> Tensor:
        return torch.tensor(tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids)

    def scored(model: Any) -> float:
        return perplexity(model, tokens(options.text), options.length, options.windows)

    if options.method:
        begun = time.perf_counter()
        model = load(options.model, options.device)
        windows = None
        if options.method != "magnitude":
            stream = tokens(options.calibration)
            starts = np.random.RandomState(0).randint(0, len(stream) - options.length + 1, options.samples)
            windows = torch.stack([stream[start : start + options.length] for start in starts]).to(options.device)
        prune(model, options.method, windows)
        seconds = round(time.perf_counter() - begun)
        print(json.dumps({"method": options.method, "perplexity": scored(model), "seconds": seconds}), flush=True)
    for folder in options.score:
        print(json.dumps({"folder": folder, "perplexity": scored(load(folder, options.device))}), flush=True)


def load(folder: str, device: str) -> Any:
    """A model in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


@torch.inference_mode()
def perplexity(model: Any, stream: Tensor, length: int, most: int | None) -> float:
    """The exponential of the mean loss over windows without overlap; the first token of a window is not scored."""
    windows = stream[: len(stream) // length * length].view(-1, length)[:most]
    losses = [float(model(window[None], labels=window[None]).loss) for window in windows.to(model.device)]
    return round(math.exp(sum(losses) / len(losses)), 4)


@torch.inference_mode()
def prune(model: Any, method: str, windows: Tensor | None) -> None:
    """Prune all matrices of all layers to 2:4 in place."""
    layers = model.model.layers
    if windows is None:
        for layer in layers:
            for linear in linears(layer):
                linear.weight.data *= keep_two_of_four(linear.weight.abs())
        return
    states = [model.model.embed_tokens(window[None]) for window in windows]
    places = torch.arange(windows.shape[1], device=windows.device)[None]
    rotary = model.model.rotary_emb(states[0], places)

    def run(layer: Any) -> list[Tensor]:
        outputs = []
        for state in states:
            output = layer(state, attention_mask=None, position_ids=places, position_embeddings=rotary)
            outputs.append(output[0] if isinstance(output, tuple) else output)
        return outputs

    for layer in layers:
        sums = {linear: linear.weight.new_zeros(2 * (linear.in_features,)) for linear in linears(layer)}
        hooks = [linear.register_forward_pre_hook(_adding(sums)) for linear in sums]
        run(layer)
        for hook in hooks:
            hook.remove()
        for linear, gram in sums.items():
            if method == "wanda":
                linear.weight.data *= keep_two_of_four(linear.weight.abs() * gram.diagonal().sqrt())
            else:
                linear.weight.data = sparsegpt(linear.weight.data, gram / windows.numel() * 2)
        states = run(layer)


def linears(layer: Any) -> list[torch.nn.Linear]:
    """The matrices of a layer."""
    return [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]


def _adding(sums: dict[torch.nn.Linear, Tensor]) -> Callable[..., None]:
    def add(linear: torch.nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).float()
        sums[linear] += rows.T @ rows

    return add


def keep_two_of_four(scores: Tensor) -> Tensor:
    """1 for the two largest scores of every four neighbours in a row."""
    groups = scores.unflatten(-1, (-1, 4))
    order = groups.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(groups).scatter_(-1, order[..., :2], 1.0).flatten(-2)


def sparsegpt(weight: Tensor, hessian: Tensor) -> Tensor:
    """Frantar and Alistarh, algorithm 1: column by column, with the error passed on to the columns that follow."""
    weight, columns = weight.clone(), weight.shape[1]
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(columns, device=weight.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        block, errors = weight[:, first:last].clone(), torch.zeros_like(weight[:, first:last])
        keep = torch.ones_like(block)
        inner = factor[first:last, first:last]
        for column in range(last - first):
            if column % 4 == 0:
                scores = block[:, column : column + 4] ** 2 / inner.diagonal()[column : column + 4] ** 2
                keep[:, column : column + 4] = keep_two_of_four(scores)
            pruned = block[:, column] * keep[:, column]
            error = (block[:, column] - pruned) / inner[column, column]
            block[:, column:] -= error[:, None] * inner[column, column:]
            block[:, column] = pruned
            errors[:, column] = error
        weight[:, first:last] = block
        weight[:, last:] -= errors @ factor[first:last, last:]
    return weight


if __name__ == "__main__":
    main()
