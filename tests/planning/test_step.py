"""The time of a step from a cost table alone, without a recipe, a cluster or a predictor."""

from dataclasses import fields, is_dataclass

from steelyard.planning.communication import Ring
from steelyard.planning.cost_table import CostTable, RankParams, StageCost, UnitCost
from steelyard.planning.predict import Predictor
from steelyard.planning.step import StepCost
from steelyard.planning.update_cost import UpdateCost
from tests.planning.machines import cluster, gpt, layout

ALONE = Ring(1, 1.0, 0.0)


def unit(forward: float, backward: float) -> UnitCost:
    return UnitCost(forward, backward, 0.0, 0.0, 0.0, 0.0)


def table(**more) -> CostTable:
    stage = StageCost(unit(1.0, 2.0), unit(0.5, 0.5), unit(0.25, 0.75), (UpdateCost(10.0, 1000.0),))
    numbers = {
        "schedule": "gpipe", "pipeline": 2, "virtual": 1, "micro_batches": 3, "zero": 0, "layers": 2,
        "stages": (stage, stage), "kinds": (0, 0), "rings": (ALONE, ALONE), "shards": (1, 1), "send": (0.0,),
        "params": (RankParams(100, 50), RankParams(100, 20)), "weight_bytes": 2, "gradient_bytes": 4,
        "overlaps_gradients": False, "waits_to_send": False, "waits_to_receive": False, "overhead": 0.125,
    }  # fmt: skip
    return CostTable(**(numbers | more))


def test_a_step_is_computed_from_the_numbers_of_its_table():
    # Forward takes 1.5 and 1.25 s, backward 2.5 and 2.75 s. Rank 0 ends its three forward passes at 4.5 s, rank 1 at
    # 5.75 s. Rank 1 then runs three backward passes and rank 0 its last one. The update moves 150 x 10 bytes at 1000
    # bytes/s.
    step = StepCost(table())
    assert step.times((1, 1)).forward == (1.5, 1.25)
    assert step.times((1, 1)).backward == (2.5, 2.75)
    assert step.seconds((1, 1)) == 5.75 + 3 * 2.75 + 2.5 + 1.5 + 0.125
    assert step.held((1, 1), 0) == 150
    assert step.held((0, 2), 1) == 220


def test_sharding_the_optimizer_divides_the_update():
    whole, sharded = StepCost(table()), StepCost(table(shards=(3, 3)))
    times = whole.times((1, 1))
    assert whole.after((1, 1), times, 0) == (0.0, 1.5)
    assert sharded.after((1, 1), times, 0) == (0.0, 0.5)


def leaves(value: object) -> list[object]:
    if is_dataclass(value):
        return [leaf for field in fields(value) if field.compare for leaf in leaves(getattr(value, field.name))]
    return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple) else [value]


def test_a_predictors_cost_table_holds_plain_numbers_only():
    machines = cluster(("a100-40", 1, 2), ("a10", 1, 2))
    chosen = layout([("a100-40", 1), ("a10", 1)], (4, 4), data=2)
    found = leaves(Predictor(gpt(), machines).step(chosen).table)
    assert {type(leaf) for leaf in found} <= {int, float, bool, str}
