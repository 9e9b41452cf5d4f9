"""Mixtures of experts in Megatron checkpoints: every layout is read back, and GPTModel gives our logits."""

import itertools
from pathlib import Path

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_args import args_of, config_from_args
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.core.recipe.families.moe import MixtralConfig
from steelyard.core.recipe.families.qwen3 import Qwen3Config
from tests.checkpoint.gpt_model import TOKENS
from tests.checkpoint.models import EXPERTS, ROUTED, SIZES, Held, assert_equal, written

FILE = "model_optim_rng.pt"
ENGINE, GROUPED = {"engine": True}, {"engine": True, "grouped": True}


def logits_of_steelyard(name: str) -> torch.Tensor:
    """The logits of the plain model, which `test_families.py` compares with transformers."""
    with torch.no_grad():
        logits: torch.Tensor = Held(EXPERTS[name]).network.eval()(TOKENS)
    return logits[..., :100]


def logits_of_megatron(folder: Path, tensor: int, control: str = "") -> torch.Tensor:
    pytest.importorskip("megatron.core")
    from tests.checkpoint import test_formats_megatron

    return test_formats_megatron.logits_of_megatron(folder, tensor, control)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", MegatronLayout(2, 2)),
        ("mixtral", MegatronLayout(**GROUPED)),
        ("qwen3-moe", MegatronLayout(2, **ENGINE)),
        ("mixtral, dense layers", MegatronLayout(2, 2, (1, 3), **GROUPED)),
    ],
)
def test_experts_are_read_back(tmp_path, name, layout):
    folder = written(tmp_path, name, "megatron", layout=layout)
    assert_equal(Held(EXPERTS[name]), open_source(folder))


@pytest.mark.parametrize("name", EXPERTS)
def test_torch_dist_is_read_back(tmp_path, name):
    assert_equal(Held(EXPERTS[name]), open_source(written(tmp_path, name, "megatron-dist")))


def test_norms_of_queries_and_keys_make_qwen3(tmp_path):
    source = Held(Qwen3Config(family="qwen3", kv_heads=2, head_dim=8, ffn=48, **SIZES))
    convert(source, tmp_path / "m", Target("megatron", MegatronLayout(2)))
    assert_equal(source, open_source(tmp_path / "m"))


def of_expert_ranks(folder: Path, ranks: int, change=lambda model, local: model) -> None:
    """Rewrite a checkpoint as Megatron saves it with expert parallelism."""
    for path in sorted((folder / "iter_0000001").iterdir()):
        state = torch.load(path / FILE, weights_only=False)
        local = state["args"].num_experts // ranks
        state["args"].expert_model_parallel_size = ranks
        for rank in range(ranks):
            model = {}
            for name, tensor in state["model"].items():
                head, found, tail = name.partition(".local_experts.")
                if found:
                    number, _, tail = tail.partition(".")
                    if int(number) // local != rank:
                        continue
                    name = f"{head}.local_experts.{int(number) % local}.{tail}"
                model[name] = tensor.clone()
            target = path.with_name(f"{path.name}_{rank:03d}")
            target.mkdir()
            torch.save({**state, "model": change(model, local)}, target / FILE)
        (path / FILE).unlink()
        path.rmdir()


@pytest.mark.parametrize("layout", [MegatronLayout(2), MegatronLayout(1, 2)])
def test_expert_ranks_are_read(tmp_path, layout):
    folder = written(tmp_path, "mixtral", "megatron", layout=layout)
    of_expert_ranks(folder, 2)
    source = open_source(folder)
    assert source.layout["expert"] == 2
    assert_equal(Held(EXPERTS["mixtral"]), source)


def test_transposed_experts_of_groupedmlp_are_read(tmp_path):
    def grouped(model, local):
        for layer, number in itertools.product(range(4), (1, 2)):
            prefix = f"decoder.layers.{layer}.mlp.experts."
            names = [f"{prefix}local_experts.{expert}.linear_fc{number}.weight" for expert in range(local)]
            stacked = torch.stack([model.pop(name).t() for name in names])  # experts, inputs, outputs
            model[f"{prefix}weight{number}"] = stacked.reshape(32, -1) if number == 1 else stacked.reshape(-1, 32)
        return model

    folder = written(tmp_path, "mixtral", "megatron", layout=MegatronLayout(2))
    of_expert_ranks(folder, 2, grouped)
    assert_equal(Held(EXPERTS["mixtral"]), open_source(folder))


def test_a_missing_expert_rank_is_named(tmp_path):
    folder = written(tmp_path, "mixtral", "megatron", layout=MegatronLayout(2))
    of_expert_ranks(folder, 2)
    (folder / "iter_0000001/mp_rank_01_001" / FILE).unlink()
    with pytest.raises(UserError, match="no file of tensor rank 1, pipeline rank 0, expert rank 1"):
        open_source(folder)


@pytest.mark.parametrize(
    ("arg", "value", "message"),
    [
        ("moe_shared_expert_gate", True, "a gate of the shared expert"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn routing"),
        ("moe_router_group_topk", 2, "routing limited to groups"),
        ("num_experts", [4], "experts of Megatron-DeepSpeed"),
        ("add_qkv_bias", True, "supported only in llama"),
    ],
)
def test_another_mixture_of_experts_is_refused(arg, value, message):
    args = vars(args_of(EXPERTS["mixtral"], torch.float32, {}, MegatronLayout()))
    with pytest.raises(UserError, match=message):
        config_from_args({**args, arg: value}, "args")


def test_experts_with_another_tensor_size_are_refused(tmp_path):
    folder = written(tmp_path, "mixtral", "megatron")
    file = folder / "iter_0000001/mp_rank_00" / FILE
    state = torch.load(file, weights_only=False)
    state["args"].expert_tensor_parallel_size = 2
    torch.save(state, file)
    with pytest.raises(UserError, match="experts are on 2 tensor ranks, other layers on 1"):
        open_source(folder)


@pytest.mark.parametrize(
    ("keys", "layout", "message"),
    [
        ({"window": 8}, MegatronLayout(), "sliding windows"),
        ({"router_bias_rate": 0.1}, MegatronLayout(), "router_bias_rate with softmax"),
        ({"experts_per_token": 1}, MegatronLayout(), "one expert per token"),
        ({"expert_ffn": 33}, MegatronLayout(2), "33 columns of an expert"),
        ({}, MegatronLayout(grouped=True), "only experts with layers of Transformer Engine"),
    ],
)
def test_what_megatron_cannot_hold_is_refused(tmp_path, keys, layout, message):
    config = MixtralConfig(**{"family": "mixtral", **ROUTED, **keys})
    with pytest.raises(UserError, match=message):
        convert(Held(config), tmp_path / "m", Target("megatron", layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to", "tensor"),
    [
        ("mixtral", "megatron", 1),
        ("mixtral", "megatron", 2),
        ("mixtral", "megatron-dist", 1),
        ("qwen3-moe", "megatron", 1),
        ("mixtral, dense layers", "megatron", 2),
        ("mixtral, dense layers", "megatron-dist", 1),
    ],
)
def test_a_gptmodel_gives_our_logits(tmp_path, name, to, tensor):
    options = {"layout": MegatronLayout(tensor)} if to == "megatron" else {}
    folder = written(tmp_path, name, to, **options)
    torch.testing.assert_close(logits_of_megatron(folder, tensor), logits_of_steelyard(name), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_swapped_gate_and_up_would_show(tmp_path):
    folder = written(tmp_path, "mixtral", "megatron")
    assert (logits_of_megatron(folder, 1, "gate") - logits_of_steelyard("mixtral")).abs().max() > 0.1
