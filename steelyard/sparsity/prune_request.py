"""The request of `steelyard prune`, and what can be said against it before torch is imported."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steelyard.core.errors import UserError

Method = Literal["magnitude", "wanda", "sparsegpt", "hessian"]
METHODS: tuple[Method, ...] = ("magnitude", "wanda", "sparsegpt", "hessian")


@dataclass(frozen=True)
class PruneRequest:
    """The options of `steelyard prune`."""

    checkpoint: str
    destination: Path
    method: str
    pattern: str = "2:4"
    update: bool | None = None
    """Whether the remaining weights compensate for the pruned ones; by default with sparsegpt if weights are saved."""
    calibration: str | None = None
    samples: int = 128
    length: int | None = None
    seed: int = 0
    save: str = "weights"
    dense_inputs: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    tensor: int = 1
    """Ranks that share the matrices of a layer; the other ranks share the calibration windows."""


def method_named(name: str) -> Method:
    """The method of a name, ignoring case."""
    for method in METHODS:
        if name.lower() == method:
            return method
    near = difflib.get_close_matches(name.lower(), METHODS, n=1)
    raise UserError(
        f"unknown pruning method {name}",
        where="--method",
        hint=f"did you mean {near[0]}?" if near else f"use one of {', '.join(METHODS)}",
    )


def method_and_update(request: PruneRequest) -> tuple[Method, bool]:
    """The method, and whether it updates weights. Raises an error for options that contradict it."""
    method = method_named(request.method)
    if request.update and method != "sparsegpt":
        raise UserError(f"{method} does not update weights", where="--update-weights", hint="use --method sparsegpt")
    if request.update and request.save == "mask":
        raise UserError(
            "a mask file contains no weights, so the update would be lost",
            where="--update-weights",
            hint="use --save weights, or remove --update-weights",
        )
    if request.calibration is None and method != "magnitude":
        raise UserError(f"{method} needs calibration", where="--calibration", hint="give a text or token files")
    return method, method == "sparsegpt" and request.save == "weights" if request.update is None else request.update
