"""A measured training step, and defaults for its recipe, layout and cluster."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from staged_steps import StagedLayout, Width, staged_step

from steelyard.core.recipe import Recipe
from steelyard.planning import memory_fit
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.planning.software import Software


@dataclass(frozen=True)
class Case:
    """One measured step."""

    set: str
    name: str
    group: str
    """Cases of the same group are alternatives that a planner would choose from."""
    measured: float
    recipe: Recipe
    cluster: Cluster
    layout: Layout
    software: Software
    widths: tuple[Width, ...] = ()
    """Degrees of each stage, if they differ."""
    peak_bytes: float | None = None
    """Measured memory of the fullest rank."""
    device: bool = False
    """Whether the measured memory is the driver's count rather than PyTorch's."""

    def peak(self) -> float:
        """Predicted bytes of the fullest rank."""
        predictor = Predictor(self.recipe, self.cluster, self.software)
        staged = StagedLayout(self.layout, self.widths)
        layouts = [self.layout] * self.layout.pipeline
        if self.widths:
            layouts = [replace(staged.at(rank, self.recipe), sequence_parallel=self.layout.sequence_parallel)
                       for rank in range(self.layout.pipeline)]  # fmt: skip
        ranks = [memory_fit.memories_of(predictor, each, [rank])[0].total for rank, each in enumerate(layouts)]
        return memory_fit.of_process(max(ranks), self.cluster) if self.device else max(ranks)

    def predicted(self) -> float:
        """Predicted seconds."""
        if self.widths:
            predictor = Predictor(self.recipe, self.cluster, self.software)
            staged = StagedLayout(self.layout, self.widths)
            return staged_step(predictor, staged).seconds(self.layout.partition)
        return Predictor(self.recipe, self.cluster, self.software).parts(self.layout).total


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    batch: int,
    vocab: int = 51200,
    precision: str = "fp16",
    **more: Any,
) -> Recipe:
    """A GPT as Megatron trains it."""
    model = {"family": "gpt", "layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "positions": sequence}
    train = {"global_batch": batch, "micro_batch": 1, "precision": precision}
    return Recipe.model_validate(
        {"name": "case", "model": model | more, "data": {"sequence_length": sequence}, "train": train}
    )


def layout(
    tensor: int, data: int, pipeline: int, micro_batch: int, counts: tuple[int, ...], placement: Any, **more: Any
) -> Layout:
    """A layout with defaults."""
    settings = {
        "context": 1,
        "virtual": 1,
        "zero": 0,
        "sequence_parallel": False,
        "schedule": "1f1b",
        "recompute": "none",
    }
    return Layout(tensor=tensor, data=data, pipeline=pipeline, micro_batch=micro_batch, partition=counts,
                  placement=tuple(placement), **(settings | more))  # fmt: skip


def even(layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as Megatron distributes them."""
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def cluster(nodes: list[dict[str, Any]], network: float, transport: str = "rdma", **more: Any) -> Cluster:
    """A cluster with one network."""
    links = [{"between": ["*", "*"], "GBps": network, "transport": transport}]
    return Cluster.model_validate({"nodes": nodes, "links": links} | more)


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a csv file; empty if it does not exist."""
    if path.exists():
        with open(path, newline="") as file:
            yield from csv.DictReader(file)
