"""An exhaustive search, written without the planner's search: every layout, every partition, priced one by one.

Only the space itself (`layout_space`) and the prediction of one layout are shared with the planner.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from steelyard.core.recipe import Recipe
from steelyard.planning import layout_space, memory_fit, program_limits
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import Layout
from steelyard.planning.layout_space import SearchLimits, Use
from steelyard.planning.predict import Predictor
from steelyard.planning.results import weight
from steelyard.planning.software import DEEPSPEED, MEGATRON, STEELYARD, TORCHTITAN, Software, as_run
from steelyard.sizes.param_count import parameters


def compositions(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide layers among stages."""
    if stages == 1:
        yield (layers,)
        return
    for first in range(layers + 1):
        for rest in compositions(layers - first, stages - 1):
            yield (first, *rest)


class Space(NamedTuple):
    """What is searched."""

    recipe: Recipe
    machines: Cluster
    limits: SearchLimits
    software: Software = STEELYARD

    def layouts(self, use: Use) -> Iterator[Layout]:
        """Every layout on some nodes, without layers per stage."""
        recipe, limits, batch = self.recipe, self.limits, self.recipe.train.global_batch
        for tensor, context, micro_batch in product(
            layout_space.tensors(recipe, self.machines, use, limits),
            layout_space.contexts(recipe, limits),
            layout_space.micro_batches(recipe, limits),
        ):
            if use.ranks % (tensor * context):
                continue
            groups, rounds = use.ranks // (tensor * context), batch // micro_batch
            for pipeline, data in layout_space.meshes(groups, rounds, recipe.model.layers):
                if not layout_space.agrees(recipe, limits, tensor, context, pipeline):
                    continue
                for placement, (schedule, virtual), zero, recompute, sequence, expert in product(
                    layout_space.orders(use, limits) if pipeline > 1 else [use.counts],
                    layout_space.schedules(recipe, pipeline, rounds // data, limits),
                    layout_space.zeros(pipeline, data * context, limits),
                    limits.recomputes,
                    layout_space.sequences(recipe, tensor, context, limits),
                    layout_space.experts(recipe, data * context),
                ):
                    yield Layout(
                        tensor, context, pipeline, virtual, data, zero, sequence, schedule, micro_batch, recompute, (),
                        placement, expert,
                    )  # fmt: skip

    def everything(self) -> list[Layout]:
        """Every layout of the space, without layers per stage."""
        return [each for use in layout_space.uses(self.machines, self.limits)[0] for each in self.layouts(use)]

    def fastest(self) -> list[tuple[float, Layout]]:
        """Of each set of nodes the fastest layout that fits, with its seconds."""
        predictors = {
            splits: Predictor(self.recipe, self.machines, as_run(self.software, self.recipe, splits))
            for splits in (False, True)
        }
        found, layers = [], self.recipe.model.layers
        for use in layout_space.uses(self.machines, self.limits)[0]:
            each = []
            for chosen in self.layouts(use):
                predictor = predictors[chosen.splits_backward]
                step, stages = predictor.step(chosen), chosen.pipeline * chosen.virtual
                every = [(layers // stages,) * stages] if self.limits.even else compositions(layers, stages)
                each += [(step.seconds(counts), len(each) + n, chosen, counts) for n, counts in enumerate(every)]
            for seconds, _, chosen, counts in sorted(each):
                whole = replace(chosen, partition=counts)
                if all(room.fits for room in memory_fit.rooms(predictors[chosen.splits_backward], whole)):
                    found.append((seconds, whole))
                    break
        return found

    def best(self, objective: str) -> list[tuple[float, float]]:
        """Seconds and value of the best plan, or of the Pareto frontier of time and price, the fastest first."""
        of = "cost" if objective == "pareto" else objective
        points = sorted((seconds, seconds * self._weight(of, layout)) for seconds, layout in self.fastest())
        if objective != "pareto":
            return sorted(points, key=lambda point: point[1])[:1]
        return [
            point
            for number, point in enumerate(points)
            if all(point[1] < other[1] * (1 - 1e-9) for other in points[:number])
        ]

    def _weight(self, objective: str, layout: Layout) -> float:
        nodes = layout.placement
        return weight(objective, self.machines.price_hour(nodes), self.machines.watts(nodes))


def drawn(seed: int, batches: tuple[int, ...] = (4, 8)) -> tuple[Space, str]:
    """A small random space and an objective."""
    draw = random.Random(seed)
    objective = draw.choice(["time", "cost", "energy", "pareto"])
    has_experts = draw.random() < 0.3
    length = draw.choice([512, 1024, 4096])
    model = {"layers": draw.choice([2, 3]), "hidden": draw.choice([256, 512, 1024, 2048]), "heads": 8, "vocab": 8192}
    if has_experts:
        model |= {"family": "mixtral", "ffn": 512, "experts": 4}
    else:
        model |= {"family": "gpt", "positions": length}
    train = {"global_batch": draw.choice(batches), "micro_batch": 1, "precision": draw.choice(["fp16", "bf16"])}
    train |= draw.choice([{}, {"compile": False}, {"compile": True}])
    data = {"sequence_length": length}
    recipe = Recipe.model_validate({"name": "drawn", "model": model, "data": data, "train": train})
    needs = 18 * parameters(recipe.model).total / 2**30 + 0.1  # GiB of weights, gradients and optimizer
    gpus, nodes = [], []
    for name, (count, per_node) in zip(
        "ab", draw.choice([[(1, 2), (1, 2)], [(2, 1), (1, 1)], [(1, 4)], [(2, 2)], [(3, 1)]]), strict=False
    ):
        rate = draw.choice([20.0, 60.0, 300.0])
        gpus.append({
            "name": name, "memory_gib": draw.choice([0.3, 0.5, 0.8, 1.2, 4]) * needs, "fp16": rate, "bf16": rate,
            "bandwidth_gb": draw.choice([300.0, 2000.0]), "watts": draw.choice([100, 400]),
        })  # fmt: skip
        nodes.append({
            "type": name, "gpu": name, "count": count, "gpus": per_node, "price_hour": draw.choice([1.0, 3.0]),
            "intra_transport": draw.choice(["pcie", "nvlink"]), "intra_GBps": draw.choice([12.0, 200.0]),
        })  # fmt: skip
    links = [
        {"between": ["*", "*"], "GBps": draw.choice([0.5, 12.5, 100.0]), "transport": draw.choice(["rdma", "tcp"])}
    ]
    machines = Cluster.model_validate({"nodes": nodes, "gpus": gpus, "links": links})
    is_other = not has_experts and draw.random() < 0.4
    software = draw.choice([MEGATRON, DEEPSPEED, TORCHTITAN]) if is_other else STEELYARD
    limits = SearchLimits(micro_batch=2, virtual=2, contexts=(1, 2))
    return Space(recipe, machines, program_limits.restricted(limits, software), software), objective
