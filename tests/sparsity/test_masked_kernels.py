"""The kernels of learned masks against their plain twin: on a GPU where there is one, otherwise interpreted."""

import pytest
import torch

from steelyard.model.loss import VocabHead
from steelyard.sparsity import gumbel
from steelyard.sparsity.distillation import token_divergence
from steelyard.sparsity.gumbel import GroupOffset
from steelyard.sparsity.patterns import Pattern

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SALT = gumbel.salt_of(7, "layers.0.mlp.down.weight.mask_logits")


def parts(pattern: str, rows: int, inputs: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    candidates = Pattern.parse(pattern).candidates().to(DEVICE)
    weight = torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)
    logits = (0.01 * torch.randn(rows, inputs // 4, len(candidates), generator=generator)).to(DEVICE)
    gradient = torch.randn(rows, inputs, generator=generator).to(DEVICE, dtype)
    return candidates, weight, logits, gradient


def both_ways(function, candidates, weight, logits, gradient, anneal, offset, hard, draw=12345):
    draw = gumbel.draw_of(torch.tensor([draw], device=DEVICE))
    logits = logits.clone().requires_grad_()
    product = function(weight, logits, candidates, draw, torch.tensor(anneal, device=DEVICE), SALT, offset, hard)
    product.backward(gradient)
    return product.detach(), logits.grad


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("pattern", ["2:4", "1:4"])
@pytest.mark.parametrize(("anneal"), [(100.0, 4.0, 1e-2), (500.0, 0.05, 0.0)])
def test_the_kernels_mask_and_differentiate_as_the_plain_functions_do(pattern, hard, anneal):
    from steelyard.sparsity import masked_kernels

    given = parts(pattern, 6, 344)  # 258 pairs of groups: more than a block, and not a multiple of one
    offset = GroupOffset(0, 0, 86)
    product, gradient = both_ways(gumbel.masked_weight, *given, anneal, offset, hard)
    fused_product, fused_gradient = both_ways(masked_kernels.masked_weight, *given, anneal, offset, hard)
    torch.testing.assert_close(fused_product, product, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused_gradient, gradient, rtol=1e-4, atol=1e-3 * gradient.abs().max().item())
    assert gradient.any()


def test_in_bf16_the_kernels_round_only_what_they_write():
    from steelyard.sparsity import masked_kernels

    given = parts("2:4", 4, 64, torch.bfloat16)
    anneal, offset = (100.0, 2.0, 1e-3), GroupOffset(0, 0, 16)
    product, gradient = both_ways(gumbel.masked_weight, *given, anneal, offset, False)
    fused_product, fused_gradient = both_ways(masked_kernels.masked_weight, *given, anneal, offset, False)
    assert fused_product.dtype == torch.bfloat16
    torch.testing.assert_close(fused_product, product, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(fused_gradient, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_a_part_of_a_weight_draws_what_the_whole_draws_there(cut):
    from steelyard.sparsity import masked_kernels

    candidates, weight, logits, gradient = parts("2:4", 8, 64)
    anneal = (100.0, 4.0, 0.0)
    whole, of_whole = both_ways(
        masked_kernels.masked_weight, candidates, weight, logits, gradient, anneal, GroupOffset(0, 0, 16), False
    )
    rows, columns, groups = (slice(4, 8), slice(None), slice(None)) if cut == "rows" else (
        slice(None), slice(24, 64), slice(6, 16))  # fmt: skip
    offset = GroupOffset(4, 0, 16) if cut == "rows" else GroupOffset(0, 6, 16)
    part, of_part = both_ways(
        masked_kernels.masked_weight, candidates, weight[rows, columns].contiguous(), logits[rows, groups].contiguous(),
        gradient[rows, columns].contiguous(), anneal, offset, False,
    )  # fmt: skip
    assert torch.equal(part, whole[rows, columns])
    assert torch.equal(of_part, of_whole[rows, groups])
    assert not torch.equal(part, both_ways(
        masked_kernels.masked_weight, candidates, weight[rows, columns].contiguous(), logits[rows, groups].contiguous(),
        gradient[rows, columns].contiguous(), anneal, GroupOffset(0, 0, 16), False,
    )[0])  # fmt: skip


def test_another_micro_batch_draws_other_noise_without_a_new_kernel():
    from steelyard.sparsity import masked_kernels

    given, anneal, offset = parts("2:4", 4, 64), (100.0, 4.0, 0.0), GroupOffset(0, 0, 16)
    first, _ = both_ways(masked_kernels.masked_weight, *given, anneal, offset, False, draw=1)
    again, _ = both_ways(masked_kernels.masked_weight, *given, anneal, offset, False, draw=1)
    second, _ = both_ways(masked_kernels.masked_weight, *given, anneal, offset, False, draw=2)
    assert torch.equal(first, again)
    assert not torch.isclose(first, second).all()


def test_between_the_passes_only_the_product_is_kept():
    from steelyard.sparsity import masked_kernels

    candidates, weight, logits, _ = parts("2:4", 64, 64, torch.bfloat16)
    logits.requires_grad_()
    kept: list[torch.Tensor] = []
    draw, anneal = gumbel.draw_of(torch.tensor([3], device=DEVICE)), torch.tensor([1e2, 4.0, 0.0], device=DEVICE)
    x = torch.randn(2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        product = masked_kernels.masked_weight(
            weight, logits, candidates, draw, anneal, SALT, GroupOffset(0, 0, 16), False
        )
        torch.nn.functional.linear(x, product)
    known = {tensor.untyped_storage().data_ptr() for tensor in (weight, logits, x)}
    others = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    assert sum(size for offset, size in others.items() if offset not in known) <= 2.5 * weight.numel()


def test_a_compiled_layer_computed_again_learns_the_same():
    from torch.utils.checkpoint import checkpoint

    from steelyard.sparsity import masked_kernels

    candidates, weight, logits, _ = parts("2:4", 8, 16)
    draw, anneal = gumbel.draw_of(torch.tensor([3], device=DEVICE)), torch.tensor([1e2, 4.0, 1e-3], device=DEVICE)

    def layer(x, logits):
        product = masked_kernels.masked_weight(
            weight, logits, candidates, draw, anneal, SALT, GroupOffset(0, 0, 4), False
        )
        return torch.nn.functional.silu(torch.nn.functional.linear(x, product))

    x = torch.randn(5, 16, device=DEVICE)
    gradients = []
    compiled = torch.compile(lambda x, logits: checkpoint(layer, x, logits, use_reentrant=False), backend="aot_eager")
    for function in (layer, compiled):
        mine = logits.clone().requires_grad_()
        function(x, mine).square().sum().backward()
        gradients.append(mine.grad)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_divergence_is_the_plain_one(dtype, temperature):
    from steelyard.sparsity.divergence_kernel import fused_divergence

    vocab, width = 4990, 5000  # more than a block, and not a multiple of one
    generator = torch.Generator().manual_seed(0)
    logits, dense = (3 * torch.randn(2, 7, width, generator=generator)).to(DEVICE, dtype)
    divergence, gradient = token_divergence(logits, dense, vocab, temperature, VocabHead())
    fused, fused_gradient = fused_divergence(logits, dense, vocab, temperature)
    torch.testing.assert_close(fused, divergence, rtol=1e-4, atol=1e-5)
    rounding = {"rtol": 1e-2, "atol": 1e-4} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(fused_gradient.float(), gradient, **rounding)
    assert fused_gradient.data_ptr() == logits.data_ptr()
    assert not fused_gradient[:, vocab:].any()
