"""Formulas of docs/plan.md worked out by hand, on a GPU and a model of round numbers, with constants set here.

The GPU: 100 TFLOP/s of bf16, kept up in full, on 100 units; 1,000 GB/s of memory, of which kernels reach 0.92, that is
920 GB/s. Its link: 100 GB/s without latency, of which collectives reach 0.67, that is 67 GB/s, each taking 2 us to
begin. The network: 10 GB/s and 5 us, of which 0.87 are reached, that is 8.7 GB/s.

The model: 8 layers of width h = 1,024, sequences of 1,024 tokens, 50,257 words, padded to 50,304 (393 x 128).
A layer has 12 h^2 = 12,582,912 weights in matrices, 9 h = 9,216 in biases and 4 h = 4,096 in norms: 12,596,224.
The table has 50,304 h = 51,511,296, the positions 1,024 h = 1,048,576: the embedding has 52,559,872. The final norm has
2 h = 2,048. The head is the table. In all 8 x 12,596,224 + 52,559,872 + 2,048 = 153,331,712.
"""

from dataclasses import replace

import pytest

from steelyard.planning import communication, compute, memory_fit
from steelyard.planning.cluster import Cluster
from steelyard.planning.compute import Work
from steelyard.planning.pipeline_sim import Times
from steelyard.planning.predict import Predictor
from steelyard.planning.results import weight
from steelyard.planning.software import STEELYARD
from tests.planning.machines import gpt, layout

GPU = {"name": "round", "memory_gib": 80, "bf16": 100.0, "bandwidth_gb": 1000.0, "units": 100, "sustained": 1.0}
NODES = {"type": "round", "count": 2, "gpu": "round", "gpus": 4, "intra_GBps": 100.0, "intra_latency_us": 0.0}
LINKS = [{"between": ["*", "*"], "GBps": 10.0, "latency_us": 5.0, "transport": "rdma"}]
MILLI, MICRO = 1e-3, 1e-6
PROGRAM = replace(STEELYARD, product_share=1.0)


def predictor(length: int = 1024) -> Predictor:
    machines = Cluster.model_validate({"nodes": [NODES], "gpus": [GPU], "links": LINKS})
    return Predictor(gpt(precision="bf16", length=length), machines, PROGRAM)


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    """The calibrated constants, which a new calibration changes, at the values of the sums below."""
    compute.layer.cache_clear(), compute.embedding.cache_clear(), compute.head.cache_clear()
    monkeypatch.setattr(compute, "MEMORY_SHARE", 0.92)
    monkeypatch.setattr(compute, "RAMP", 32)
    monkeypatch.setattr(communication, "BASE_LATENCY", 2e-6)
    monkeypatch.setattr(communication, "REACHED", {"nvlink": 0.67, "pcie": 0.67, "rdma": 0.87, "tcp": 0.45})
    yield
    compute.layer.cache_clear(), compute.embedding.cache_clear(), compute.head.cache_clear()


def one_node(counts=(8,), **more):
    return layout([("round", 1)], counts, **more)


def close(seconds: float):
    return pytest.approx(seconds, rel=1e-6)


def test_the_optimizer_on_the_gpu():
    # 34 bytes for each of 153,331,712 parameters are 5,213,278,208 bytes; at 920 GB/s 5.666606748 ms.
    assert predictor().parts(one_node()).optimizer == close(5.666606748 * MILLI)
    # zero 1 on four ranks leaves a fourth of the parameters to each.
    assert predictor().parts(one_node(data=4, zero=1)).optimizer == close(1.416651687 * MILLI)


# Four data ranks, so that 3/4 of the bytes pass every link, once for a sum that is scattered and once for a gather.
# Gradients, 4 bytes: 613,326,848 bytes, of which 459,995,136 at 67 GB/s take 6.865599045 ms, and with
# its start 6.867599045.
# Weights, 2 bytes: half of that, 3.432799522 ms, with the start 3.434799522.
# A batch of 16 is four micro-batches for each rank. A backward pass takes 4 ms here, a forward pass 2 ms, and the sums
# of seven of eight layers can hide behind the passes of others.
@pytest.mark.parametrize(
    ("zero", "exposed"),
    [
        # All gradients summed once, there and back with one start: 2 x 6.865599045 + 0.002 = 13.733198090;
        # behind the last backward pass hide 4 x 7/8 = 3.5.
        (0, 10.233198090),
        # Scattered once, weights gathered once: 6.867599045 + 3.434799522 = 10.302398567; 3.5 hide.
        (1, 6.802398567),
        # Scattered after each of four micro-batches, gathered once: 27.470396180 + 3.434799522 = 30.905195702;
        # behind four backward passes hide 4 x 3.5 = 14.
        (2, 16.905195702),
        # Scattered four times, gathered twice for each of four micro-batches: 27.470396180 + 8 x 3.434799522 =
        # 54.948792356; behind four passes of both kinds hide 4 x 6 x 7/8 = 21.
        (3, 33.948792356),
    ],
)
def test_gradients_and_weights_on_their_way_that_do_not_hide_behind_computing(zero, exposed):
    step = predictor().step(one_node(data=4, zero=zero))
    times = Times((2 * MILLI,), (4 * MILLI,), (0.0,), ())
    assert step.after((8,), times, 0)[0] == close(exposed * MILLI)


def test_of_gradients_one_layers_share_is_always_exposed():
    # The backward pass takes 80 ms and all of 13.733198090 ms could hide, but for the last layer's eighth.
    step = predictor().step(one_node(data=4))
    assert step.after((8,), Times((0.04,), (0.08,), (0.0,), ()), 0)[0] == close(1.716649761 * MILLI)


def test_a_pipeline_sums_gradients_after_its_last_pass():
    # The first of two ranks has four layers and the embedding: 4 x 12,596,224 + 52,559,872 = 102,944,768 parameters,
    # 411,779,072 bytes of gradients; of two data ranks each sends 2 x 1/2 of them: 6.145956299 ms, and 2 us.
    step = predictor().step(one_node((4, 4), data=2))
    times = step.times((4, 4))
    assert step.after((4, 4), times, 0)[0] == close(6.147956299 * MILLI)


def test_the_ring_of_a_sequence_on_four_ranks():
    # Keys and values of 8,192 tokens, 2 x 2 bytes x 8,192 x 1,024 = 33,554,432; 3/4 of them at 67 GB/s take
    # 0.375609313 ms, with the start 0.377609313. Gathered in the forward pass, again in the backward pass, and their
    # gradients scattered there: three times.
    [cost] = predictor(8192).costs(one_node(context=4))
    assert cost.layer.exchange == close(1.132827940 * MILLI)


def test_the_time_of_the_embedding():
    # Six passes over 1,024 tokens x 1,024 numbers of 2 bytes: 12,582,912 bytes at 920 GB/s; twice that back.
    [cost] = predictor().costs(one_node())
    assert cost.embedding.forward == close(13.677078261 * MICRO)
    assert cost.embedding.backward == close(27.354156522 * MICRO)


def test_the_time_of_the_head():
    # A unit computes 1 TFLOP/s. A tile of 256 x 128 with 1,024 + 32 inside: 2 x 256 x 128 x 1,056 = 69,206,016 FLOP,
    # 69.206016 us.
    # Logits: 4 x 393 = 1,572 tiles, 16 waves of 100: 1,107.296256 us.
    # Gradients of the inputs: 4 x 8 = 32 tiles, each cut in three along the 50,304 inside to occupy 96 units, one wave:
    # 65,536 x (16,768 + 32) FLOP, 1,101.004800 us. Of the weights: 197 x 8 = 1,576 tiles, 16 waves: 1,107.296256 us.
    # The loss moves 6 bytes for each of 1,024 x 50,304 logits: 309,067,776 bytes, 335.943234783 us. The forward
    # pass computes the gradients too, in one chunk, and scales that of the table: 8 bytes for each of 51,511,296
    # numbers, 447.924313043 us.
    [cost] = predictor().costs(one_node())
    moved = 335.943234783 + 447.924313043
    assert cost.head.forward == close((1107.296256 + 1101.004800 + 1107.296256 + moved) * MICRO)
    assert cost.head.backward == 0.0


def test_the_memory_of_the_embedding_and_of_the_head():
    # Partition 0-4-4-0: the first rank has the embedding alone, the last the final norm and a copy of the table,
    # 51,513,344 parameters. Weights and gradients take 4 bytes each, AdamW's two moments 8.
    rooms = memory_fit.rooms(predictor(), one_node((0, 4, 4, 0)))
    first, last = rooms[0].memory, rooms[3].memory
    assert (first.weights, first.gradients, first.optimizer) == (210_239_488, 210_239_488, 420_478_976)
    assert (last.weights, last.gradients, last.optimizer) == (206_053_376, 206_053_376, 412_106_752)
    # The loss: 1,024 x 50,304 logits of 2 bytes, 103,022,592, turned into their gradient in place; the gradient of the
    # table in fp32, 206,045,184, as the forward pass keeps it and as the backward pass adds it.
    assert first.head_and_loss == 0
    assert last.head_and_loss == 103_022_592 + 2 * 206_045_184


def test_the_time_of_a_layer_with_sequence_parallelism_off_and_on():
    # Two tensor ranks. The stream of a micro-batch: 2 x 1,024 x 1,024 = 2,097,152 bytes.
    # Off, a layer sums it four times: 2 x 1/2 of it at 67 GB/s, 31.300776119 us, and 2 us. On, each sum is a scatter
    # and a gather, with a start each: 2 us more.
    whole, cut = (predictor().costs(one_node(tensor=2, sequence_parallel=on))[0].layer for on in (False, True))
    assert whole.exchange == close(4 * 33.300776119 * MICRO)
    assert cut.exchange == close(4 * 35.300776119 * MICRO)
    # Nine passes over the stream take 18,874,368 bytes / 920 GB/s = 20.515617391 us, on half of that; against it two
    # of the starts in the forward pass.
    assert whole.forward - cut.forward == close((10.257808696 - 2 * 2) * MICRO)
    # The host starts two collectives in the forward pass, on four, each in 40 us.
    assert cut.host_forward - whole.host_forward == close(80 * MICRO)


def test_what_stages_send_with_sequence_parallelism_off_and_on():
    # Four tensor ranks of a node send at once, off all of the stream each: 4 x 2,097,152 bytes at 8.7 GB/s are
    # 964.207816092 us; on a fourth of it each. And 5 us.
    machines = [("round", 2)]
    [whole], [cut] = (
        predictor().step(layout(machines, (4, 4), tensor=4, sequence_parallel=on)).table.send for on in (False, True)
    )
    assert whole == close((964.207816092 + 5) * MICRO)
    assert cut == close((241.051954023 + 5) * MICRO)


def test_the_memory_of_activations_with_sequence_parallelism_off_and_on():
    # Two tensor ranks. Each of two norms of a layer keeps 2 x 1,024 + 8 = 2,056 bytes a token, the final norm
    # 4 x 1,024 + 8 = 4,104; on half of that: 8 x 2 x 1,028 + 2,052 = 18,500 bytes less for each of 1,024 tokens.
    whole, cut = (
        memory_fit.rooms(predictor(), one_node(tensor=2, sequence_parallel=on))[0].memory for on in (False, True)
    )
    assert whole.activations - cut.activations == 18_944_000


def test_the_time_of_a_layer():
    # A micro-batch of 1,024 tokens. A unit computes 1 TFLOP/s; what a wave of tiles takes for each step inside:
    # 256 x 128 65.536 ns, 128 x 128 at 0.95 34.492632 ns.
    # Query, key and value, 1,024 x 3,072, 1,024 + 32 inside: 4 x 24 = 96 large tiles, one wave, 69.206016 us.
    # Output, 1,024 x 1,024: 64 of the smaller tiles, one wave, 36.424218947 us.
    # Up, 1,024 x 4,096: 256 smaller tiles, three waves, 109.272656842 us (128 large ones take two of 69.2).
    # Down, 1,024 x 1,024 with 4,096 inside: 32 large tiles, cut in three: 4,096/3 + 32 inside, 91.575637333 us.
    products = 69.206016 + 36.424218947 + 109.272656842 + 91.575637333
    # Attention sees half of 1,024 x 1,024 scores: 2 x 2 x 1,024 x 1,024 x 1,024 / 2 = 2,147,483,648 FLOP with heads of
    # 64. At 80 TFLOP/s they take 26.843545600 us. 8,388,608 exponentials on 100 units take 3.584875214 us. Causal rows
    # cost 350 / 1,024 more: x 1.341796875.
    attention = 40.828759959
    # Nine passes over the stream of 1,024, two over the inner 4,096: 17,408 numbers of 2 bytes a token.
    pointwise = 38.751721739
    # Back, of the inputs: three pieces of 1,024 + 32 for query, key and value, 69.206016; output 36.424218947; up
    # 91.575637333; down 109.272656842. Of the weights: 69.206016, 36.424218947, and 109.272656842 twice.
    gradients = 2 * 69.206016 + 2 * 36.424218947 + 91.575637333 + 3 * 109.272656842
    [cost] = predictor().costs(one_node())
    assert cost.layer.forward == close((products + attention + pointwise) * MICRO)
    assert cost.layer.backward == close((gradients + 2.5 * attention + 2 * pointwise) * MICRO)


@pytest.mark.parametrize(
    ("layout", "forward", "backward"),
    [
        # One rank: a weight is cast, 4 + 2 bytes; its gradient is written in 2 bytes more than the product counts, and
        # added to the sum of earlier micro-batches, 12 bytes.
        ({"data": 1}, 6.521739130, 15.217391304),
        # ZeRO 3 on four ranks. A gather casts a fourth of the weights and copies it, 6 / 4 + 4 / 4 bytes, and copies
        # all into place, 4 bytes at 770 GB/s: 7.912196499. In both passes. The gradient is copied, cast to 4 bytes at
        # 100 x 1,050 / 132 GB/s, 5.028571429, and a fourth of it is added to the sum, 3 bytes: 3.260869565.
        ({"data": 4, "zero": 3}, 7.912196499, 16.201637493),
        # ZeRO 1: one gather for four micro-batches. The first gradient is cast, 6 bytes, three are added to it, 10
        # bytes, and the sum is copied once.
        ({"data": 4, "zero": 1}, 7.912196499 / 4, (36 / 0.92 + 5.028571429) / 4),
    ],
)
def test_the_time_of_a_weight_besides_products(layout, forward, backward):
    # In picoseconds, for each of four micro-batches.
    more = {"micro_batch": 4} if layout["data"] == 1 else {}
    [copies] = predictor().step(one_node(**layout, **more)).table.copies
    assert copies.layer == (close(forward * 1e-12), close(backward * 1e-12))


def test_the_rate_of_products_in_fp8_and_the_power_of_nodes():
    # 200 TFLOP/s on the data sheet, of which 0.92 remain. Two nodes: 100 W each, and four GPUs of 300 W.
    gpu, nodes = GPU | {"fp8": 200.0, "watts": 300.0}, NODES | {"idle_watts": 100.0, "price_hour": 9.0}
    machines = Cluster.model_validate({"nodes": [nodes], "gpus": [gpu], "links": LINKS})
    work = Work.of(gpt(precision="fp8"), machines.gpu_by_type["round"], PROGRAM, 1, (1, 1, False))
    assert work.rate == close(184e12)
    placement = (("round", 2),)
    assert machines.watts(placement) == 2 * (100 + 4 * 300)
    assert machines.price_hour(placement) == 18
    assert weight("cost", 18.0, 2600.0) == close(0.005)  # dollars a second
    assert weight("energy", 18.0, 2600.0) == 2600  # joules
