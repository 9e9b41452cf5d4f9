"""Compares the speed and memory of a 2:4 model with compressed and with dense weights: prefill and decode.

Compressed weights have 16-bit values, and in further columns 8-bit values, as in the checkpoint or as requested.

On a GPU a step is captured as a CUDA graph and replayed in both cases, so that the comparison measures the GPU's work
and not the host's launch overhead. Decode is timed at one position of the text, after `context` tokens.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint.formats.compressed_tensors import CompressedSource
from steelyard.checkpoint.formats.row_scales import DTYPES, ValueFormat
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.evaluate.decode_graph import Decoder, span_of
from steelyard.evaluate.load_model import context_of, loaded
from steelyard.model import Batch, Cache, LanguageModel
from steelyard.sparsity import sparse_linear
from steelyard.sparsity.pruned_source import opened
from steelyard.sparsity.random_source import RandomCompressed
from steelyard.sparsity.semi_structured import CompressedView, compressible
from steelyard.training.device import NAMES, device_for, dtype_for

DENSE, SPARSE = "dense", "sparse"
ROUNDS = {"cuda": 20, "cpu": 3}


@dataclass(frozen=True)
class BenchRequest:
    """The options of the benchmark."""

    checkpoint: str | None = None
    shape: str | None = None
    """A recipe whose model is measured with random weights, without a checkpoint."""
    mask: str | None = None
    base: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    prompt: int = 4096
    context: int = 512
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    allow_dense: bool = False
    values: tuple[ValueFormat, ...] = ()


def sparse(request: BenchRequest) -> dict[str, Any]:
    """Benchmark a checkpoint with dense and compressed weights."""
    if request.device != "cpu" and not torch.cuda.is_available():
        raise UserError(
            "compressed weights are fast only on a GPU, and there is none here",
            where="--device",
            hint="--device cpu runs the plain versions, which tests that they work but not their speed",
        )
    device = device_for(request.device)
    views = _views(request)
    source = views[DENSE]
    dtype = dtype_for(request.dtype, source, device)
    if device.type == "cuda" and dtype not in sparse_linear.DTYPES:
        dtype = torch.bfloat16
    prompt, context = min(request.prompt, context_of(source)), min(request.context, context_of(source) - 1)
    sides = {}
    for side, view in views.items():
        network = loaded(view, device, dtype, sparse=side != DENSE)
        with torch.inference_mode(), sparse_linear.for_graphs():
            sides[side] = _side(network, prompt, context, request.batches, device)
        speeds = ", ".join(f"{what} {value:.4g} tokens/s" for what, value in sides[side].items() if what != "memory")
        console.say(f"{side}: {speeds}")
        del network
    return {
        "checkpoint": str(source.path),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, plain versions",
        "dtype": NAMES[dtype],
        "prompt": prompt,
        "context": context,
        "values": [side for side in sides if side in DTYPES],
        "rows": _rows(sides),
        "kernels": dict(_chosen_kernels()),
    }


def _views(request: BenchRequest) -> dict[str, CompressedSource | CompressedView]:
    """The weights of each side. From 8-bit values, the other sides have the weights that these represent."""
    if (request.checkpoint is None) == (request.shape is None):
        raise UserError("give either a checkpoint or --shape", hint="steelyard bench sparse --shape llama3.1-8b")
    views: dict[str, CompressedSource | CompressedView] = {}
    if request.shape is not None:
        views[DENSE] = views[SPARSE] = RandomCompressed(request.shape)
        for kind in request.values:
            views[kind] = RandomCompressed(request.shape, kind)
        return views
    assert request.checkpoint is not None
    source = opened(request.checkpoint, request.mask, request.base)
    plain = compressible(source, request.allow_dense)
    views[DENSE] = views[SPARSE] = plain
    if isinstance(source, CompressedSource) and source.value_format is not None:
        views[source.value_format] = source
    for kind in request.values:
        views.setdefault(kind, CompressedView(source, plain.compressed, kind))
    return views


def _side(
    network: LanguageModel, prompt: int, context: int, batches: tuple[int, ...], device: torch.device
) -> dict[str, float]:
    found: dict[str, float] = {"memory": float(_bytes(network))}
    tokens_BL = torch.randint(0, network.config.vocab, (1, prompt), device=device)
    found[f"prefill {prompt}"] = prompt / _seconds(lambda: network(Batch(tokens_BL, logits_to_keep=1)), device)
    for batch in batches:
        prompt_BL = torch.randint(0, network.config.vocab, (batch, context), device=device)
        found[f"decode {batch}"] = batch / _seconds(_decode_step(network, prompt_BL), device)
    return found


def _decode_step(network: LanguageModel, prompt_BL: Tensor) -> Callable[[], Tensor]:
    """The step that `generate` repeats, with the choice of the most likely token."""
    batch, context = prompt_BL.shape
    cache = Cache(context + 1)
    network(Batch(prompt_BL, logits_to_keep=1), cache=cache)
    decoder = Decoder(network, cache, batch)
    decoder.position_1.fill_(context)

    def step() -> Tensor:
        logits_BV = decoder.step(span_of(context + 1, cache.allocated))
        decoder.tokens_B1.copy_(logits_BV.argmax(-1, keepdim=True))
        return logits_BV

    return step


def _seconds(step: Callable[[], Tensor], device: torch.device) -> float:
    """The median time of a step; on a GPU of its CUDA graph."""
    if device.type != "cuda":
        step()
        return statistics.median(_timed(step) for _ in range(ROUNDS["cpu"]))
    for _ in range(3):  # Compiles kernels, and selects the fastest ones.
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS["cuda"] + 1)]
    graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(float(before.elapsed_time(after)) / 1000 for before, after in itertools.pairwise(marks))


def _timed(step: Callable[[], Tensor]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def _bytes(network: LanguageModel) -> int:
    """The bytes of all weights. Shared memory is counted once."""
    tensors = [*network.parameters(), *network.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _rows(sides: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for what, value in sides[DENSE].items():
        is_memory = what == "memory"
        row: dict[str, Any] = {"what": what, "unit": "bytes" if is_memory else "tokens/s"}
        for side, found in sides.items():
            row[side] = found[what]
            if side != DENSE:
                row[_gain(side)] = round(value / found[what] if is_memory else found[what] / value, 3)
        rows.append(row)
    return rows


def _gain(side: str) -> str:
    return "gain" if side == SPARSE else f"gain_{side}"


def _chosen_kernels() -> Iterator[tuple[str, str]]:
    for (_, dtype, outputs, groups, rows, in_graph, stored), config in sparse_linear.CHOICES.found.items():
        if in_graph:
            values = "" if stored == dtype else f", {str(stored).removeprefix('torch.')} values"
            yield f"{outputs}x{4 * groups}, up to {1 << rows} rows{values}", str(config)


def as_text(result: dict[str, Any]) -> str:
    """The result as a table."""
    lines = [f"{result['checkpoint']} on {result['device']}, {result['dtype']}", ""]
    compressed = [SPARSE, *result["values"]]
    lines.append(f"{'':16} {DENSE:>14}" + "".join(f" {side:>14} {'gain':>7}" for side in compressed))
    for row in result["rows"]:
        line = f"{row['what']:16} {_shown(row, DENSE):>14}"
        lines.append(line + "".join(f" {_shown(row, side):>14} {row[_gain(side)]:>6.2f}x" for side in compressed))
    return "\n".join(lines)


def _shown(row: dict[str, Any], side: str) -> str:
    return units.size(row[side]) if row["unit"] == "bytes" else f"{units.count(row[side])} tok/s"
