"""Programmatic dependent launch: a kernel starts while the one before it is finishing, on Hopper and later.

Decoding a token is some 300 kernels of a few microseconds. Without this, the GPU is partly idle between two of them:
the blocks of one end one by one, and those of the next compute addresses and wait for their first loads. On an H200
an 8B model decodes 4 to 11% faster with it (docs/benchmarks.md). A kernel that is launched with `options` begins
earlier. It may read what no kernel writes, such as weights, and then calls `wait_for_previous`, which returns when
the kernel before it has ended and its results can be read. `let_next_start` allows the next kernel to begin; it has
an effect only if that one is launched with `options`.

Every kernel that is launched with `options` must wait, also if it needs no result of the kernel before it: the end of a
kernel then implies the end of all earlier ones.
"""

# Kernels have no types that mypy could check.
# mypy: disallow-untyped-defs=false, disallow-untyped-decorators=false, disallow-incomplete-defs=false
# mypy: disallow-untyped-calls=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = (9, 0)


@cache
def options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: whether the kernel is `early`, which it has as a parameter, and Triton's own option."""
    is_possible = device.type == "cuda" and torch.version.hip is None
    if is_possible and torch.cuda.get_device_capability(device) >= HOPPER:
        return {"early": True, "launch_pdl": True}
    return {"early": False}


@triton.jit
def let_next_start():
    """Allow the next kernel to begin, once all programs of this one have called this."""
    gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the kernel before this one has ended."""
    gdc_wait()
