import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.sizes import activations
from steelyard.sizes.memory import memory_of
from steelyard.sizes.memory_hints import remedies
from steelyard.sizes.rank_check import data_ranks
from steelyard.sizes.stage_layers import stage_parameters

GIB = 1 << 30


def memory(name, world, *overrides):
    return memory_of(load_recipe(name, list(overrides)), world)


def test_a_lone_rank_holds_sixteen_bytes_per_parameter_and_16_bit_copies_of_its_layers():
    recipe = load_recipe("gpt2-small")
    alone = memory_of(recipe, 1)[0]
    held = stage_parameters(recipe, 0)
    assert alone.weights + alone.gradients + alone.optimizer == 16 * held.total
    assert alone.working_copies == 2 * held.layer * held.layers
    assert memory("gpt2-small", 1, "train.precision=fp32")[0].working_copies == 0
    assert memory("gpt2-small", 1, "parallel.recompute=full")[0].working_copies == 0


def test_each_degree_of_zero_shards_one_more_kind():
    by_zero = [memory("llama3.2-1b", 8, f"parallel.zero={zero}")[0] for zero in range(4)]
    assert by_zero[1].optimizer * 8 == pytest.approx(by_zero[0].optimizer, rel=1e-6)
    assert by_zero[1].weights * 8 == pytest.approx(by_zero[0].weights, rel=1e-6)
    assert by_zero[0].gradients < by_zero[1].gradients
    assert by_zero[2].gradients * 8 == pytest.approx(by_zero[0].gradients, rel=1e-6)
    assert by_zero[3].working_copies < by_zero[2].working_copies == by_zero[0].working_copies
    assert by_zero[1].total > by_zero[2].total > by_zero[3].total


def test_learned_masks_have_state_and_gradients_for_their_logits_and_none_for_weights():
    recipe = load_recipe("llama3.2-1b", ["sparsity.method=learned", "sparsity.base=here"])
    alone = memory_of(recipe, 1)[0]
    matrices = 16 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    logits = matrices * 6 // 4
    assert alone.optimizer == 2 * alone.gradients == 2 * 4 * logits
    assert alone.weights == 2 * stage_parameters(recipe, 0).total + 4 * logits
    assert alone.working_copies == 2 * matrices
    one_of_four = memory_of(load_recipe("llama3.2-1b", ["sparsity={method='learned', base='here', pattern='1:4'}"]), 1)[
        0
    ]
    assert one_of_four.optimizer * 6 == alone.optimizer * 4
    sharded = memory_of(load_recipe("llama3.2-1b", ["sparsity={method='learned', base='here'}", "parallel.zero=3"]), 8)[
        0
    ]
    assert sharded.optimizer * 8 == alone.optimizer
    assert sharded.weights * 8 == pytest.approx(alone.weights, rel=1e-6)


def test_joint_training_has_masks_and_with_distillation_a_frozen_copy_of_the_model():
    distill = ["sparsity.method=joint", "train.init_from=here"]
    joint = [*distill, "sparsity.distill=0"]
    held = stage_parameters(load_recipe("llama3.2-1b"), 0)
    matrices = 16 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    plain, masked, taught = (memory("llama3.2-1b", 1, *more)[0] for more in ([], joint, distill))
    assert masked.total - plain.total == masked.weights - plain.weights == matrices
    assert taught.total - masked.total == taught.weights - masked.weights == 2 * held.total
    for zero, gathered in ((1, held.total), (3, held.ends)):
        shards = [memory("llama3.2-1b", 8, *more, f"parallel.zero={zero}")[0] for more in ([], distill)]
        assert shards[1].weights - shards[0].weights == pytest.approx((matrices + 2 * held.total) / 8, abs=2)
        assert shards[1].working_copies - shards[0].working_copies == 2 * gathered


def test_hybrid_sharding_shards_within_its_groups():
    plain = memory("llama3.2-1b", 8, "parallel.zero=3", "parallel.data=8")[0]
    hybrid = memory("llama3.2-1b", 8, "parallel.zero=3", "parallel.data=8", "parallel.replicate=4")[0]
    assert hybrid.optimizer == pytest.approx(4 * plain.optimizer, rel=1e-6)


def test_one_state_for_sgd_and_none_on_the_device_when_offloaded():
    adamw, sgd = memory("gpt2-small", 1)[0], memory("gpt2-small", 1, "optim.name=sgd-sai")[0]
    assert adamw.optimizer == 2 * sgd.optimizer
    offloaded = memory("gpt2-small", 1, "optim.offload=true")[0]
    assert (offloaded.optimizer, adamw.host) == (0, 0)
    assert offloaded.host == 16 * adamw.weights // 4


def test_small_state_takes_two_bytes_or_little_more_than_one():
    fp32, bf16, int8 = (
        memory("gpt2-small", 1, f"optim.state={kind}")[0].optimizer for kind in ("fp32", "bf16", "int8")
    )
    assert fp32 == 2 * bf16
    assert int8 == pytest.approx(fp32 * (1 + 4 / 256) / 4, rel=1e-6)


@pytest.mark.parametrize("layout", [[], ["parallel.zero=1"], ["parallel.zero=3"], ["parallel.pipeline=2"]])
def test_bf16_gradients_take_two_bytes(layout):
    world = 4 if layout else 1
    fp32, bf16 = (
        memory("llama3.2-1b", world, *layout, f"optim.gradients={kind}", "train.global_batch=32")[0]
        for kind in ("fp32", "bf16")
    )
    assert fp32.gradients == pytest.approx(2 * bf16.gradients, abs=4)
    assert bf16.total < fp32.total
    assert bf16.optimizer == fp32.optimizer
    assert bf16.weights == fp32.weights


@pytest.mark.parametrize("overrides", [[], ["parallel.zero=3"], ["parallel.expert=4", "parallel.zero=1"]])
def test_muon_has_one_state_for_matrices_of_layers_experts_included_and_two_for_the_rest(overrides):
    name, world = ("qwen3-30b-a3b", 8) if overrides else ("gpt2-small", 1)
    recipe = load_recipe(name, overrides)
    adamw, muon = (memory(name, world, *overrides, f"optim.name={each}")[0] for each in ("adamw", "muon"))
    layers = recipe.model.blocks.layers
    matrices = sum(param.size for layer in layers for param in layer.params().values() if param.is_matrix)
    shards = 8 if recipe.parallel.zero else 1
    assert adamw.optimizer - muon.optimizer == pytest.approx(4 * matrices / shards, rel=1e-6)
    frozen = ["sparsity.method=learned", "sparsity.base=here"]
    masks = [memory("llama3.2-1b", 1, *frozen, f"optim.name={each}")[0].optimizer for each in ("adamw", "muon")]
    assert masks[0] == masks[1]


@pytest.mark.parametrize("name", ["gpt2-xl", "llama3.2-1b"])
def test_recomputation_trades_activations(name):
    none, selective, some, full = (
        memory(name, 1, f"parallel.recompute={how}")[0].activations for how in ("none", "selective", 4, "full")
    )
    assert none > selective > full
    assert none > some > full


def test_activations_follow_the_schedule():
    plan = ["parallel.pipeline=4", "parallel.partition=4-4-4-4", "train.micro_batch=1", "train.global_batch=16"]
    gpipe, one, bubble = (
        [each.activations for each in memory("llama3.2-1b", 4, *plan, f"parallel.schedule={schedule}")]
        for schedule in ("gpipe", "1f1b", "zero-bubble")
    )
    assert gpipe[0] == 4 * one[0]
    assert one[0] > one[1] > one[2]
    assert gpipe[3] == 16 * one[3]
    assert all(late >= early for late, early in zip(bubble, one, strict=True))


def test_an_interleaved_rank_holds_its_warm_up():
    recipe = load_recipe(
        "llama3.2-1b",
        ["parallel.pipeline=2", "parallel.virtual=2", "parallel.schedule=interleaved", "parallel.partition=4-4-4-4"],
    )
    # Rank 0: two micro-batches of the first stage for each of the two hops, two of its second, and the one at work.
    tokens = recipe.train.micro_batch * recipe.data.sequence_length
    kept = memory_of(recipe, 2)[0].activations / (tokens * 4 * activations.layer(recipe))
    assert 5 <= kept < 5.2


def test_context_and_sequence_parallelism_save_activations():
    alone = memory("llama3.1-8b", 8, "parallel.tensor=8")[0].activations
    sequence = memory("llama3.1-8b", 8, "parallel.tensor=8", "parallel.sequence_parallel=true")[0].activations
    context = memory("llama3.1-8b", 16, "parallel.tensor=8", "parallel.context=2", "train.global_batch=16")[0]
    assert sequence < alone
    assert 0.4 * alone < context.activations < 0.7 * alone


def test_a_70b_does_not_fit_two_boxes_of_80_gib_and_zero_mends_it_on_eight():
    assert max(each.total for each in memory("llama3.1-70b", 16)) > 80 * GIB
    assert max(each.total for each in memory("llama3.1-70b", 64, "parallel.zero=1")) < 60 * GIB


def test_remedies_fit_or_help_most():
    recipe = load_recipe("llama3.2-1b", ["train.micro_batch=4", "train.global_batch=64"])
    needed = memory_of(recipe, 1)[0].total
    found = remedies(recipe, 1, int(0.9 * needed))
    assert found
    assert all(size <= 0.9 * needed for _, size in found)
    assert "parallel.recompute=selective" in dict(found)
    helpful = remedies(recipe, 1, GIB)
    assert helpful
    assert [size for _, size in helpful] == sorted(size for _, size in helpful)


@pytest.mark.parametrize(
    ("world", "overrides", "message"),
    [
        (24, [], "a multiple of 16 ranks, not on 24"),
        (8, [], "a multiple of 16 ranks, not on 8"),
        (32, ["parallel.data=4"], "runs on 64 ranks, not on 32"),
        (48, [], "does not divide into micro-batches of 1 on 3"),
        (32, ["parallel.replicate=4", "parallel.zero=1", "parallel.data=4"], "runs on 64 ranks"),
    ],
)
def test_a_world_that_the_plan_cannot_fill_is_refused(world, overrides, message):
    with pytest.raises(UserError, match=message):
        data_ranks(load_recipe("llama3.1-70b", overrides), world)


def moe_memory(world, **parallel):
    sizes = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 1024, "vocab": 1024, "experts": 8}
    train = {"global_batch": 16, "micro_batch": 1, "precision": "bf16"}
    values = {"name": "moe", "model": {"family": "mixtral", **sizes}, "data": {"sequence_length": 256}, "train": train}
    recipe = Recipe.model_validate(values | {"parallel": parallel})
    return stage_parameters(recipe, 0, 1, recipe.parallel.expert), memory_of(recipe, world)[0]


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones():
    for zero, shards, expert_shards in ((0, 1, 1), (1, 8, 4), (3, 8, 4)):
        size, held = moe_memory(8, expert=2, zero=zero)
        assert held.weights == 4 * ((size.total - size.experts) // shards + size.experts // expert_shards)
        assert held.optimizer == 2 * held.weights
    whole, split = moe_memory(8, zero=0)[1], moe_memory(8, expert=8, zero=0)[1]
    assert split.total < whole.total / 2


def test_zero_shards_experts_as_finely_with_and_without_expert_ranks():
    whole, split = moe_memory(8, zero=2)[1], moe_memory(8, expert=4, zero=2)[1]
    assert split.weights == whole.weights
    assert split.optimizer == whole.optimizer
    assert split.working_copies < whole.working_copies


def test_experts_of_one_rank_alone_are_not_reduced():
    size, alone = moe_memory(4, expert=4, zero=1)
    others = size.total - size.experts
    assert alone.gradients == 4 * (others + others // 4 + size.experts)


def test_expert_ranks_must_divide_the_ranks_that_share_the_data():
    with pytest.raises(UserError, match="expert = 4 does not divide the 2 ranks"):
        moe_memory(2, expert=4)
