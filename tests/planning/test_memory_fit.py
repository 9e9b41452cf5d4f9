"""What other programs hold and do in a step, each number worked out by hand."""

from dataclasses import replace

import pytest

from steelyard.core.recipe import Recipe
from steelyard.planning import compute, memory_fit, torchtitan_memory, update_cost
from steelyard.planning.communication import BASE_LATENCY, REACHED
from steelyard.planning.compute import Work
from steelyard.planning.layer_dims import LayerDims
from steelyard.planning.predict import Predictor
from steelyard.planning.software import DEEPSPEED, MEGATRON, STEELYARD, TORCHTITAN
from steelyard.sizes.gpu_catalogue import by_name
from tests.planning.machines import cluster, gpt, layout

STREAM = 1024 * 1024  # numbers of a micro-batch of one sequence: 1,024 tokens, 1,024 wide
SCORES = 16 * 1024 * 1024
LOGITS = 1024 * 50304


def held(software, counts, precision="fp32", data=1, model=None, **more):
    """The memory of each pipeline rank, on nodes of four A100."""
    recipe = gpt(layers=sum(counts), precision=precision, batch=8 * data)
    if model:
        recipe = Recipe.model_validate(recipe.settings() | {"model": recipe.settings()["model"] | model})
    chosen = layout([("a100-80", 4)], counts, data=data, **more)
    predictor = Predictor(recipe, cluster(("a100-80", 4, 4)), software)
    return memory_fit.memories_of(predictor, chosen, range(len(counts)))


def test_a_layer_in_fp32_keeps_twice_what_it_keeps_in_16_bits_but_for_the_masks():
    # Four tensors as wide as the stream before and behind norms; query, keys, values, outcome; the MLP's inside twice.
    bare = 4 * (4 + 4 + 2 * 4) * STREAM + 4 * SCORES
    assert held(MEGATRON, (3, 1))[0].activations == 2 * 3 * bare  # Two micro-batches in flight, three layers.
    dropping = held(MEGATRON, (3, 1), model={"dropout": 0.1, "attention_dropout": 0.1})[0].activations
    assert dropping == 2 * 3 * (bare + 2 * STREAM + 5 * SCORES)
    assert held(MEGATRON, (3, 1), "fp16")[0].activations == bare * 3


def test_the_gradients_of_scores_come_on_top_of_what_is_kept_less_what_the_mlp_gave_back():
    [first, _] = held(MEGATRON, (3, 1))
    assert first.temporaries == 2 * 4 * SCORES - 4 * (2 + 2 * 4) * STREAM
    [again, _] = held(MEGATRON, (3, 1), recompute="full")
    kept_again = 4 * (4 + 4 + 2 * 4 - 1) * STREAM + 4 * SCORES
    assert again.temporaries == first.temporaries + kept_again


def test_the_last_stage_holds_logits_their_softmax_and_what_the_pipeline_engine_left_of_the_last_micro_batch():
    assert held(MEGATRON, (1, 1))[1].head_and_loss == (4 + 4) * LOGITS + 2 * 4 * STREAM
    assert held(MEGATRON, (1, 1), "fp16")[1].head_and_loss == (2 + 4 + 4) * LOGITS + 2 * 2 * STREAM
    assert held(DEEPSPEED, (1, 1))[1].head_and_loss == (4 + 4 + 4) * LOGITS + 2 * 4 * STREAM
    assert held(MEGATRON, (1, 1))[0].head_and_loss == 0


def test_deepspeed_copies_gradients_into_one_piece_where_there_is_anyone_to_sum_them_with():
    alone, summed = held(DEEPSPEED, (2, 2))[0], held(DEEPSPEED, (2, 2), data=2)[0]
    assert (alone.layer_buffers, summed.layer_buffers) == (0, summed.gradients)
    assert held(MEGATRON, (2, 2), data=2)[0].layer_buffers == 0
    # What was received and what was sent stays while two micro-batches are in flight.
    assert alone.exchange_buffers == 2 * 2 * 4 * STREAM


def test_relu_keeps_one_tensor_of_the_mlp_where_gelu_keeps_two():
    gelu, relu = (held(each, (3, 1))[0].activations for each in (DEEPSPEED, replace(DEEPSPEED, inner_kept=1)))
    assert gelu - relu == 2 * 3 * 4 * 4 * STREAM


def test_both_ends_of_a_short_pipeline_are_asked_for_room():
    recipe, chosen = gpt(layers=8), layout([("a100-80", 1)], (4, 4), data=2)
    assert memory_fit.deciding_ranks(Predictor(recipe, cluster(("a100-80", 1, 4))), chosen) == [0, 1]


def test_sequence_parallelism_gathers_the_inputs_of_two_products_again():
    recipe, machines = gpt(precision="bf16"), cluster(("a100-80", 1, 4))
    chosen = layout([("a100-80", 1)], (8,), tensor=4, sequence_parallel=True)
    [with_] = Predictor(recipe, machines, MEGATRON).costs(chosen)
    [without] = Predictor(recipe, machines, replace(MEGATRON, regathers=False)).costs(chosen)
    sent = 3 / 4 * 2 * STREAM / (300e9 * REACHED["nvlink"])  # Three quarters of 2 MiB.
    latency = BASE_LATENCY + 3 * machines.inside(machines.nodes[0]).latency
    assert with_.layer.backward - without.layer.backward == pytest.approx(2 * (sent + latency))
    assert with_.layer.forward == without.layer.forward


def test_a_step_of_adam_moves_38_bytes_a_parameter_and_4_more_under_fp16():
    gpu = by_name("a100-80")
    for precision, bytes_ in (("bf16", 38), ("fp16", 42)):
        recipe = gpt(precision=precision)
        work = Work.of(recipe, gpu, MEGATRON, 1, (1, 1, False))
        seconds = bytes_ * 1e9 / (2039e9 * compute.MEMORY_SHARE)
        assert update_cost.optimizer(work, recipe).seconds(1e9) == pytest.approx(seconds)


def test_bf16_gradients_halve_what_is_reduced_and_are_read_in_two_bytes():
    plain = gpt(precision="bf16")
    small = plain.model_copy(update={"optim": plain.optim.model_copy(update={"gradients": "bf16"})})
    work = Work.of(plain, by_name("a100-80"), STEELYARD, 1, (1, 1, False))
    saved = update_cost.optimizer(work, plain).bytes - update_cost.optimizer(work, small).bytes
    assert saved == 2
    assert [update_cost.reduced_bytes(STEELYARD, recipe) for recipe in (plain, small)] == [4, 2]


def test_a_rank_that_sends_in_turn_spends_the_time_of_its_sends():
    # Two stages on two nodes: each sends once a micro-batch, and what is sent cannot hide behind computing.
    recipe, machines = gpt(batch=8), cluster(("a100-80", 2, 1), network=1.0)
    chosen = layout([("a100-80", 2)], (4, 4))
    step = {name: Predictor(recipe, machines, replace(MEGATRON, **how)).step(chosen) for name, how in
            (("beside", {"waits_to_send": False}), ("sends", {}), ("both", {"waits_to_receive": True}))}  # fmt: skip
    send = 5e-6 + 2 * STREAM / (1e9 * REACHED["rdma"])
    bare, turn, both = (step[name].times((4, 4)) for name in ("beside", "sends", "both"))
    assert turn.send == (0.0,)
    assert [b - a for a, b in zip(bare.forward, turn.forward, strict=True)] == pytest.approx([send, 0.0])
    assert [b - a for a, b in zip(bare.backward, turn.backward, strict=True)] == pytest.approx([0.0, send])
    # A receive blocks its rank while the other one sends: it takes time only if the rank was not idle anyway.
    assert (both.forward, both.receive, turn.receive) == (turn.forward, pytest.approx((send,)), ())
    assert step["both"].seconds((4, 4)) > step["sends"].seconds((4, 4))
    parts = step["sends"].parts((4, 4))
    assert parts.pipeline == pytest.approx(8 * send)
    assert parts.total == pytest.approx(step["sends"].seconds((4, 4)))


def test_computing_a_layer_again_stops_before_its_last_product_but_under_megatron():
    recipe, gpu = gpt(precision="bf16"), by_name("a100-80")
    shape = LayerDims.of(recipe)
    ours, theirs = (Work.of(recipe, gpu, each, 1, (1, 1, False)) for each in (STEELYARD, MEGATRON))
    last, _ = compute.linear(ours, 1024, 4096, 1024)
    assert compute.layer(ours, shape).recompute == pytest.approx(compute.layer(ours, shape).forward - last)
    assert compute.layer(theirs, shape).recompute == compute.layer(theirs, shape).forward


def test_exchanges_beside_products_show_a_share_only():
    recipe, machines = gpt(precision="bf16"), cluster(("a100-80", 1, 4))
    chosen = layout([("a100-80", 1)], (8,), tensor=4, sequence_parallel=True)
    [plain] = Predictor(recipe, machines, TORCHTITAN).costs(chosen)
    [hidden] = Predictor(recipe, machines, replace(TORCHTITAN, exposed_exchange=0.25)).costs(chosen)
    assert hidden.layer.exchange == pytest.approx(plain.layer.exchange / 4)


def test_softmax_in_fp32_is_two_passes_where_megatrons_kernel_is_one():
    gpu, seconds = by_name("a100-80"), {}
    for precision in ("fp16", "fp32"):
        recipe = gpt(precision=precision)
        work = Work.of(recipe, gpu, MEGATRON, 1, (1, 1, False))
        products = [compute.product(work, *one, batch=16, share=compute.BATCHED_SHARE)
                    for one in ((1024, 1024, 64), (1024, 64, 1024))]  # fmt: skip
        seconds[precision] = compute._attention(work, LayerDims.of(recipe), 1024)[0] - sum(products)
    assert seconds["fp32"] == pytest.approx(16 * SCORES / (2039e9 * compute.MEMORY_SHARE))
    assert seconds["fp16"] == pytest.approx(4 * SCORES / (2039e9 * compute.MEMORY_SHARE))


def llama_8b(batch: int, length: int, **train) -> Recipe:
    model = {"family": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
    train = {"global_batch": batch, "micro_batch": 1, "precision": "bf16"} | train
    return Recipe.model_validate({"name": "8b", "model": model, "data": {"sequence_length": length}, "train": train})


def test_torchtitan_keeps_every_second_product_of_a_layer():
    chosen = layout([("h100", 1)], (32,), data=8, zero=3, recompute="selective")
    recipe = chosen.applied(llama_8b(16, 8192))
    # Its input, attention's outcome and a number for each head; of the products query, values, gate and the last.
    assert torchtitan_memory.layer_kept(recipe) == 2 * (4096 + 4096) + 4 * 32 + 2 * (4096 + 1024 + 14336 + 4096)
    assert torchtitan_memory.layer_kept(replace(chosen, recompute="full").applied(llama_8b(16, 8192))) == 2 * 4096


def test_torchtitans_fullest_moment_is_the_loss_over_all_logits():
    chosen = layout([("h100", 1)], (32,), data=8, zero=3, micro_batch=2, recompute="selective")
    predictor = Predictor(llama_8b(16, 8192), cluster(("h100", 1, 8)), TORCHTITAN)
    [memory] = memory_fit.memories_of(predictor, chosen, [0])
    parameters, table, tokens = 8_030_261_248, 128256 * 4096, 2 * 8192
    gaps = 1.08
    assert memory.weights == int(4 * parameters / 8 * gaps)
    assert memory.optimizer == int(8 * parameters / 8 * gaps)
    assert memory.gradients == 0  # Let go of before the step.
    assert memory.working_copies == int(2 * (2 * table + 4096) * gaps)
    assert memory.head_and_loss == int(14 * tokens * 128256 * gaps)
    assert memory.activations == int(32 * tokens * 63616 * gaps)
    # TorchTitan's table 1 says 77.0 GiB for this run.
    assert memory.total / 2**30 == pytest.approx(77.0, rel=0.02)


def test_in_torchtitans_pipeline_weights_stay_gathered_and_gradients_are_summed_whole():
    chosen = layout([("h100", 4)], (16, 16), data=16, zero=3, recompute="full")
    predictor = Predictor(llama_8b(32, 8192), cluster(("h100", 4, 8)), TORCHTITAN)
    first, _ = memory_fit.memories_of(predictor, chosen, [0, 1])
    held = 16 * 218_112_000 + 128256 * 4096
    assert first.working_copies == int(2 * held * 1.08)
    assert first.gradients == int(4 * held * 1.08)


def test_the_engine_itself_does_not_compute_a_layers_last_product_again():
    import torch
    from torch import nn
    from torch.utils._python_dispatch import TorchDispatchMode

    from steelyard.model.transformer import TransformerLayer
    from steelyard.parallel.activation_checkpoint import _wrap

    shapes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                shapes.append(tuple(out.shape))
            return out

    class Layer(TransformerLayer):
        def __init__(self):
            nn.Module.__init__(self)
            self.mlp = nn.Sequential(nn.Linear(3, 5, bias=False), nn.GELU(), nn.Linear(5, 7, bias=False))

        def compute(self, x_BLD, context):
            return self.mlp(x_BLD), None

    layer = Layer()
    _wrap(layer, selective=False)
    out = layer(torch.randn(2, 3, requires_grad=True), None)
    with Products():
        out.sum().backward()
    assert shapes.count((2, 5)) == 2  # The first product again, and the gradient of what came out of it.
    assert (2, 7) not in shapes
