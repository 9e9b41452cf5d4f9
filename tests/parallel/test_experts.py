"""Experts on several ranks: every layout gives the curve of one process, and a run goes on on another."""

import pytest

from tests.parallel import jobs
from tests.parallel.conftest import Layouts, difference
from tests.parallel.test_layouts import LARGER, LARGEST, parallel
from tests.parallel.test_resume import HORIZON, halves
from tests.parallel.test_settings import SGD, SGD_ROUNDING

LAYOUTS = {
    "data zero 0": (2, parallel(zero=0)),
    "data zero 3": (2, parallel(zero=3)),
    "tensor": (2, [*parallel(tensor=2), LARGEST]),
    "sequence": (2, [*parallel(tensor=2, sequence_parallel="true"), LARGEST]),
    "context": (2, [*parallel(context=2), LARGEST]),
    "pipeline": (2, parallel(pipeline=2)),
    "zero bubble": (2, parallel(pipeline=2, schedule="zero-bubble")),
    "expert zero 0": (2, parallel(expert=2, zero=0)),
    "expert zero 1": (2, parallel(expert=2, zero=1)),
    "expert zero 2 on 4": (4, [*parallel(expert=2, zero=2), LARGER]),
    "expert zero 3 on 4": (4, [*parallel(expert=2, zero=3), LARGER]),
    "expert zero 0 on 4": (4, [*parallel(expert=2, zero=0), LARGER]),
    "expert 4": (4, [*parallel(expert=4, zero=3), LARGER]),
    "hybrid": (4, [*parallel(expert=2, zero=3, replicate=2, data=4), LARGER]),
    "expert x tensor": (4, [*parallel(expert=2, tensor=2, sequence_parallel="true", zero=1), LARGER]),
    "expert x context": (4, [*parallel(expert=4, context=2, zero=3), LARGER]),
    "expert x pipeline": (4, [*parallel(expert=2, pipeline=2, zero=2), LARGER]),
    "expert x zero bubble": (4, [*parallel(expert=2, pipeline=2, schedule="zero-bubble", zero=1), LARGER]),
}
LOADS = {
    "even": ([0.0, 0.0, 0.0, 0.0], 0),
    "first rank alone": ([9.0, 5.0, 1.0, 0.0], 2),
    "last rank alone": ([0.0, 0.0, 5.0, 9.0], 2),
    "one expert has every token": ([0.5, 9.0, 0.5, 0.0], 0),
}
"""How the router prefers the four experts, and how many of them get no token."""


def assert_same_routing(curve: list[dict], alone: list[dict]) -> None:
    for key in ("expert_load", "router_entropy", "router_loss", "experts_dropped"):
        ours, theirs = ([record[key] for record in records if key in record] for records in (curve, alone))
        assert len(ours) == 2
        assert ours == pytest.approx(theirs, rel=1e-5), key


@pytest.mark.parametrize(
    ("family", "layout"),
    [(("experts", "shared-experts")[number % 2], layout) for number, layout in enumerate(LAYOUTS)]
    + [("shared-experts", "tensor"), ("shared-experts", "expert zero 3 on 4"), ("experts", "expert x context")],
)
def test_experts_train_alike_on_a_layout(layouts: Layouts, family: str, layout: str):
    size, overrides = LAYOUTS[layout]
    curve, alone = layouts.run(size, family, *overrides, *SGD).metrics(), layouts.alone(family, *SGD)
    assert difference(curve, alone) < SGD_ROUNDING
    assert_same_routing(curve, alone)


@pytest.mark.parametrize("layout", ["expert zero 1", "tensor", "pipeline"])
def test_a_capacity_drops_the_same_tokens_on_a_layout(layouts: Layouts, layout: str):
    size, overrides = LAYOUTS[layout]
    curve, alone = layouts.run(size, "capacity", *overrides, *SGD).metrics(), layouts.alone("capacity", *SGD)
    assert difference(curve, alone) < SGD_ROUNDING
    assert_same_routing(curve, alone)
    assert min(record["experts_dropped"] for record in alone if "loss" in record) > 0.01


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("load", LOADS)
def test_slots_reach_their_experts_for_any_load(layouts: Layouts, ranks: int, load: str):
    prefers, idle = LOADS[load]
    for outcome in layouts.ranks.do(ranks, jobs.experts_with_a_load, prefers):
        assert max(outcome["worst"].values()) < 1e-5, outcome
        assert outcome["counts"].count(0.0) == idle, outcome


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_counts_no_token_twice(layouts: Layouts, recompute: str):
    curve = layouts.run(2, "shared-experts", *parallel(expert=2, recompute=recompute), *SGD).metrics()
    alone = layouts.alone("shared-experts", *SGD)
    assert difference(curve, alone) < SGD_ROUNDING
    assert_same_routing(curve, alone)


@pytest.mark.parametrize("family", ["experts", "shared-experts"])
def test_a_run_with_experts_goes_on_on_another_layout(layouts: Layouts, family: str):
    first = (4, [*parallel(expert=2, pipeline=2, zero=1), LARGER])
    second = (2, [*parallel(tensor=2), LARGER])
    run = halves(layouts, family, first, second, *SGD)
    assert difference(run.metrics(), layouts.alone(family, *HORIZON, *SGD)) < SGD_ROUNDING
