"""Muon on one process, against `torch.optim.Muon` and its own definition. Layouts: tests/parallel/test_muon.py."""

import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.mesh import alone
from steelyard.parallel.param_shards import ParamShard
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.optimizer import Optimizer
from steelyard.training.optimizers import muon_elementwise
from steelyard.training.optimizers.newton_schulz import orthogonalize

SHAPES = [(32, 32), (32, 32), (48, 16), (16, 48), (8, 32)]  # a CPU without bf16 products is slow
# A bf16 CPU without a fast product says so once.
pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")


def shard(parameter: torch.nn.Parameter, name: str = "layers.0.mlp.up.weight", is_matrix: bool = True) -> ParamShard:
    shape = tuple(parameter.shape)
    return ParamShard(name, parameter, parameter.detach(), shape, (0,) * len(shape), 1, *[False] * 5, is_matrix)


def step(optimizer: Optimizer, rate: float, scale: float = 1.0) -> None:
    optimizer.step(rate, torch.tensor(scale), torch.zeros(()), None)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_twenty_steps_in_bf16_are_those_of_torch(scale, nesterov):
    rate, decay = 2e-4, 5.0  # Products in bf16 are rounded differently by each kind of CPU: 5e-4 of an update.
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator) / 50) for shape in SHAPES]
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in ours]
    before = [each.detach().clone() for each in ours]
    optim = OptimSection(
        name="muon", learning_rate=rate, weight_decay=decay, muon_momentum=0.9, muon_scale=scale, muon_nesterov=nesterov
    )
    optimizer = Optimizer([shard(each) for each in ours], optim, on_host=False)
    torchs = torch.optim.Muon(theirs, rate, weight_decay=decay, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale)
    for _ in range(20):
        for one, other in zip(ours, theirs, strict=True):
            other.grad = torch.randn(one.shape, generator=generator)
            one.grad = other.grad * 8
        step(optimizer, rate, scale=8.0)
        torchs.step()
    for one, other, first in zip(ours, theirs, before, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=1e-5)
        assert (one.detach() - first).abs().mean() > 3 * rate * 0.1


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_singular_values_come_near_one_and_vectors_stay(shape):
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(stack, full_matrices=False)
    found = orthogonalize(stack.clone(), 5)
    inner = left.mT @ found @ right.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert 0.3 < values.min() < values.max() < 1.3
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=1e-4)


def test_stacked_experts_are_orthogonalized_one_by_one():
    generator = torch.Generator().manual_seed(2)
    values, gradient = (torch.randn(3, 16, 24, generator=generator) for _ in range(2))
    optim = OptimSection(name="muon", muon_precision="fp32")
    stacked = torch.nn.Parameter(values.clone())
    apart = [torch.nn.Parameter(each.clone()) for each in values]
    both = [Optimizer([shard(stacked)], optim, False), Optimizer([shard(each) for each in apart], optim, False)]
    for _ in range(2):
        stacked.grad = gradient.clone()
        for parameter, each in zip(apart, gradient, strict=True):
            parameter.grad = each.clone()
        for optimizer in both:
            step(optimizer, 0.1)
    torch.testing.assert_close(stacked.detach(), torch.stack([each.detach() for each in apart]))


def test_all_but_weight_matrices_of_layers_follow_adamw_at_its_own_rate():
    generator = torch.Generator().manual_seed(3)
    matrix, table, norm = (
        torch.nn.Parameter(torch.randn(*size, generator=generator)) for size in ((8, 8), (9, 8), (8,))
    )
    theirs = [torch.nn.Parameter(each.detach().clone()) for each in (table, norm)]
    optim = OptimSection(name="muon", learning_rate=0.02, adamw_learning_rate=1e-3, weight_decay=0.1)
    shards = [shard(matrix), shard(table, "embed.weight", False), shard(norm, "norm.weight", False)]
    optimizer = Optimizer(shards, optim, on_host=False)
    groups = [{"params": [theirs[0]], "weight_decay": 0.1}, {"params": [theirs[1]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(5):
        for parameter in (matrix, table, norm):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for parameter, own in zip(theirs, (table, norm), strict=True):
            parameter.grad = own.grad.clone()
        step(optimizer, 0.01)  # half of the recipe's: the schedule changes both rates alike
        adamw.step()
    for own, parameter in zip((table, norm), theirs, strict=True):
        torch.testing.assert_close(own.detach(), parameter.detach())
    names = {name.rpartition(".")[2] for name in optimizer.state_shards(True, lambda _: True) if "mlp.up" in name}
    assert names == {"momentum"}


def test_the_blocks_of_a_model_decide_which_parameters_are_matrices(in_workplace):
    family = "{family='qwen3-moe', layers=2, hidden=32, heads=4, kv_heads=2, head_dim=16, vocab=97, experts=4, "
    family += "experts_per_token=2, ffn=24, expert_ffn=8, shared_ffn=16, dense_layers=[1], router_bias_rate=0.01}"
    recipe = load_recipe("tiny.toml", ["optim.name=muon", f"model={family}"])
    engine = Engine(recipe, alone(), torch.device("cpu"), Extension(), None)
    named = {part.name: part.is_matrix for part in engine.param_shards}
    matrices = {name.split(".", 2)[2] for name, is_matrix in named.items() if is_matrix}
    attention = {f"attention.{name}.weight" for name in ("query", "key", "value", "output")}
    mlps = {f"mlp.{kind}{name}.weight" for kind in ("", "experts.", "shared.") for name in ("gate", "up", "down")}
    assert matrices == attention | mlps
    assert not any(named[name] for name in ("embed.weight", "head.weight", "layers.0.mlp.router.weight"))


def test_offload_is_refused():
    with pytest.raises(UserError, match=r"optim.offload.*muon"):
        load_recipe("gpt2-small", ["optim.name=muon", "optim.offload=true"])


@pytest.mark.gpu
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_kernels_do_what_plain_torch_does(nesterov, writes):
    pytest.importorskip("triton")
    from steelyard.training.optimizers import muon_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(4)
    first = [torch.randn(5001, generator=generator).to(device) for _ in range(3)]
    results = []
    for module in (muon_elementwise, muon_kernel):
        gradient, momentum, parameter = (each.clone() for each in first)
        outs = []
        for found in (0.0, 1.0, 0.0):
            out = torch.empty(5001, dtype=torch.bfloat16, device=device) if writes else None
            scaled = gradient * (torch.inf if found else 8.0)
            flag = torch.tensor(found, device=device)
            module.add_gradient(scaled, momentum, out, torch.tensor(8.0, device=device), flag, 0.9, nesterov)
            update = momentum.bfloat16() if out is None else out
            assert update.isfinite().all()
            module.apply_update(parameter, update, flag, 0.99, 0.1)
            outs.append(update.float())
        results.append([momentum, parameter, *outs])
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-2, atol=1e-2 if plain is not results[0][0] else 1e-6)
