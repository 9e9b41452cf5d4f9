"""Each formula against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.recipe import Recipe
from steelyard.planning import communication, compute, memory_fit, update_cost
from steelyard.planning.communication import BASE_LATENCY, REACHED, Ring, group
from steelyard.planning.compute import MEMORY_SHARE, RAMP, Work
from steelyard.planning.layer_dims import LayerDims
from steelyard.planning.layout import Seats
from steelyard.planning.predict import Predictor
from steelyard.planning.software import MEGATRON, STEELYARD
from steelyard.sizes.gpu_catalogue import by_name
from tests.planning.machines import cluster, gpt, gpt2_xl, layout

A100 = by_name("a100-80")


RATE = 312e12 * A100.sustained * STEELYARD.product_share


def work(**more) -> Work:
    settings = {"gpu": A100, "software": STEELYARD, "precision": "bf16", "each": 2, "micro_batch": 1, "tensor": 1,
                "context": 1, "sequence_parallel": False}  # fmt: skip
    return Work(**(settings | more))


def test_a_large_product_reaches_the_sustained_rate():
    size = 16384
    flops = 2 * size**3
    assert compute.product(work(), size, size, size) == pytest.approx(flops / RATE, rel=0.02)


def test_a_product_of_one_tile_more_than_there_are_units_takes_a_second_wave():
    # 108 tiles of 256 x 128 are one wave of the A100's 108 units.
    one = compute.product(work(), 256, 128 * 108, 4096)
    assert one == pytest.approx(2 * 256 * 128 * (4096 + RAMP) / (RATE / 108))
    more = compute.product(work(), 256, 128 * 109, 4096)
    assert one * 1.2 < more <= 2 * one


def test_a_thin_product_takes_as_long_as_its_bytes():
    bytes_ = 2 * (16 * 8192 + 8192 * 8192 + 16 * 8192)
    assert compute.product(work(), 16, 8192, 8192) == pytest.approx(bytes_ / (2039e9 * MEMORY_SHARE), rel=0.3)


def test_the_host_sets_the_pace_of_small_layers_and_the_gpu_of_large_ones():
    assert compute.together(1.0, 0.1) == pytest.approx(1.0, rel=1e-3)
    assert compute.together(0.1, 1.0) == pytest.approx(1.0, rel=1e-3)
    assert 1.0 < compute.together(1.0, 1.0) < 1.3
    small = compute.layer(work(software=MEGATRON), LayerDims.of(gpt(hidden=256, heads=4)))
    assert small.host_forward > 5 * small.forward


def test_fsdp_costs_the_host_most_where_each_micro_batch_gathers_weights():
    machines = cluster(("a100-80", 1, 8))

    def passes(zero: int, micro_batches: int, data: int = 8) -> tuple[float, float]:
        small = gpt(hidden=128, heads=2, length=128, batch=micro_batches * data)
        chosen = layout([("a100-80", 1)], [8], data=data, zero=zero)
        forward, backward, _ = Predictor(small, machines).step(chosen).passes((8,))[0]
        return forward, backward

    alone, once = passes(0, 64, data=1), passes(1, 1)
    hooks, gather = 8 * STEELYARD.fsdp_forward, 8 * STEELYARD.fsdp_gather
    assert once[0] - alone[0] == pytest.approx(hooks + gather, rel=0.05)
    assert passes(1, 1024)[0] - alone[0] == pytest.approx(hooks, rel=0.05)
    assert passes(3, 1024)[0] == pytest.approx(once[0], rel=0.02)
    assert passes(3, 1024)[1] - passes(2, 1024)[1] == pytest.approx(gather, rel=0.05)
    assert passes(2, 1024)[1] > passes(1, 1024)[1]


def test_a_softmax_that_cannot_be_fused_costs_the_host_more():
    shape = LayerDims.of(gpt())
    fused = compute.layer(work(software=MEGATRON, tensor=4), shape)
    split = compute.layer(work(software=MEGATRON, tensor=8), shape)  # Two heads, one sequence: not a multiple of four.
    assert split.host_forward - fused.host_forward == pytest.approx(MEGATRON.split_softmax * MEGATRON.launch)


def test_megatron_adds_bf16_gradients_to_sums_in_fp32_after_every_micro_batch():
    shape = LayerDims.of(gpt())
    half, wide = (compute.layer(work(software=MEGATRON, precision=name), shape) for name in ("fp16", "bf16"))
    # 12 x 1024^2 weights, 10 bytes each: the sum read and written in fp32, the gradient read in bf16.
    assert wide.backward - half.backward == pytest.approx(10 * 12 * 1024**2 / (2039e9 * MEMORY_SHARE))
    assert wide.forward == half.forward


def test_fp8_speeds_up_products_but_not_attention():
    recipe = gpt(hidden=4096, heads=32, length=8192)
    h100 = replace(work(precision="bf16"), gpu=by_name("h100"))
    shape = LayerDims.of(recipe)
    wide, narrow = compute.layer(h100, shape), compute.layer(replace(h100, precision="fp8"), shape)
    assert wide.forward / 2 < narrow.forward < wide.forward
    assert narrow.selective == wide.selective


def test_an_all_reduce_sends_twice_what_is_not_its_own():
    ring = Ring(4, 10e9, 1e-6)
    assert ring.gather(8e9) == pytest.approx(BASE_LATENCY + 0.6 + 3e-6)
    assert ring.all_reduce(8e9) == pytest.approx(BASE_LATENCY + 1.2 + 6e-6)
    assert Ring(1, 10e9, 1e-6).all_reduce(8e9) == 0.0


def test_rings_of_a_node_share_its_network_card():
    machines = cluster(("a100-80", 4, 8), network=100.0)
    seats = Seats(machines, (("a100-80", 4),)).of(0, 32)
    assert group(machines, seats, 1, 8).bandwidth == pytest.approx(
        300e9 * REACHED["nvlink"]
    )  # tensor 8: within the node
    assert group(machines, seats, 8, 4).bandwidth == pytest.approx(100e9 * REACHED["rdma"] / 8)  # eight data rings
    assert group(machines, seats, 1, 32).bandwidth == pytest.approx(100e9 * REACHED["rdma"])  # one ring over all
    # Four tensor ranks: two ranks of each of four data rings are on a node, and they use half of its cards.
    assert group(machines, seats, 4, 8).bandwidth == pytest.approx(100e9 * REACHED["rdma"] / 4 / 2)
    slow = cluster(("a100-80", 4, 8), network=100.0, transport="tcp")
    assert group(slow, seats, 1, 32).bandwidth == pytest.approx(100e9 * REACHED["tcp"])


def test_a_send_within_a_node_uses_its_links_and_between_nodes_the_card_that_all_ranks_share():
    machines = cluster(("a10", 2, 4))
    seats = Seats(machines, (("a10", 2),))
    here, there = seats.of(0, 4)[0], seats.of(4, 4)[0]
    assert communication.send(machines, here, here, 1e9, 4) == pytest.approx(5e-6 + 1 / (16 * REACHED["pcie"]))
    assert communication.send(machines, here, there, 1e9, 4) == pytest.approx(5e-6 + 4 / (12.5 * REACHED["rdma"]))


def test_the_parts_of_a_step_add_up_to_it():
    recipe, machines = gpt(batch=32), cluster(("a100-40", 1, 4), ("a10", 1, 4))
    predictor = Predictor(recipe, machines)
    for chosen in (
        layout([("a100-40", 1), ("a10", 1)], (3, 2, 2, 1), data=2, zero=1),
        layout([("a10", 1), ("a100-40", 1)], (8,), data=8),
        layout([("a10", 1), ("a100-40", 1)], (4, 4), tensor=4, sequence_parallel=True, recompute="full"),
        layout([("a10", 1), ("a100-40", 1)], (2, 2, 2, 2), pipeline=2, virtual=2, data=4, schedule="interleaved"),
    ):
        parts = predictor.parts(chosen)
        assert parts.total == pytest.approx(predictor.seconds(chosen))
        assert min(vars(parts).values()) >= 0
        assert (parts.tensor > 0) == (chosen.tensor > 1)


def test_recomputing_adds_a_forward_pass_and_here_leaves_its_last_product_out():
    # Rows so long that casts and sums of weights, which are not repeated, take little of the step.
    recipe, machines = gpt(hidden=4096, heads=32, length=4096), cluster(("a100-80", 1, 1))
    for software, least, most in ((MEGATRON, 1.25, 1.35), (STEELYARD, 1.17, 1.25)):
        predictor = Predictor(recipe, machines, software)
        plain = predictor.parts(layout([("a100-80", 1)], (8,))).compute
        again = predictor.parts(layout([("a100-80", 1)], (8,), recompute="full")).compute
        assert least < again / plain < most


meshes = st.sampled_from(
    [
        {"tensor": 1, "pipeline": 4, "data": 4}, {"tensor": 2, "pipeline": 2, "data": 4},
        {"tensor": 4, "pipeline": 1, "data": 4, "zero": 3}, {"tensor": 1, "pipeline": 2, "data": 8, "zero": 1},
    ]
)  # fmt: skip


@settings(deadline=None)
@given(meshes, st.floats(1.0, 100.0), st.floats(1.0, 20.0), st.sampled_from([STEELYARD, MEGATRON]))
def test_more_bandwidth_is_never_slower(mesh, network, factor, software):
    recipe = gpt(batch=16)
    counts = (8 // mesh["pipeline"],) * mesh["pipeline"]
    chosen = layout([("a10", 4)], counts, **mesh)
    slow, fast = cluster(("a10", 4, 4), network=network), cluster(("a10", 4, 4), network=network * factor)
    before = Predictor(recipe, slow, software).seconds(chosen)
    assert Predictor(recipe, fast, software).seconds(chosen) <= before * (1 + 1e-9)
    wider = cluster(("a10", 4, 4), network=network, intra_GBps=32.0 * factor)
    assert Predictor(recipe, wider, software).seconds(chosen) <= before * (1 + 1e-9)


def test_an_offloaded_optimizer_pays_for_the_way_to_the_host_and_for_its_memory():
    # A billion parameters: 4 bytes there and 4 back at 10 GB/s, then 28 bytes each for 8 ranks at 100 GB/s.
    nodes = cluster(("a100-40", 1, 8), host_link_GBps=10.0, host_GBps=100.0).nodes[0]
    assert update_cost.host_optimizer(nodes, 8, 2).seconds(1e9) == pytest.approx(0.8 + 8 * 0.28)
    assert update_cost.host_optimizer(nodes, 1, 1).seconds(1e9) == pytest.approx(0.8 + 0.2)


def test_muon_adds_its_products_shared_by_the_ranks_of_a_stage_and_their_exchange():
    plain, machines = gpt(precision="bf16"), cluster(("a100-80", 1, 4))
    muon = plain.model_copy(update={"optim": plain.optim.model_copy(update={"name": "muon"})})
    # Per layer: four squares of 1024, and two matrices with a side of 4096. Five iterations of three products.
    short, long = 1024, 4096
    flops = 5 * (4 * 6 * short**3 + 2 * (4 * short**2 * long + 2 * short**3))
    assert update_cost.matrix_flops(muon) == flops
    assert update_cost.matrix_flops(plain) == 0
    for ranks, zero in ((1, 0), (4, 1), (4, 0)):
        chosen = layout([("a100-80", 1)], (8,), data=ranks, zero=zero)
        adamw, ours = (Predictor(recipe, machines, STEELYARD).parts(chosen).optimizer for recipe in (plain, muon))
        products = 8 * flops / (312e12 * A100.sustained * ranks)
        matrices = 8 * 12 * short**2
        # One state of 4 bytes, read and written.
        saved = 8 * matrices / (ranks if zero else 1) / (2039e9 * MEMORY_SHARE)
        sent = 2 * matrices * (3 / 4) / (300e9 * REACHED["nvlink"]) * (2 / 4 if zero else 1) if ranks > 1 else 0.0
        assert ours - adamw == pytest.approx(products - saved + sent, rel=0.05)


def test_offloading_frees_the_gpu_costs_time_and_needs_the_hosts_memory():
    stays = gpt(hidden=2048)
    goes = Recipe.model_validate(stays.settings() | {"optim": {"offload": True}})
    chosen = layout([("a10", 1)], (8,), data=4, zero=1)
    machines = cluster(("a10", 1, 4), host_gib=64.0)
    here, there = Predictor(stays, machines), Predictor(goes, machines)
    assert there.parts(chosen).optimizer > 5 * here.parts(chosen).optimizer
    [kept], [moved] = memory_fit.rooms(here, chosen), memory_fit.rooms(there, chosen)
    assert moved.memory.total == kept.memory.total - kept.memory.optimizer
    assert (
        moved.host == 4 * 2 * kept.memory.optimizer
    )  # Four ranks of the node; weights and gradients beside the state.
    assert moved.fits
    tight = cluster(("a10", 1, 4), host_gib=moved.host / 2**30 * 0.9)
    rooms = memory_fit.rooms(Predictor(goes, tight), chosen)
    assert "optim.offload needs" in memory_fit.reason(rooms)
    assert not rooms[0].fits


def test_more_tokens_take_longer():
    machines = cluster(("a100-80", 1, 1))
    seconds = [Predictor(gpt(batch=batch), machines).seconds(layout([("a100-80", 1)], (8,))) for batch in (4, 8, 16)]
    assert seconds == sorted(seconds)
    assert all(map(math.isfinite, seconds))


def test_the_memory_of_fasops_clusters_job_is_what_its_log_says():
    # Megatron printed MiB: rank 0 (embedding alone) holds 1,571; rank 24 (five layers) 3,035, 3,869 at its fullest.
    chosen = layout([("a10", 8)], (0, 11, 8, 8, 8, 8, 5, 0), data=4)
    ranks = memory_fit.memories_of(Predictor(gpt2_xl(), cluster(("a10", 8, 4)), MEGATRON), chosen, range(8))
    between_steps = [rank.weights + rank.gradients + rank.optimizer for rank in ranks]
    assert between_steps[0] / 2**20 == pytest.approx(1571, rel=0.01)
    assert between_steps[6] / 2**20 == pytest.approx(3035, rel=0.04)
    assert ranks[6].total / 2**20 == pytest.approx(3869, rel=0.04)
