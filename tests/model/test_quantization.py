"""NF4 and int8: against the published definition computed here by other means, and against bitsandbytes itself."""

import math

import pytest
import torch

from steelyard.model.modules import Linear
from steelyard.model.quantization import (
    NF4_VALUES,
    ShardExtent,
    absmax_values,
    dequantize,
    nf4_values,
    quantize,
    shard_of,
)
from steelyard.model.quantized_weight import quantize_layers

CPU = torch.device("cpu")
NF4_VALUES_FP32 = torch.tensor(NF4_VALUES, dtype=torch.float32)
STORED = [("nf4", False), ("nf4", True), ("int8", False)]


def matrix(rows, columns, dtype=torch.float32):
    weight = 0.03 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    weight[1] = 0
    return weight.to(dtype)


def whole(rows, columns):
    return ShardExtent(0, 0, rows, columns, columns)


def quantiles():
    """NF4 as its paper defines it: quantiles of a normal distribution: 7 negative, zero, 8 positive."""
    normal = torch.distributions.Normal(0.0, 1.0)
    outermost = 0.9677083  # the mean of 1 - 1 / 32 and 1 - 1 / 30, as published
    positive = normal.icdf(torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -normal.icdf(torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1])
    values = torch.cat([negative, torch.zeros(1, dtype=torch.float64), positive]).sort().values
    return values / values.abs().max()


def test_the_16_values_are_the_quantiles_of_the_definition():
    torch.testing.assert_close(torch.tensor(NF4_VALUES, dtype=torch.float64), quantiles(), atol=2e-7, rtol=0)


def test_nf4_takes_the_nearest_value_of_each_block_of_64_and_packs_the_first_of_two_high():
    weight = matrix(6, 96)  # Blocks end inside rows.
    found = quantize(weight, "nf4")
    dequantized = dequantize(shard_of(found, whole(6, 96)), whole(6, 96), torch.float32).flatten()
    numbers = weight.double().flatten().tolist()
    for block in range(9):
        part = numbers[64 * block : 64 * (block + 1)]
        largest = max(map(abs, part))
        assert found.absmax[block] == largest
        for place, number in enumerate(part):
            byte = int(found.codes[(64 * block + place) // 2])
            code = byte >> 4 if place % 2 == 0 else byte & 15
            distances = [abs(number / largest - value) if largest else abs(value) for value in NF4_VALUES]
            assert distances[code] == pytest.approx(min(distances), abs=1e-7)
            assert dequantized[64 * block + place] == NF4_VALUES_FP32[code] * found.absmax[block]


def test_double_quantization_stores_the_nearest_of_256_values_in_blocks_of_256():
    values = absmax_values(CPU).tolist()
    assert len(set(values)) == 256
    assert (min(values), max(values), 0.0 in values) == (pytest.approx(-0.992968, abs=1e-5), 1.0, True)
    weight = matrix(64, 512)
    plain, double = quantize(weight, "nf4"), quantize(weight, "nf4", double=True)
    assert torch.equal(plain.codes, double.codes)
    assert double.offset == plain.absmax.mean()
    centred = plain.absmax - double.offset
    assert torch.equal(double.scale, centred.view(2, 256).abs().amax(dim=1))
    scales = double.scale.repeat_interleave(256)
    for number, code, scale in zip(centred.tolist(), double.absmax.tolist(), scales, strict=True):
        distances = [abs(number / float(scale) - value) for value in values]
        assert distances[code] == pytest.approx(min(distances), abs=1e-7)


def test_int8_rounds_each_row_over_its_largest_magnitude():
    weight = matrix(5, 40)
    found = quantize(weight, "int8")
    assert torch.equal(found.absmax[:, 0], weight.abs().amax(dim=1))
    expected = [[round(127 * value / (max(map(abs, row)) or 1)) for value in row] for row in weight.double().tolist()]
    assert found.codes.tolist() == expected
    error = (dequantize(found, whole(5, 40), torch.float32) - weight).abs()
    assert (error <= found.absmax / 127 / 2 * 1.0001).all()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_is_that_of_bitsandbytes_bit_for_bit(dtype, double):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    assert torch.equal(nf4_values(CPU), functional.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(absmax_values(CPU), functional.create_dynamic_map())
    for rows, columns in ((96, 128), (576, 1536), (33, 64), (64, 30)):
        weight = matrix(rows, columns, dtype)
        codes, state = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
        if double:  # Its fast kernel for CPUs rounds some of these 8-bit codes to the second nearest value.
            state.offset = state.absmax.mean()
            operator = torch.ops.bitsandbytes.quantize_blockwise.default
            reference = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
            absmax, scale = operator.redispatch(reference, state.absmax - state.offset, absmax_values(CPU), 256)
            state.state2 = functional.QuantState(
                absmax=scale, blocksize=256, code=absmax_values(CPU), dtype=scale.dtype
            )
            state.absmax, state.nested = absmax, True
        ours = quantize(weight, "nf4", double)
        assert torch.equal(ours.codes, codes.flatten())
        assert torch.equal(ours.absmax, state.absmax)
        for out in (torch.float32, torch.bfloat16):
            state.dtype = out
            found = dequantize(shard_of(ours, whole(rows, columns)), whole(rows, columns), out)
            assert torch.equal(found, functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize(("rows", "columns"), [(8, 64), (6, 96), (4, 32), (12, 40)])
@pytest.mark.parametrize(("precision", "double"), STORED)
def test_a_shard_has_the_weights_of_the_whole(precision, double, rows, columns):
    quantized = quantize(matrix(rows, columns), precision, double)
    weight = dequantize(shard_of(quantized, whole(rows, columns)), whole(rows, columns), torch.float32)
    for first_row, first_column in ((0, 0), (rows // 2, 0), (0, columns // 2)):
        here = ShardExtent(first_row, first_column, rows - first_row, columns - first_column, columns)
        shard = shard_of(quantized, here)
        assert torch.equal(dequantize(shard, here, torch.float32), weight[first_row:, first_column:])


@pytest.mark.parametrize(("precision", "double"), STORED)
def test_a_quantized_linear_computes_and_differentiates_with_the_dequantized_matrix(precision, double):
    layers = torch.nn.ModuleList([Linear(96, 48)]).requires_grad_(False)
    linear, plain = layers[0], Linear(96, 48)
    weight = matrix(48, 96)
    quantize_layers(layers, precision, double)
    for name, values in shard_of(quantize(weight, precision, double), linear.weight.extent)._asdict().items():
        if values is not None:
            getattr(linear.weight, name).view(values.dtype).copy_(values)
    plain.weight.data, plain.bias = linear.weight.dequantized(torch.float32), linear.bias
    assert 0 < (plain.weight - weight).abs().max() < weight.abs().max() / (100 if precision == "int8" else 6)
    x = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = [(y := module(x), *torch.autograd.grad(y.square().sum(), x)) for module in (linear, plain)]
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)
    stored = sum(each.numel() * each.element_size() for each in linear.weight.parameters())
    assert math.ceil(stored) < weight.numel() * (1.05 if precision == "int8" else 0.6)
