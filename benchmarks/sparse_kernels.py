"""All sparsity kernels on one GPU: checked against the reference version, then timed against a baseline.

    python benchmarks/sparse_kernels.py                 # all parts, on one GPU
    python benchmarks/sparse_kernels.py masked decode   # some parts
    python benchmarks/sparse_kernels.py --tiny          # interpreted on a CPU, as a smoke test

masked   forward and backward of a linear layer with learned masks, compared with a dense trainable layer (three
         products), a dense frozen one (two) and the reference version; memory held between the passes
decode   1 to 16 rows with a compressed 2:4 matrix, compared with the dense product, for each kernel variant
prefill  thousands of rows through cuSPARSELt, compared with the dense product
prune    SparseGPT on one matrix, compared with a direct implementation of the published algorithm

Times are medians of replays of CUDA graphs. `decode` alternates between several matrices of the same size, so that none
is in the L2 cache. Prints a table and, after each part, one line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

if not torch.cuda.is_available():  # Interpret the kernels; this must be set before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch import Tensor
from torch.nn import functional as F

from steelyard.checkpoint.formats.compressed_tensors import compress
from steelyard.sparsity import gumbel, masked_kernels, sparse_gemv, sparse_linear, sparse_mma
from steelyard.sparsity.gumbel import GroupOffset
from steelyard.sparsity.input_statistics import Gram
from steelyard.sparsity.one_shot import prune_matrix
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.semi_structured import Packed, packed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TWO_OF_FOUR = Pattern.parse("2:4")
CACHE_BYTES = 256 << 20  # more than any GPU's L2
ROUNDS = 20 if DEVICE.type == "cuda" else 1
ROWS: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Sizes:
    """The measured sizes."""

    masked: tuple[tuple[int, int], ...] = ((4096, 4096), (11008, 4096))
    tokens: int = 4096
    decode: tuple[tuple[int, int], ...] = ((14336, 4096), (4096, 14336))
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    prefill: tuple[tuple[int, int], ...] = ((14336, 4096), (4096, 14336))
    rows: tuple[int, ...] = (4096, 8192)
    prune: tuple[int, int] = (4096, 4096)
    windows: int = 128
    length: int = 2048


TINY = Sizes(((16, 32),), 8, ((32, 2048),), (1, 3), ((32, 64),), (24,), (32, 64), 2, 64)


def main() -> None:
    """Run the measurements of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"masked": masked, "decode": few_rows, "prefill": prefill, "prune": prune}
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}; default: all")
    parser.add_argument("--tiny", action="store_true", help="sizes that are small enough for the interpreter")
    parser.add_argument(
        "--all-ways", action="store_true", help="a row for each kernel variant of decode, not only for the best"
    )
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.tiny:
        parser.error("there is no GPU; --tiny runs on a CPU, without meaningful speeds")
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    for name in options.parts or parts:
        ROWS.clear()
        parts[name](TINY if options.tiny else Sizes(), options)
        print(json.dumps({"what": name, "device": device, "torch": torch.__version__, "rows": ROWS}), flush=True)


def row(what: str, milliseconds: float, beside: float | None = None, wanted: str = "", **more: Any) -> None:
    """Print a measurement; `gain` is the speedup over the baseline `beside`."""
    gain = None if beside is None else round(beside / milliseconds, 3)
    ROWS.append({"what": what, "ms": round(milliseconds, 5), "gain": gain, "wanted": wanted, **more})
    reported = "  ".join(f"{key} {value}" for key, value in more.items())
    print(
        f"{what:56} {milliseconds:9.4f} ms  {'' if gain is None else f'{gain:.2f}x':>7}  {wanted:12} {reported}",
        flush=True,
    )


def masked(sizes: Sizes, options: argparse.Namespace) -> None:
    """Measure linear layers with learned masks."""
    for outputs, inputs in sizes.masked:
        masked_map(outputs, inputs, sizes.tokens)


def masked_map(outputs: int, inputs: int, tokens: int) -> None:
    """Measure one linear layer with learned masks."""
    weight, x, grad = (random(*size) for size in ((outputs, inputs), (tokens, inputs), (tokens, outputs)))
    logits = 0.01 * random(outputs, inputs // 4, 6, dtype=torch.float32)
    offset, salt = GroupOffset(0, 0, inputs // 4), gumbel.salt_of(0, "benchmark")
    draw = gumbel.draw_of(torch.tensor([1], device=DEVICE))
    anneal = torch.tensor([100.0, 4.0, 1e-5], device=DEVICE)
    rest = (TWO_OF_FOUR.candidates().to(DEVICE), draw, anneal, salt, offset, False)
    for tensor in (weight, x, logits):
        tensor.requires_grad_()
    frozen, fixed = weight.detach(), logits.detach()

    def learned(arithmetic: Callable[..., Tensor] = masked_kernels.masked_weight) -> tuple[Tensor, ...]:
        y = F.linear(x, arithmetic(frozen, logits, *rest))
        return torch.autograd.grad(y, (x, logits), grad)

    name = f"{outputs}x{inputs}, {tokens} tokens"
    trainable = timed(lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), grad))
    row(f"dense trainable {name}", trainable)
    row(f"dense frozen {name}", timed(lambda: torch.autograd.grad(F.linear(x, frozen), x, grad)))
    errors = [difference(a, b) for a, b in zip(learned(), learned(gumbel.masked_weight), strict=True)]
    assert max(errors) < 0.02, f"masked: {errors}"
    took = timed(learned)
    kept = held(lambda: F.linear(x, masked_kernels.masked_weight(frozen, logits, *rest)), frozen)
    row(f"masked {name}", took, trainable, "above 0.74", times_dense=round(took / trainable, 3), errors=errors,
        held_bytes_a_weight=kept)  # fmt: skip
    where = (draw, anneal, *salt, 0, 0, inputs // 4, False)
    forward = timed(lambda: masked_kernels._masked_weight(frozen, fixed, *where))
    backward = timed(lambda: masked_kernels._masked_weight_backward(frozen, frozen, fixed, *where))
    for kind, seconds, bytes_ in (("forward", forward, 10), ("backward", backward, 16)):
        row(f"  kernel {kind} {name}", seconds, tb_per_s=round(bytes_ * frozen.numel() / seconds / 1e9, 2))
    row(f"  plain, not fused {name}", timed(lambda: learned(gumbel.masked_weight), graphed=False), trainable)


def few_rows(sizes: Sizes, options: argparse.Namespace) -> None:
    """Measure few rows with a compressed matrix, as in decoding."""
    for outputs, inputs in sizes.decode:
        copies = -(-CACHE_BYTES // (outputs * inputs * 9 // 8)) if DEVICE.type == "cuda" else 1
        whole = [pruned(outputs, inputs) for _ in range(copies)]
        compressed = [packed(*compress(weight)) for weight in whole]
        assert torch.equal(sparse_gemv.expand(compressed[0]), whole[0]), "expand"
        for batch in sizes.batches:
            few_rows_of(random(batch, inputs), whole, compressed, options.all_ways)


def few_rows_of(x: Tensor, whole: list[Tensor], compressed: list[Packed], all_ways: bool) -> None:
    """Measure the rows of `x` with every kernel variant."""
    outputs, inputs = whole[0].shape
    name = f"{len(x)} rows, {outputs}x{inputs}"
    expected = (x.float() @ whole[0].float().t()).to(x.dtype)
    plain = timed(*[partial(F.linear, x, weight) for weight in whole])
    row(f"dense {name}", plain, tb_per_s=round(outputs * inputs * 2 / plain / 1e9, 2))
    found = {}
    for way in sparse_gemv.configs(len(x), compressed[0]):
        try:
            error = difference(sparse_gemv.few_rows(x, compressed[0], way), expected)
        except Exception as problem:  # A variant that this GPU or Triton does not support must not hide the others.
            print(f"  {shown(way)} failed: {problem}", flush=True)
            continue
        assert error < 0.02, f"{way}: {error}"
        found[way] = timed(*[partial(sparse_gemv.few_rows, x, each, way) for each in compressed])
        if all_ways:
            row(f"  {shown(way)}", found[way], plain, error=error)
    best = min(found, key=found.__getitem__)
    row(f"2:4 {name}", found[best], plain, "above 1.40", way=shown(best),
        tb_per_s=round(outputs * inputs * 9 / 8 / found[best] / 1e9, 2))  # fmt: skip


def prefill(sizes: Sizes, options: argparse.Namespace) -> None:
    """Measure many rows: cuSPARSELt if available, and a temporary dense matrix."""
    for outputs, inputs in sizes.prefill:
        whole = pruned(outputs, inputs)
        compressed = packed(*compress(whole))
        form = sparse_linear._cusparselt_compressed(compressed) if DEVICE.type == "cuda" else None
        if form is not None:
            shares = torch.equal(form.flatten()[: compressed.values.numel()], compressed.values.flatten())
            print(f"cuSPARSELt's form begins with our values: {shares}", flush=True)
        for rows in sizes.rows:
            many_rows_of(random(rows, inputs), whole, compressed, form)


def many_rows_of(x: Tensor, whole: Tensor, compressed: Packed, form: Tensor | None) -> None:
    """Measure the rows of `x` with cuSPARSELt's default and its best algorithm, and with the expanded matrix."""
    name = f"{len(x)} rows, {whole.shape[0]}x{whole.shape[1]}"
    plain = timed(lambda: F.linear(x, whole))
    row(f"dense {name}", plain)
    row(f"expand and multiply {name}", timed(lambda: sparse_linear._expanded_product(x, compressed)), plain)
    if form is None:
        return
    expected = F.linear(x, whole)
    for algorithm in sorted({0, int(torch._cslt_sparse_mm_search(form, x.t(), transpose_result=True))}):
        product = partial(sparse_linear._cusparselt_product, x, form, algorithm)
        error = difference(product(), expected)
        row(f"cuSPARSELt, algorithm {algorithm}, {name}", timed(product), plain, "above 1.25", error=error)
        row(f"  the same without a graph, {name}", timed(product, graphed=False), plain)


def prune(sizes: Sizes, options: argparse.Namespace) -> None:
    """Measure SparseGPT on one matrix: accumulating x x^T, and pruning the columns."""
    outputs, inputs = sizes.prune
    weight = random(outputs, inputs)
    windows = [random(sizes.length, inputs) for _ in range(sizes.windows)]

    def ours() -> Tensor:
        gram = Gram(inputs, DEVICE)
        for window in windows:
            gram.add(window)
        return prune_matrix(weight, gram.hessian, TWO_OF_FOUR, "sparsegpt", update=True).weight_OI

    def theirs() -> Tensor:
        return published(weight, windows)

    for function in (ours, theirs):
        function()
    took = {function.__name__: statistics.median(clocked(function) for _ in range(3)) for function in (ours, theirs)}
    name = f"{outputs}x{inputs}, {sizes.windows} x {sizes.length} tokens"
    agree = ((ours() == 0) == (theirs() == 0)).float().mean().item()
    row(f"SparseGPT as published, {name}", took["theirs"])
    row(f"SparseGPT, {name}", took["ours"], took["theirs"], "above 1.00", masks_agree=round(agree, 4))


def published(weight: Tensor, windows: list[Tensor]) -> Tensor:
    """SparseGPT's algorithm for 2:4 as in the paper: one window and one column at a time."""
    columns = weight.shape[1]
    hessian = torch.zeros(columns, columns, device=weight.device)
    for seen, window in enumerate(windows, start=1):
        hessian *= (seen - 1) / seen
        x = (2 / seen) ** 0.5 * window.t().float()
        hessian += x @ x.t()
    w = weight.float().clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    w[:, dead] = 0
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    for first in range(0, columns, 128):
        last = min(first + 128, columns)
        block, kept, errors = (
            w[:, first:last].clone(),
            torch.zeros_like(w[:, first:last]),
            torch.zeros_like(w[:, first:last]),
        )
        factor = inverse[first:last, first:last]
        gone = torch.zeros_like(block, dtype=torch.bool)
        for column in range(last - first):
            if column % 4 == 0:
                scores = block[:, column : column + 4] ** 2 / factor.diagonal()[column : column + 4].reshape(1, -1) ** 2
                gone.scatter_(1, column + torch.topk(scores, 2, dim=1, largest=False)[1], True)
            value = block[:, column].clone()
            value[gone[:, column]] = 0
            kept[:, column] = value
            error = (block[:, column] - value) / factor[column, column]
            block[:, column:] -= error[:, None] @ factor[column, column:][None]
            errors[:, column] = error
        w[:, first:last] = kept
        w[:, last:] -= errors @ inverse[first:last, last:]
    return w.to(weight.dtype)


def shown(way: sparse_gemv.GemvConfig | sparse_mma.MmaConfig) -> str:
    """A kernel variant as text."""
    reported = " ".join(f"{field.name} {getattr(way, field.name)}" for field in dataclasses.fields(way))
    return f"cores {reported}" if isinstance(way, sparse_mma.MmaConfig) else reported


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(*size, device=DEVICE, dtype=dtype)


def pruned(outputs: int, inputs: int) -> Tensor:
    """A 2:4 matrix."""
    weight = random(outputs, inputs)
    return weight * TWO_OF_FOUR.keep_best(weight.abs().float())


def difference(a: Tensor, b: Tensor) -> float:
    """The norm of the difference, relative to the norm of the expected tensor `b`."""
    return round(((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)).item(), 6)


def held(forward: Callable[[], Tensor], weight: Tensor) -> float | None:
    """Bytes per weight that a forward pass keeps for the backward pass, without its output."""
    if DEVICE.type != "cuda":
        return None
    forward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = forward()
    torch.cuda.synchronize()
    return round((torch.cuda.memory_allocated() - before - y.numel() * y.element_size()) / weight.numel(), 3)


def clocked(function: Callable[[], object]) -> float:
    """Wall milliseconds, including the device's work."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    function()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begun)


def timed(*steps: Callable[[], object], graphed: bool = True) -> float:
    """Milliseconds of a step: the median over replays of a graph of all of them, divided by their number."""
    if DEVICE.type != "cuda":
        return statistics.median(clocked(step) for step in steps)

    def all_steps() -> None:
        for step in steps:
            step()

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            all_steps()
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    run = all_steps
    if graphed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(max(1, 8 // len(steps))):
                all_steps()
        run = graph.replay
    count = len(steps) * (max(1, 8 // len(steps)) if graphed else 1)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    run()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks)) / count


if __name__ == "__main__":
    main()
