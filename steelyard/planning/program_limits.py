"""What other training programs can run and the planner can predict of them: limits of a search, and refusals.

Megatron-LM of 2021 to 2023   1F1B and interleaved 1F1B, equal stages, a distributed optimizer (ZeRO 1)
Megatron-DeepSpeed            DeepSpeed's pipeline engine: 1F1B, and ZeRO 0 and 1, because it refuses 2 and 3
TorchTitan 0.2.2              FSDP over data and context ranks that keeps gathered weights until the backward pass
                              (ZeRO 2) or not (ZeRO 3), tensor parallelism always with sequence parallelism, and at
                              least two stages per rank in the schedules that allow several (zero bubble, ZBV)

Steelyard itself runs everything that a recipe can contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import SearchLimits
from steelyard.planning.software import DEEPSPEED, MEGATRON, TORCHTITAN, Software


@dataclass(frozen=True)
class ProgramLimits:
    """What a program has."""

    title: str
    zeros: tuple[int, ...]
    """ZeRO stages over several data and context ranks."""
    schedules: tuple[str, ...]
    context: bool = False
    sequences: tuple[bool, ...] = (True, False)
    """Settings of sequence parallelism with tensor parallelism."""
    zero_bubble: tuple[int, ...] = (1, 2)
    """Stages per rank under zero bubble."""
    replicas: bool = False
    """Hybrid sharding."""
    even: bool = False
    """All stages have the same number of layers."""
    short: bool = False
    """1F1B runs with fewer micro-batches than pipeline ranks."""


LIMITS = {
    MEGATRON.name: ProgramLimits(
        "Megatron-LM of 2021 to 2023", (0, 1), ("1f1b", "interleaved"), even=True, short=True
    ),
    DEEPSPEED.name: ProgramLimits("Megatron-DeepSpeed", (0, 1), ("1f1b",), short=True),
    TORCHTITAN.name: ProgramLimits(
        "TorchTitan", (2, 3), ("1f1b", "gpipe", "interleaved", "zero-bubble"), context=True, sequences=(True,),
        zero_bubble=(2,), replicas=True,
    ),
}  # fmt: skip
# The only values that the memory of other programs has terms for.
PREDICTED = {"name": "adamw", "state": "fp32", "gradients": "fp32"}


def restricted(limits: SearchLimits, software: Software) -> SearchLimits:
    """The limits of a search without what the program does not have."""
    has = LIMITS.get(software.name)
    if has is None:
        return limits
    return replace(
        limits,
        contexts=limits.contexts if has.context else (1,),
        zeros=tuple(zero for zero in limits.zeros if zero in has.zeros),
        schedules=tuple(name for name in limits.schedules if name in has.schedules),
        sequences=tuple(on for on in limits.sequences if on in has.sequences),
        zero_bubble=has.zero_bubble,
        even=limits.even or has.even,
        short=limits.short or has.short,
    )


def is_short(software: Software) -> bool:
    """Whether 1F1B of the program runs with fewer micro-batches than pipeline ranks."""
    has = LIMITS.get(software.name)
    return has is not None and has.short


def refuse_recipe(recipe: Recipe, software: Software) -> None:
    """Raise `UserError` for a recipe that the planner cannot predict under the program, whatever its layout is."""
    has = LIMITS.get(software.name)
    if has is None:
        return
    if recipe.optim.offload:
        raise _error(recipe, "optim.offload", f"{has.title} keeps its optimizer on the GPU", "remove optim.offload")
    if recipe.model.blocks.has_experts:
        what = f"{has.title} is not predicted for {recipe.model.family}, which has experts"
        raise _error(recipe, "model.family", what, "choose a model without experts")
    for key, value in PREDICTED.items():
        if (given := getattr(recipe.optim, key)) != value:
            what = f'{has.title} is only predicted with optim.{key} = "{value}", not "{given}"'
            raise _error(recipe, f"optim.{key}", what, f"remove optim.{key}")


def refuse_layout(recipe: Recipe, layout: Layout, software: Software) -> None:
    """Raise `UserError` for a recipe's own layout that the program cannot run; uneven stages are predicted."""
    has = LIMITS.get(software.name)
    missing = None if has is None else next(_missing(recipe, layout, has), None)
    if missing is not None:
        key, what, hint = missing
        raise _error(recipe, f"parallel.{key}", what, hint)


def _missing(recipe: Recipe, layout: Layout, has: ProgramLimits) -> Iterator[tuple[str, str, str]]:
    """Keys of `[parallel]` that the program does not have: what is wrong, and what to do."""
    zeros = " or ".join(map(str, has.zeros))
    if layout.context > 1 and not has.context:
        yield "context", f"{has.title} has no context parallelism", "set parallel.context = 1"
    if layout.data * layout.context > 1 and layout.zero not in has.zeros:
        yield "zero", f"{has.title} is predicted with ZeRO {zeros}, not {layout.zero}", f"set parallel.zero to {zeros}"
    if layout.tensor > 1 and layout.sequence_parallel not in has.sequences:
        what = f"{has.title} has no tensor parallelism without sequence parallelism"
        yield "sequence_parallel", what, "set parallel.sequence_parallel = true"
    if recipe.parallel.replicate > 1 and not has.replicas:
        yield "replicate", f"{has.title} has no hybrid sharding", "remove parallel.replicate"
    if not isinstance(layout.recompute, str):
        what = f"{has.title} is not predicted with recomputation of {layout.recompute} layers per stage"
        yield "recompute", what, 'set parallel.recompute to "none", "selective" or "full"'
    if layout.pipeline == 1:
        return
    if layout.schedule not in has.schedules:
        what = f"{has.title} has no {layout.schedule} schedule"
        yield "schedule", what, f"set parallel.schedule to {' or '.join(has.schedules)}"
    elif layout.schedule == "zero-bubble" and layout.virtual not in has.zero_bubble:
        stages = " or ".join(map(str, has.zero_bubble))
        what = f"zero bubble of {has.title} has {stages} stages per rank, not {layout.virtual}"
        yield "virtual", what, f"set parallel.virtual to {stages}"


def _error(recipe: Recipe, key: str, what: str, hint: str) -> UserError:
    return UserError(what, where=recipe.where(key), hint=f"{hint}, or use --software steelyard")
