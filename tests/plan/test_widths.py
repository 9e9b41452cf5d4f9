"""Stages of unlike widths: worked out by hand, and against the uniform plan."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.plan import per_stage
from steelyard.plan.communication import LINK_SHARE, NETWORK_SHARE
from steelyard.plan.predict import Predictor
from steelyard.plan.software import MEGATRON, STEELYARD
from steelyard.plan.tensor_widths import StagedLayout, StagedStep, Width
from tests.plan.machines import cluster, gpt, layout


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([0, 1]),
    st.sampled_from(["none", "full"]), st.sampled_from([STEELYARD, MEGATRON]), st.booleans(),
)  # fmt: skip
def test_equal_widths_take_exactly_the_uniform_plans_time(
    tensor, data, micro_batch, zero, recompute, software, offload
):
    recipe = gpt(batch=32)
    recipe = type(recipe).model_validate(recipe.settings() | {"optim": {"offload": offload}})
    machines = cluster(("a100-40", 8, 4), ("a10", 24, 4))
    uniform = layout(
        [("a100-40", 8), ("a10", 24)], (1,) * 8, tensor=tensor, data=data, micro_batch=micro_batch, zero=zero,
        recompute=recompute, sequence_parallel=tensor > 1,
    )  # fmt: skip
    staged = StagedLayout(uniform, (Width(tensor, data, micro_batch),) * 8)
    predictor = Predictor(recipe, machines, software)
    step = StagedStep(predictor, staged)
    assert step.seconds(uniform.partition) == predictor.seconds(uniform)
    assert step.parts(uniform.partition) == predictor.parts(uniform)


def staged(first: Width, second: Width, machines, software=STEELYARD) -> StagedStep:
    predictor = Predictor(gpt(batch=16), machines, software)
    base = layout([(nodes.type, nodes.count) for nodes in machines.nodes], (4, 4))
    return StagedStep(predictor, StagedLayout(base, (first, second)))


CHUNK = 4 * 1024 * 1024 * 2  # Bytes of four sequences of 1024 tokens, 1024 wide, in fp16.
NETWORK = 12.5e9 * NETWORK_SHARE


def test_two_data_ranks_hand_a_chunk_to_four():
    # Each of the four receives one of four sequences, each of the two sends two of them, in two messages of 5 us.
    step = staged(Width(1, 2, 2), Width(1, 4, 1), cluster(("a100-40", 1, 2), ("a10", 1, 4)))
    assert step.send == (pytest.approx(2 * 5e-6 + CHUNK / NETWORK),)


def test_tensor_ranks_take_their_pieces_of_the_sequence_from_every_data_rank():
    # Sequence parallel: four tensor ranks receive a quarter of the chunk each, half of it from either data rank, which
    # so sends four messages; on the way back a data rank receives four.
    step = staged(Width(1, 2, 2), Width(4, 1, 4), cluster(("a100-40", 1, 2), ("a10", 1, 4)))
    assert step.send == (pytest.approx(4 * 5e-6 + CHUNK / NETWORK),)


def test_tensor_ranks_that_do_not_cut_the_sequence_each_need_all_of_it():
    recipe = gpt(batch=18, length=1023)  # Odd, so that sequences cannot be cut in two.
    machines = cluster(("a100-40", 1, 1), ("a10", 1, 2))
    base = layout([("a100-40", 1), ("a10", 1)], (4, 4))
    step = StagedStep(Predictor(recipe, machines), StagedLayout(base, (Width(1, 1, 2), Width(2, 1, 2))))
    # Both tensor ranks receive both sequences from the only rank before them.
    assert step.send == (pytest.approx(2 * 5e-6 + 2 * 2 * 1023 * 1024 * 2 / NETWORK),)


def test_within_a_node_the_links_count_and_each_rank_has_its_own():
    machines = cluster(("a10", 1, 8))
    predictor = Predictor(gpt(batch=16), machines)
    base = layout([("a10", 1)], (4, 4))
    step = StagedStep(predictor, StagedLayout(base, (Width(1, 4, 1), Width(1, 2, 2))))
    assert step.send == (pytest.approx(2 * 2e-6 + CHUNK / 2 / (32e9 * LINK_SHARE)),)


def test_gradients_are_summed_over_each_stages_own_data_ranks():
    machines = cluster(("a100-40", 1, 2), ("a10", 1, 4))
    step = staged(Width(1, 2, 2), Width(1, 4, 1), machines)
    assert [ring.ranks for ring in step.rings] == [2, 4]
    assert step.micro_batches == 4
    wide = staged(Width(2, 1, 4), Width(4, 1, 4), machines)
    assert wide.held((4, 4), 0) < step.held((4, 4), 0)


def test_unlike_widths_are_planned_apart_and_fit():
    recipe, machines = gpt(layers=24, hidden=2048, batch=32), cluster(("a100-40", 1, 2), ("a10", 2, 4), price_hour=3.0)
    for objective in ("time", "cost"):
        plans = per_stage.search(recipe, machines, objective)
        assert 0 < len(plans) <= 3
        assert [plan.value(objective) for plan in plans] == sorted(plan.value(objective) for plan in plans)
        for plan in plans:
            assert not plan.layout.is_uniform
            assert plan.layout.world == 10
            step = StagedStep(Predictor(recipe, machines), plan.layout)
            assert all(room.fits for room in step.rooms(plan.layout.base.partition))
            assert sum(plan.layout.base.partition) == 24


def test_one_type_of_node_has_no_unlike_widths():
    assert per_stage.search(gpt(), cluster(("a10", 2, 4))) == []
