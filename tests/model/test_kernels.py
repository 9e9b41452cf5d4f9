"""Triton kernels against what they replace: on a GPU where there is one, otherwise interpreted."""

import pytest
import torch

from steelyard.model import quantization
from steelyard.model.loss import VocabHead, cross_entropy
from steelyard.model.quantization import ShardExtent, quantize, shard_of

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, WIDTH = 4990, 5000  # more than a block, and not a multiple of one


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_cross_entropy_is_the_plain_one(dtype, weighted):
    from steelyard.model.cross_entropy_kernel import fused_cross_entropy

    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(9, WIDTH, generator=generator)).to(DEVICE, dtype)
    labels = torch.randint(0, VOCAB, (9,), generator=generator).to(DEVICE)
    labels[0] = VOCAB - 1
    weights = torch.rand(9, generator=generator).to(DEVICE) if weighted else None
    losses, gradient = cross_entropy(logits.clone(), labels, weights, VOCAB, VocabHead())
    fused_losses, fused_gradient = fused_cross_entropy(logits, labels, weights, VOCAB)
    torch.testing.assert_close(fused_losses, losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fused_gradient, gradient, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    assert not fused_gradient[:, VOCAB:].any()
    assert fused_gradient.data_ptr() == logits.data_ptr()


def test_without_a_gradient_the_losses_are_the_same_and_logits_stay():
    from steelyard.model.cross_entropy_kernel import fused_cross_entropy

    logits = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    labels = torch.arange(5, device=DEVICE)
    kept = logits.clone()
    losses, _ = fused_cross_entropy(logits, labels, None, VOCAB, with_gradient=False)
    assert torch.equal(logits, kept)
    torch.testing.assert_close(losses, fused_cross_entropy(logits, labels, None, VOCAB)[0])


@pytest.mark.parametrize(
    "here", [ShardExtent(0, 0, 6, 2400, 2400), ShardExtent(3, 0, 3, 2400, 2400), ShardExtent(0, 1200, 6, 1200, 2400)]
)
@pytest.mark.parametrize(("precision", "double"), [("nf4", False), ("nf4", True), ("int8", False)])
def test_the_kernels_dequantize_to_the_same_bits(precision, double, here):
    from steelyard.model import dequant_kernel

    weight = torch.randn(6, 2400, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    shard = shard_of(quantize(weight, precision, double), here)
    # Interpreted kernels truncate to bf16 instead of rounding.
    for dtype in (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,):
        expected = quantization.dequantize(shard, here, dtype)
        assert torch.equal(dequant_kernel.dequantize(shard, here, dtype), expected)
