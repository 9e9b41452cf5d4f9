"""SparseGPT on one matrix, compared with a direct reference implementation, in one run.

    python benchmarks/sparsegpt.py                                                          # 4096 x 4096 on a GPU
    python benchmarks/sparsegpt.py --size 512 --windows 8 --length 256 --device cpu         # small, anywhere

Both take the same bf16 inputs, sum x x^T, factor the damped inverse, and prune to 2:4 with the update. The reference
follows the paper literally: inputs in fp32, one column at a time, a product for each update. The best of the rounds
counts. The output errors are printed and must agree.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from steelyard.sparsity.input_statistics import Gram
from steelyard.sparsity.one_shot import Hessian, prune_matrix, reconstruction_error
from steelyard.sparsity.patterns import Pattern


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    random = torch.Generator(device).manual_seed(0)
    size = options.size
    weight = torch.randn(size, size, device=device, generator=random).bfloat16()
    scales = torch.rand(size, device=device, generator=random) + 0.1
    mixing = torch.randn(size, size, device=device, generator=random) / size**0.5
    windows = [
        ((torch.randn(options.length, size, device=device, generator=random) * scales) @ mixing).bfloat16()
        for _ in range(options.windows)
    ]
    hessian = _gram(windows).hessian.matrix_II
    result: dict[str, object] = {"size": size, "tokens": options.windows * options.length}
    for name, way in (("steelyard", _ours), ("reference", _reference)):
        seconds, pruned = _best(lambda way=way: way(weight, windows), options.rounds, device)
        lost, whole = reconstruction_error(weight, pruned, hessian)
        result[name] = {"seconds": round(seconds, 4), "error": round(lost / whole, 6)}
    print(json.dumps(result))


def _best(way: Callable[[], Tensor], rounds: int, device: torch.device) -> tuple[float, Tensor]:
    times = []
    for _ in range(rounds + 1):  # The first is the warm-up.
        begun = time.perf_counter()
        pruned = way()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
    return min(times[1:]), pruned


def _gram(windows: list[Tensor]) -> Gram:
    gram = Gram(windows[0].shape[1], windows[0].device)
    for window in windows:
        gram.add(window)
    return gram


def _ours(weight: Tensor, windows: list[Tensor]) -> Tensor:
    hessian: Hessian = _gram(windows).hessian
    return prune_matrix(weight, hessian, Pattern(2, 4), "sparsegpt", update=True).weight_OI


def _reference(weight: Tensor, windows: list[Tensor]) -> Tensor:
    columns = weight.shape[1]
    hessian = torch.zeros(columns, columns, device=weight.device)
    seen = 0
    for window in windows:
        hessian *= seen / (seen + len(window))
        seen += len(window)
        scaled = window.float() * (2 / seen) ** 0.5
        hessian += scaled.t().matmul(scaled)
    kept = weight.float()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    kept[:, dead] = 0
    hessian += torch.eye(columns, device=weight.device) * 0.01 * hessian.diagonal().mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor = torch.linalg.cholesky(inverse, upper=True)
    for first in range(0, columns, 128):
        end = min(first + 128, columns)
        block, part = kept[:, first:end].clone(), factor[first:end, first:end]
        mask, errors = torch.zeros_like(block, dtype=torch.bool), torch.zeros_like(block)
        for column in range(end - first):
            if column % 4 == 0:
                scores = block[:, column : column + 4] ** 2 / part.diagonal()[column : column + 4] ** 2
                mask.scatter_(1, column + scores.topk(2, dim=1, largest=False)[1], True)
            pruned = block[:, column].masked_fill(mask[:, column], 0)
            error = (block[:, column] - pruned) / part[column, column]
            block[:, column:] -= error[:, None].matmul(part[column, column:][None])
            block[:, column] = pruned
            errors[:, column] = error
        kept[:, first:end] = block
        kept[:, end:] -= errors.matmul(factor[first:end, end:])
    return kept.to(weight.dtype)


if __name__ == "__main__":
    main()
