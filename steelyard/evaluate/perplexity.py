"""Perplexity of a text under a model: the same number for any number of ranks, with a description of the protocol.

Ranks along the data axis share the windows, ranks along the tensor axis the model. The head and the loss are computed
together, in chunks, so that the full logits are never in memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource
from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.evaluate import eval_tokens as streams
from steelyard.evaluate.eval_tokens import TokenStream
from steelyard.evaluate.load_model import context_of, loaded, mesh_for, tokenizer_for
from steelyard.evaluate.windows import Protocol, Window, WindowPlan, plan
from steelyard.model import Batch, LanguageModel
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.world import World, init_distributed, raise_on_all_ranks, run_on_rank0
from steelyard.sizes.param_count import parameters
from steelyard.sparsity import pruned_source as sparse
from steelyard.text.tokenizer import count_unknown, report_unknown
from steelyard.training.device import NAMES, device_for, dtype_for

LONGEST = 4096  # default length of windows, if the model's context is at least as long
TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}  # Larger batches are slower if caches are small.
TIMEOUT_MINUTES = 30.0


@dataclass(frozen=True)
class PerplexityRequest:
    """The options of the measurement."""

    checkpoint: str
    data: str
    length: int | None = None
    stride: int | None = None
    protocol: Protocol = "hf"
    tensor: int = 1
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    mask: str | None = None
    base: str | None = None
    allow_unknown: bool = False


def perplexity(request: PerplexityRequest) -> dict[str, Any] | None:
    """Measure on all ranks. Rank 0 gets the result."""
    device = device_for(request.device)
    with init_distributed(device.type, TIMEOUT_MINUTES) as world:
        console.quiet = console.quiet or not world.is_rank0
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        with raise_on_all_ranks(world):
            if world.size % request.tensor:
                raise UserError(f"{world.size} ranks are not a multiple of --tensor {request.tensor}", where="--nproc")
        source = _opened(request, world)
        with raise_on_all_ranks(world):
            length = _length(request, source)
        stream = _stream(request, source, world)
        unknown = run_on_rank0(world, lambda: _unknown(request, source, stream))
        dtype = dtype_for(request.dtype, source, device)
        with raise_on_all_ranks(world):
            streams.check_ids(stream, source.config.vocab)
            cut = plan(len(stream.tokens), length, request.stride, request.protocol)
            mesh = mesh_for(request.tensor, device)
            network = loaded(source, device, dtype, mesh, compiled=device.type == "cuda")
        begun = time.monotonic()
        total = _over_ranks(network, stream.tokens, cut.windows, mesh, device)
        seconds = time.monotonic() - begun
        if not world.is_rank0:
            return None
        return _result(request, source, stream, cut, total, dtype, device, world, seconds) | {"unknown": unknown}


def summed_loss(
    network: LanguageModel,
    tokens: npt.NDArray[Any],
    windows: list[Window],
    device: torch.device,
    advance: Callable[[float], None] = lambda amount: None,
) -> Tensor:
    """The sum of the losses that count, in fp64."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    with torch.inference_mode():
        for batch in _batches(windows, TOKENS_AT_ONCE[device.type]):
            rows = np.stack([tokens[window.start : window.end + 1] for window in batch]).astype(np.int64)
            rows_BL = torch.from_numpy(rows).to(device)
            total += network(Batch(rows_BL[:, :-1], rows_BL[:, 1:], _weights(batch, device))).double().sum()
            advance(rows_BL[:, 1:].numel())
    return total


def _batches(windows: list[Window], tokens_at_once: int) -> Iterator[list[Window]]:
    """Batches of windows of equal length, with up to `tokens_at_once` tokens."""
    batch: list[Window] = []
    for window in windows:
        length = window.end - window.start
        if batch and (length != batch[0].end - batch[0].start or (len(batch) + 1) * length > tokens_at_once):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _weights(batch: list[Window], device: torch.device) -> Tensor | None:
    length = batch[0].end - batch[0].start
    if all(window.counted == length for window in batch):
        return None
    positions_L = torch.arange(length, device=device)
    counted_B = torch.tensor([window.counted for window in batch], device=device)
    return (positions_L >= length - counted_B[:, None]).float()


def _over_ranks(
    network: LanguageModel, tokens: npt.NDArray[Any], windows: list[Window], mesh: Mesh, device: torch.device
) -> float:
    mine = windows[mesh.data.index :: mesh.data.size]
    work = sum(window.end - window.start for window in mine)
    with console.progress("perplexity", work, "tokens") as progress:
        total = summed_loss(network, tokens, mine, device, progress.advance)
    if mesh.world.size > 1:
        total /= mesh.tensor.size  # All ranks along the tensor axis have the same sum.
        torch.distributed.all_reduce(total)
    return total.item()


def _opened(request: PerplexityRequest, world: World) -> CheckpointSource:
    """The checkpoint with its masks applied. Rank 0 checks that these belong to it; all ranks open it."""

    def check_masks() -> None:
        sparse.opened(request.checkpoint, request.mask, request.base)

    if world.size > 1:
        run_on_rank0(world, check_masks)
    with raise_on_all_ranks(world):
        return sparse.opened(request.checkpoint, request.mask, request.base, checks=world.size == 1)


def _length(request: PerplexityRequest, source: CheckpointSource) -> int:
    """The length of windows. Learned positions have a hard limit; others only degrade beyond it."""
    sees = context_of(source)
    length = request.length or min(LONGEST, sees)
    if length > sees and source.config.blocks.positions is not None:
        raise UserError(
            f"windows of {length} tokens are longer than the model's {sees} positions", where="--sequence-length",
            hint=f"use {sees} or less",
        )  # fmt: skip
    if length > sees:
        console.warn(f"windows of {length} tokens are longer than the model's context of {sees} tokens")
    return length


def _stream(request: PerplexityRequest, source: CheckpointSource, world: World) -> TokenStream:
    """The tokens. Rank 0 encodes text for all ranks; each rank opens token files itself."""
    remark = streams.other_form(request.data, source)
    if remark and world.is_rank0:
        console.warn(remark)
    if streams.is_prefix(request.data):
        with raise_on_all_ranks(world):
            return streams.from_token_files(request.data)
    return run_on_rank0(world, lambda: streams.from_text(request.data, tokenizer_for(source, request.tokenizer)))


def _unknown(request: PerplexityRequest, source: CheckpointSource, stream: TokenStream) -> int | None:
    """The number of unknown tokens; None for token files without a tokenizer."""
    try:
        tokenizer = tokenizer_for(source, request.tokenizer)
    except UserError:
        return None
    unknown = count_unknown(stream.tokens, tokenizer)
    report_unknown(unknown, len(stream.tokens), tokenizer, request.data, request.allow_unknown)
    return unknown


def _result(
    request: PerplexityRequest,
    source: CheckpointSource,
    stream: TokenStream,
    cut: WindowPlan,
    total: float,
    dtype: torch.dtype,
    device: torch.device,
    world: World,
    seconds: float,
) -> dict[str, Any]:
    loss = total / cut.divisor
    computed = f"{NAMES[dtype]} on {device.type}, losses and their sums in fp32 and fp64"
    protocol = {"name": request.protocol, **stream.described, **cut.described, "computed": computed}
    remark = streams.other_form(request.data, source)
    return {
        "perplexity": math.exp(loss) if loss < 700 else None,
        "loss": loss,
        "tokens": len(stream.tokens),
        "predicted": sum(window.counted for window in cut.windows),
        "dropped": cut.dropped,
        "windows": len(cut.windows),
        "protocol": protocol | ({"remark": remark} if remark else {}),
        "checkpoint": str(source.path),
        "mask": request.mask or _own_masks(source),
        "step": source.step,
        "parameters": parameters(source.config).total,
        "ranks": world.size,
        "tensor": request.tensor,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(window.end - window.start for window in cut.windows) / seconds, 1),
    }


def _own_masks(source: CheckpointSource) -> str | None:
    """Where the applied masks come from, if the checkpoint has its own."""
    return str(source.masks.path) if isinstance(source, sparse.MaskedSource) else None


def as_text(result: dict[str, Any]) -> str:
    """The result as text: the number, and everything needed to compare it with another."""
    number = result["perplexity"]
    model = f"{units.count(result['parameters'])} parameters" + (f", step {result['step']}" if result["step"] else "")
    ranks = "1 rank" if result["ranks"] == 1 else f"{result['ranks']} ranks"
    lines = {
        "perplexity": "overflow" if number is None else f"{number:.4f}  (loss {result['loss']:.6f})",
        "model": f"{result['checkpoint']}, {model}",
        **({"mask": result["mask"]} if result["mask"] else {}),
        "tokens": f"{result['tokens']}, of which {result['predicted']} predicted"
        + (f" and {result['unknown']} unknown" if result["unknown"] else ""),
        "protocol": result["protocol"]["name"],
        **{key: value for key, value in result["protocol"].items() if key != "name"},
        "speed": f"{units.count(result['tokens_per_second'])} tokens/s on {ranks}",
    }
    width = max(map(len, lines))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in lines.items())
