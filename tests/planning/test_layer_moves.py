"""Bounds that spare a search simulations and meshes: each against what it bounds."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.planning.layer_moves import LayerMoves, _moved, _moves, _StageTimes
from steelyard.planning.layout import Layout
from steelyard.planning.predict import Predictor
from steelyard.planning.software import DEEPSPEED, EAGER, MEGATRON, STEELYARD
from steelyard.planning.step_bound import RankBound, fastest_order, step_bound
from tests.planning.machines import cluster, gpt

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)]


def some_step(gpus, schedule, virtual, software, rounds=3, network=1.0):
    pipeline = len(gpus)
    recipe = gpt(layers=24, hidden=512, heads=8, batch=rounds * pipeline, length=512)
    machines = cluster(("a10", 6, 1), ("t4", 6, 1), ("a100-40", 6, 1), network=network)
    nodes = tuple((gpu, 1) for gpu in gpus)
    chosen = Layout(1, 1, pipeline, virtual, 1, 0, False, schedule, 1, "none", (), nodes)
    return Predictor(recipe, machines, software).step(chosen)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a10", "t4", "a100-40"]), min_size=2, max_size=5), st.sampled_from(SCHEDULES),
       st.sampled_from([STEELYARD, EAGER, MEGATRON, DEEPSPEED]), st.sampled_from([0.01, 12.5]),
       st.lists(st.integers(0, 5), min_size=10, max_size=10))  # fmt: skip
def test_the_bounds_of_all_moves_are_those_of_single_partitions(gpus, schedule, software, network, layers):
    step = some_step(gpus, *schedule, software, network=network)
    counts = tuple(layers[: len(gpus) * schedule[1]])
    moves, stages, simulated = _moves(counts), _StageTimes(step, counts), step.simulated(counts)
    moved = [_moved(counts, *move) for move in zip(moves.ones, moves.others, strict=True)]
    assert moved == sorted(moved)
    assert stages.at_least(moves).tolist() == [step.at_least(each) for each in moved]
    seconds = [step.seconds(each) for each in moved]
    assert all(stages.path_lengths(simulated, moves) <= np.array(seconds) * (1 + 1e-9))
    assert simulated.seconds == step.seconds(counts)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_critical_paths_change_no_result(schedule, virtual, monkeypatch):
    step = some_step(["a10", "t4", "a100-40", "a10"], schedule, virtual, STEELYARD)
    start = (24 // (4 * virtual),) * (4 * virtual)

    def ends():
        moves = LayerMoves(step, lambda counts: counts[0] < 9)
        found = [moves.improved(start, tries, steepest) for tries in (5, 500) for steepest in (False, True)]
        return found, len(moves._simulated)

    found, simulated = ends()
    monkeypatch.setattr(_StageTimes, "path_lengths", lambda self, simulated, moves: np.zeros(len(moves.ones)))
    without, simulated_without = ends()
    assert found == without
    assert simulated < simulated_without


def test_long_pipelines_try_only_some_moves():
    counts = (*range(5, 25), 0)
    moves = _moves(counts)
    pairs = set(zip(moves.ones.tolist(), moves.others.tolist(), strict=True))
    assert (20, 19) not in pairs
    assert {(19, 0), (16, 0), (3, 4), (3, 2)} <= pairs
    assert not {(15, 0), (3, 5)} & pairs


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 5.0)), min_size=1, max_size=5), st.integers(1, 20),
       st.integers(1, 4), st.sampled_from(["1f1b", "zero-bubble"]))  # fmt: skip
def test_no_order_of_ranks_beats_the_bound_of_all_orders(ranks, rounds, virtual, schedule):
    runs = [(layer, 1) for layer, _ in sorted(ranks)]
    bound = fastest_order(runs, 24, rounds, virtual, schedule)
    for order in permutations(ranks):
        each = [(RankBound(layer, after, 0.0, 0.0), 0.1, 1) for layer, after in order]
        assert bound <= step_bound(each, 24, rounds, virtual, schedule) * (1 + 1e-9)
