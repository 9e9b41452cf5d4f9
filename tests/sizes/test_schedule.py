from collections import Counter

import pytest
from torch.distributed.pipelining import schedules

from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.sizes.in_flight import actions, in_flight

KINDS = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weights"}


def torchs_actions(plan, micro_batches, rank):
    """What PyTorch's own schedule tells a rank to do; its constructor would want process groups."""
    names = {"interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble"}
    schedule = object.__new__(getattr(schedules, names[plan.schedule]))
    schedule.pp_group_size, schedule.n_local_stages = plan.pipeline, plan.virtual
    schedule._n_microbatches = micro_batches
    schedule.number_of_rounds = max(1, micro_batches // plan.pipeline)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    done = schedule._calculate_single_rank_operations(rank)
    return [
        (KINDS[action.computation_type.name], action.stage_index // plan.pipeline)
        for action in done
        if action is not None
    ]


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize(
    ("pipeline", "virtual", "micro_batches"), [(2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 3, 12), (4, 2, 3)]
)
def test_the_order_is_that_of_pytorch(schedule, pipeline, virtual, micro_batches):
    plan = ParallelSection(pipeline=pipeline, virtual=virtual, schedule=schedule)
    for rank in range(pipeline):
        assert list(actions(plan, micro_batches, rank)) == torchs_actions(plan, micro_batches, rank)


@pytest.mark.parametrize(
    ("schedule", "virtual"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2)],
)
def test_every_forward_pass_has_its_backward_pass_and_nothing_is_left(schedule, virtual):
    plan = ParallelSection(pipeline=4, virtual=virtual, schedule=schedule)
    for rank in range(4):
        count = Counter(action.kind for action in actions(plan, 8, rank))
        assert count["forward"] == count["backward"] == 8 * virtual
        assert count["weights"] == (8 * virtual if schedule == "zero-bubble" else 0)


def most(schedule, rank, micro_batches, pipeline=4, virtual=1):
    plan = ParallelSection(pipeline=pipeline, virtual=virtual, schedule=schedule)
    return max(sum(state.waiting) + sum(state.held) for state in in_flight(plan, micro_batches, rank))


def test_gpipe_keeps_all_and_1f1b_as_many_as_there_are_stages_ahead():
    assert [most("gpipe", rank, 16) for rank in range(4)] == [16, 16, 16, 16]
    assert [most("1f1b", rank, 16) for rank in range(4)] == [4, 3, 2, 1]
    assert [most("1f1b", rank, 2) for rank in range(4)] == [2, 2, 2, 1]
    assert most("1f1b", 0, 64, pipeline=1) == most("gpipe", 0, 64, pipeline=1) == 1


def test_interleaving_warms_up_longer_and_zero_bubble_holds_a_pipeline_full_everywhere():
    assert [most("interleaved", rank, 16, virtual=2) for rank in range(4)] == [11, 9, 7, 5]
    assert [most("zero-bubble", rank, 16) for rank in range(4)] == [4, 4, 4, 4]
