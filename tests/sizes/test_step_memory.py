"""The moments of a step against the storages that exist in it, on a CPU with fake process groups.

The first tests are about one term each, in layouts where that term decides the peak. The slow ones compile the layers,
as a GPU does. Tolerance: 1%, which covers vectors, and what a CPU's norm computes beside a GPU's.
"""

import gc
import itertools
import platform

import pytest
import torch

from steelyard.core.recipe import load_recipe
from steelyard.model import experts
from steelyard.parallel import mesh as meshes
from steelyard.parallel.expert_parallel import ExpertDispatcher
from steelyard.parallel.fake_group import fake_world
from steelyard.parallel.mesh import MeshAxis
from steelyard.sizes.memory import RankPeak, SharedSizes, memory_of
from steelyard.sizes.memory_moments import peak
from steelyard.sizes.stage_layers import partition_of
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.rank_measure import batches_of, initialise
from steelyard.training.tensor_peak import cpu_peak, held_bytes

CPU = torch.device("cpu")
SMALL = ["train.device=cpu", "train.precision=fp32", "model.layers=4", "model.hidden=256", "model.heads=8"]
LLAMA = [*SMALL, "model.head_dim=32", "model.kv_heads=2", "model.ffn=1024"]
QWEN = [*SMALL, "model.head_dim=64", "model.kv_heads=2", "model.experts=64", "model.experts_per_token=8",
        "model.expert_ffn=96", "train.micro_batch=2", "train.global_batch=16", "data.sequence_length=256"]  # fmt: skip


def counted(recipe, world, rank):
    """The most bytes of tensors that exist at once in a step of one rank."""
    torch.compiler.reset()  # Layers of other tests, which hold their weights, count for its limit of recompilations.
    gc.collect()
    others = held_bytes(CPU)
    with fake_world(rank, world):
        mesh = meshes.make(recipe.parallel, "cpu")
        engine = Engine(recipe, mesh, CPU, Extension(), None)
        initialise(engine)
        batches, labels = batches_of(recipe, mesh.data.size), recipe.train.global_batch * recipe.data.sequence_length

        def step():
            return engine.step(next(batches), 0, 1e-5, labels, 1.0)

        step()  # Compiles, and makes the optimizer's state.
        return cpu_peak(step) - others


def sizes_of(recipe, world, rank):
    of_rank = RankPeak(SharedSizes(recipe, world), partition_of(recipe), rank)
    return of_rank._moments(of_rank.memory())


def test_fsdp_keeps_the_buffer_of_its_last_reduction_through_the_next_micro_batch():
    layout = ["parallel.zero=2", "train.micro_batch=2", "train.global_batch=64", "data.sequence_length=64"]
    recipe = load_recipe("gpt2-small", [*SMALL, "model.vocab=8192", *layout])
    sizes = sizes_of(recipe, 16, 0)
    assert sizes.unwaited == 4 * (8192 + recipe.model.positions + 2) * 256
    found = counted(recipe, 16, 5)
    assert memory_of(recipe, 16)[0].total == pytest.approx(found, rel=0.01)
    assert sizes.unwaited > 0.05 * found


def test_the_softmax_of_a_split_vocabulary_ends_before_the_gradient_of_the_head_is_made():
    layout = ["parallel.tensor=2", "train.micro_batch=4", "train.global_batch=4", "data.sequence_length=128"]
    recipe = load_recipe("gpt2-small", [*SMALL, "model.vocab=32768", *layout])
    sizes = sizes_of(recipe, 2, 0)
    found = counted(recipe, 2, 1)
    assert memory_of(recipe, 2)[0].total == pytest.approx(found, rel=0.01)
    assert sizes.table > 0.03 * found
    assert sizes.exchanged > 0


def test_an_exchange_of_slots_holds_four_tensors_beside_what_the_experts_and_their_sum_save():
    slots, hidden, ranks = 4096, 256, 8
    counts = torch.full((64,), slots // 64)
    with fake_world(0, ranks):
        exchange = ExpertDispatcher(MeshAxis(0, ranks, torch.distributed.group.WORLD))
        sent = torch.randn(slots, hidden, requires_grad=True) * 1
        exchange(lambda x, counts: x * 1, sent, counts)
        before = held_bytes(CPU)
        most = cpu_peak(lambda: exchange(lambda x, counts: x * 1, sent, counts)) - before
    one = sent.nbytes
    inputs, outputs = one, one  # Saved: the experts' inputs, and what comes back.
    recipe = load_recipe("qwen3-30b-a3b", [*QWEN, "parallel.expert=8"])
    predicted = sizes_of(recipe, ranks, 0).exchanged
    assert predicted == 4 * one
    assert one + most - inputs - outputs == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("name", ["llama3.2-1b", "gpt2-small", "qwen3-30b-a3b"])
def test_no_moment_is_larger_than_the_sum_of_the_kinds(name):
    layouts = (
        "parallel.zero=0",
        "parallel.zero=2",
        "parallel.zero=3",
        "parallel.pipeline=2",
        "parallel.recompute=full",
    )
    layouts += ("train.compile=false", "optim.gradients=bf16", *(["parallel.expert=8"] if name[0] == "q" else []))
    for first, second in itertools.combinations(layouts, 2):
        recipe = load_recipe(name, ["model.layers=4", "train.micro_batch=1", "train.global_batch=32", first, second])
        for rank in range(recipe.parallel.pipeline):
            world = 8 * recipe.parallel.pipeline
            found = memory_of(recipe, world, [rank])[0]
            assert peak(sizes_of(recipe, world, rank)) <= found.total - found.not_at_once, (first, second, rank)


@pytest.mark.slow
def test_the_backward_pass_of_a_compiled_layer_adds_one_tensor_and_one_weight_gradient():
    layout = ["parallel.pipeline=4", "parallel.partition=4-4-4-4", "model.layers=16", "train.micro_batch=4"]
    layout += ["train.global_batch=16", "data.sequence_length=192", "model.vocab=2048", "train.compile=true"]
    recipe = load_recipe("llama3.2-1b", [*LLAMA, *layout])
    sizes = sizes_of(recipe, 4, 0)
    assert sizes.working == 4 * 4 * 192 * 1024 + 4 * 1024 * 256
    assert memory_of(recipe, 4)[0].total == pytest.approx(counted(recipe, 4, 0), rel=0.01)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() in ("aarch64", "arm64"), reason="cpu_bf16 computes in fp32 there")
@pytest.mark.parametrize(
    "layout",
    [
        ("parallel.zero=3", "model.vocab=1024"),  # The peak is in the second layer that goes back.
        ("parallel.zero=1", "parallel.expert=8", "model.vocab=4096"),  # The peak is at the loss.
    ],
)
def test_compiled_experts_fill_what_is_predicted(layout, monkeypatch):
    def product(x_SD, weight_XFD, counts_X):
        return experts.grouped_mm(x_SD, weight_XFD.to(x_SD.dtype), counts_X)  # as on a GPU

    monkeypatch.setattr(experts.ExpertLinear, "product", staticmethod(product))
    recipe = load_recipe("qwen3-30b-a3b", [*QWEN, "train.compile=true", "train.precision=bf16", *layout])
    assert memory_of(recipe, 8)[0].total == pytest.approx(counted(recipe, 8, 0), rel=0.01)
