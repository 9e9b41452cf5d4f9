"""Timetables worked out by hand, and against a second simulation written another way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.planning import pipeline_sim as pipeline_module
from steelyard.planning.pipeline_sim import Times, at_least, events, settled, simulate
from steelyard.sizes.in_flight import actions


def times(forward, backward, send=None, weights=None):
    stages = len(forward)
    return Times(tuple(forward), tuple(backward), tuple(weights or [0.0] * stages), tuple(send or [0.0] * (stages - 1)))


def test_one_stage_does_one_micro_batch_after_the_other():
    assert simulate(times([1.0], [2.0]), "1f1b", 1, 1, 4).makespan == 12.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_even_stages_take_the_textbook_time(schedule):
    # (micro-batches + stages - 1) x (forward + backward)
    assert simulate(times([1.0] * 4, [2.0] * 4), schedule, 4, 1, 8).makespan == (8 + 3) * 3.0


def test_two_uneven_stages_worked_out_by_hand():
    # stage 0: F0 0-1, F1 1-2; stage 1 (slow): F0 1-4, B0 4-8, F1 8-11, B1 11-15; stage 0: B0 8-10, B1 15-17
    table = simulate(times([1.0, 3.0], [2.0, 4.0]), "1f1b", 2, 1, 2)
    assert table.ends == (17.0, 15.0)
    assert table.busy == (6.0, 14.0)


def test_sending_delays_each_crossing():
    # F0 0-1, sent until 1.5, F0 1.5-2.5, B0 2.5-4.5, sent until 5, B0 5-7
    assert simulate(times([1.0, 1.0], [2.0, 2.0], [0.5]), "1f1b", 2, 1, 1).ends == (7.0, 4.5)


def test_interleaving_halves_the_bubble():
    plain = simulate(times([2.0] * 2, [4.0] * 2), "1f1b", 2, 1, 4)
    halves = simulate(times([1.0] * 4, [2.0] * 4), "interleaved", 2, 2, 4)
    assert plain.makespan - plain.busy[0] == 6.0
    assert halves.makespan - halves.busy[0] == 3.0


def test_zero_bubble_fills_it_with_gradients_of_weights():
    plain = simulate(times([1.0] * 4, [2.0] * 4), "1f1b", 4, 1, 8)
    late = simulate(times([1.0] * 4, [1.0] * 4, weights=[1.0] * 4), "zero-bubble", 4, 1, 8)
    assert late.makespan < plain.makespan


seconds = st.floats(0.1, 10.0)


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]))
    pipeline = draw(st.integers(2, 4))
    virtual = draw(st.integers(1, 2)) if schedule in ("interleaved", "zero-bubble") else 1
    micro_batches = pipeline * draw(st.integers(1, 3))
    stages = pipeline * virtual
    lists = [draw(st.lists(seconds, min_size=n, max_size=n)) for n in (stages, stages, stages, stages - 1)]
    weights = lists[2] if schedule == "zero-bubble" else [0.0] * stages
    return schedule, pipeline, virtual, micro_batches, times(lists[0], lists[1], lists[3], weights)


def relaxed(schedule, pipeline, virtual, micro_batches, given_times):
    """Another way to the same timetable: raise start times until no action starts too early."""
    parallel = ParallelSection().model_copy(update={"schedule": schedule, "pipeline": pipeline, "virtual": virtual})
    queues, ends = [], {}
    for rank in range(pipeline):
        counts, queue = {}, []
        for kind, local in actions(parallel, micro_batches, rank):
            number = counts[kind, local] = counts.get((kind, local), -1) + 1
            queue.append((kind, local * pipeline + rank, number))
        queues.append(queue)
    last = pipeline * virtual - 1
    changed = True
    while changed:
        changed = False
        for queue in queues:
            free = 0.0
            for kind, stage, number in queue:
                start = free
                if kind == "forward" and stage:
                    start = max(start, ends.get(("forward", stage - 1, number), 0) + given_times.send[stage - 1])
                if kind == "backward" and stage < last:
                    start = max(start, ends.get(("backward", stage + 1, number), 0) + given_times.send[stage])
                if kind == "backward" and stage == last:
                    start = max(start, ends.get(("forward", stage, number), 0))
                free = start + getattr(given_times, kind)[stage]
                if ends.get((kind, stage, number)) != free:
                    ends[kind, stage, number] = free
                    changed = True
    return max(ends.values())


@settings(deadline=None)
@given(pipelines())
def test_any_pipeline_is_timed_as_another_simulation_times_it(case):
    schedule, pipeline, virtual, micro_batches, given_times = case
    table = simulate(given_times, schedule, pipeline, virtual, micro_batches)
    assert table.makespan == pytest.approx(relaxed(*case))
    passes = list(zip(given_times.forward, given_times.backward, given_times.weights, strict=True))
    assert table.makespan >= at_least(passes, given_times.send, (), pipeline, micro_batches) * (1 - 1e-12)
    blocked = simulate(given_times._replace(receive=given_times.send), schedule, pipeline, virtual, micro_batches)
    assert blocked.makespan >= at_least(passes, *[given_times.send] * 2, pipeline, micro_batches) * (1 - 1e-12)
    drawn = events(given_times, schedule, pipeline, virtual, micro_batches)
    assert max(end for *_, end in drawn) == table.makespan


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(seconds, seconds), min_size=2, max_size=5), st.integers(10, 20), st.sampled_from([1, 2]))
def test_a_long_step_goes_on_as_it_has_begun(stages, rounds, virtual):
    monkeyed = pytest.MonkeyPatch()
    monkeyed.setattr(pipeline_module, "SHORT", 0)
    forward, backward = zip(*stages * virtual, strict=True)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    plan = (schedule, len(stages), virtual, rounds * len(stages))
    exact = simulate(times(forward, backward), *plan).makespan
    guessed = max(settled(times(forward, backward), *plan))
    monkeyed.undo()
    assert guessed == pytest.approx(exact, rel=0.03)
