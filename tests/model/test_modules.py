"""Products of weights in fp32 with a stream in 16 bits, and the one matrix that is embedding and head."""

import pytest
import torch
from torch.nn import functional as F

from steelyard import model as models
from steelyard.core.recipe import load_recipe
from steelyard.model import modules
from steelyard.parallel.fsdp import materialize
from steelyard.parallel.mesh import alone


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="products into fp32 are a GPU's")
@pytest.mark.parametrize("biased", [False, True])
def test_compiled_gradients_of_weights_are_summed_in_fp32_and_not_rounded(biased):
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4, 256, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(96, 64, device="cuda", generator=generator).requires_grad_()
    bias = torch.randn(96, device="cuda", generator=generator).requires_grad_() if biased else None
    grad = torch.randn(4, 256, 96, device="cuda", generator=generator).bfloat16()
    wanted_of = (x, weight, bias) if biased else (x, weight)
    y = torch.compile(modules.product)(x, weight, bias)
    plain = F.linear(x, weight.bfloat16(), None if bias is None else bias.bfloat16())
    torch.testing.assert_close(y, plain)
    found, rounded = torch.autograd.grad(y, wanted_of, grad), torch.autograd.grad(plain, wanted_of, grad)
    torch.testing.assert_close(found[0], rounded[0])
    rows = grad.flatten(0, 1).double()
    exact = [rows.t() @ x.flatten(0, 1).double(), rows.sum(dim=0)]
    for ours, theirs, sum_ in zip(found[1:], rounded[1:], exact, strict=False):
        assert ours.dtype == torch.float32
        assert (ours - sum_).abs().mean() < 0.1 * (theirs - sum_).abs().mean()


def test_a_tied_matrix_gets_the_gradients_of_both_its_uses():
    shape = load_recipe("smollm2-135m", ["model.layers=1", "model.hidden=32", "model.heads=2", "model.kv_heads=2",
                                  "model.ffn=64", "model.vocab=97"]).model  # fmt: skip
    with torch.device("meta"):
        model = models.build(shape)
    materialize(model, torch.device("cpu"), alone(), 0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    tokens, labels = torch.randint(0, 97, (2, 2, 16), generator=generator)
    found = {}
    assert model.embed.sparse
    for is_sparse in (True, False):
        model.embed.sparse = is_sparse
        for _ in range(2):  # Micro-batches add up.
            model(models.Batch(tokens, labels)).sum().backward()
        found[is_sparse] = model.embed.weight.grad
        model.zero_grad()
    assert not found[True].is_sparse
    torch.testing.assert_close(found[True], found[False])
