"""Products with compressed 2:4 matrices against dense ones: on a GPU where there is one, otherwise interpreted."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch

from steelyard.checkpoint.formats.compressed_tensors import compress, expanded
from steelyard.checkpoint.formats.row_scales import quantized
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.semi_structured import dense, packed

pytestmark = pytest.mark.gpu
tl = pytest.importorskip("triton.language")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def matrix(outputs, inputs, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    mask = Pattern.parse("2:4").keep_best(torch.rand(outputs, inputs, generator=generator))
    return (weight * mask).to(DEVICE, dtype)


def compressed(weight):
    return packed(*compress(weight))


def eight_bit(weight, kind):
    values, indices = compress(weight)
    values, scales = quantized(values, kind)
    return packed(values, indices, scales)


@pytest.mark.parametrize("inputs", [8, 12, 1024, 1028])
def test_a_compressed_matrix_is_nine_sixteenths_and_comes_back_to_the_bit(inputs):
    weight = matrix(5, inputs)
    weight[1, :4] = 0  # fewer weights than could stay
    weight[2, :4] = torch.tensor([0, 0, 0, 2.0])
    values, indices = compress(weight)
    assert torch.equal(expanded(values, indices), weight)
    if inputs % 8 == 0:
        size = values.numel() * values.element_size() + indices.numel()
        assert size == weight.numel() * weight.element_size() * 9 // 16


def test_the_words_of_a_gpus_kernels_hold_the_same_matrix():
    for inputs in (12, 1024, 1100):
        weight = matrix(3, inputs)
        assert torch.equal(dense(compressed(weight)), weight)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 1024), (7, 12), (33, 1028), (20, 2304)])
def test_a_kernel_gives_the_dense_matrix_back(outputs, inputs):
    from steelyard.sparsity import sparse_gemv

    weight = matrix(outputs, inputs)
    assert torch.equal(sparse_gemv.expand(compressed(weight)), weight)


# Whole blocks, less than one, more than two, and rows that fill no program.
SHAPES = [(32, 2048), (20, 1024), (5, 12), (17, 2308)]
KINDS = [(*shape, torch.bfloat16) for shape in SHAPES] + [(17, 1028, torch.float16)]


@pytest.mark.parametrize(("outputs", "inputs", "dtype"), KINDS)
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_few_rows_are_multiplied_as_the_dense_matrix_does(rows, outputs, inputs, dtype):
    from steelyard.sparsity import sparse_gemv

    weight = matrix(outputs, inputs, dtype)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    y = sparse_gemv.few_rows(x, compressed(weight), sparse_gemv.VECTORS[0] if rows == 1 else sparse_gemv.TILES[0])
    assert y.dtype == dtype
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=0.02 * expected.std().item())


@pytest.mark.parametrize(("rows", "kind"), [(1, "VECTORS"), (3, "TILES")])
def test_inputs_divided_among_programs_add_up_to_the_whole_every_time(rows, kind):
    from steelyard.sparsity import sparse_gemv

    weight = matrix(16, 3 * 1024)
    x = torch.randn(rows, 3 * 1024, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    way = replace(getattr(sparse_gemv, kind)[0], parts=2)
    first, second = (sparse_gemv.few_rows(x, compressed(weight), way) for _ in range(2))
    assert torch.equal(first, second)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(first.double(), expected, rtol=1e-2, atol=0.02 * expected.std().item())


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 5])
def test_every_way_gives_the_same_product(rows):
    from steelyard.sparsity import sparse_gemv

    for outputs, inputs in ((40, 1024), (9, 1500)):  # Blocks, programs and parts come out even, and not.
        weight = matrix(outputs, inputs)
        x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
        expected = x.double() @ weight.double().t()
        for form in sparse_gemv.VECTORS if rows == 1 else sparse_gemv.TILES:
            for parts in (1, 2):
                y = sparse_gemv.few_rows(x, compressed(weight), replace(form, parts=parts))
                torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=0.02 * expected.std().item())


@pytest.mark.parametrize(("kind", "dtype"), [("int8", torch.bfloat16), ("fp8", torch.bfloat16), ("fp8", torch.float16)])
def test_8_bit_values_are_decoded_and_scaled(kind, dtype):
    from steelyard.sparsity import sparse_gemv

    weight = matrix(9, 524) * torch.logspace(-3, 3, 9)[:, None].to(DEVICE)  # Each row has its own scale.
    held = eight_bit(weight, kind)
    torch.testing.assert_close(sparse_gemv.expand(held, dtype).float(), dense(held), rtol=2**-7, atol=1e-4)
    for rows, way in ((1, sparse_gemv.VECTORS[0]), (3, replace(sparse_gemv.TILES[0], parts=2))):
        x = torch.randn(rows, 524, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
        y = sparse_gemv.few_rows(x, held, way).double() / held.scales  # Rows of one magnitude, so that each one counts.
        expected = x.double() @ dense(held).double().t() / held.scales
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=0.02 * expected.std().item())


def test_every_8_bit_code_is_decoded_exactly():
    from steelyard.sparsity import sparse_gemv

    codes = torch.arange(256, dtype=torch.int16, device=DEVICE).to(torch.uint8)
    numbers = codes[(codes & 127) != 127]  # The other two codes of e4m3 are NaN.
    for each, dtype in ((codes, torch.int8), (numbers, torch.float8_e4m3fn)):
        values = torch.stack([each, each.flip(0)], 1).view(dtype)  # one group per row, both bytes of its word
        indices = torch.full((len(each), 1), 0b1001, dtype=torch.uint8, device=DEVICE)
        held = packed(values, indices, torch.ones(len(each), device=DEVICE))
        assert torch.equal(sparse_gemv.expand(held, torch.bfloat16).float(), dense(held)), dtype


def test_ways_divide_the_inputs_where_rows_are_too_few_and_not_where_they_are_many():
    from steelyard.sparsity import sparse_gemv
    from steelyard.sparsity.semi_structured import Packed

    def parts(outputs, inputs, rows):
        held = Packed(
            torch.empty(outputs, inputs // 2, device="meta"), torch.empty(outputs, inputs // 32, device="meta")
        )
        return {way.parts for way in sparse_gemv.configs(rows, held) if way.rows == 64}

    assert parts(4096, 14336, 16) == {2, 4, 7}
    assert parts(14336, 4096, 16) == {1, 2, 4}
    assert parts(64, 512, 16) == {1}


# Triton's interpreter knows no assembler. In its place stands what the PTX ISA says of the two instructions, thread by
# thread; on a GPU they are the hardware's.
def loaded(address):
    """`ld.global.v4`: four words from each thread's address."""
    return _words(address, 4)


def _words(address, count):
    raw = np.array([(ctypes.c_int32 * count).from_address(int(at)) for at in address.handle.data])
    return tuple(_vector(raw[:, number].copy(), tl.int32, address) for number in range(count))


def multiplied(*operands):
    """`mma.sp` m16n8k32 for each warp: 16 rows with two of every four weights, 8 rows of inputs."""
    *vectors, late, _ = operands
    totals, weights, inputs, (places,) = vectors[:4], vectors[4:8], vectors[8:12], vectors[12:]
    result = [total.handle.data.copy() for total in totals]
    for warp in range(len(result[0]) // 32):
        threads = slice(32 * warp, 32 * (warp + 1))
        matrix, right = np.zeros((16, 32)), np.zeros((32, 8))
        for thread in range(32):
            g, q = divmod(thread, 4)
            for number in range(4):
                row, slot = g + 8 * (number % 2), q + 4 * (number // 2)
                holder = 4 * g + 2 * late + slot // 4
                nibble = int(places.handle.data[threads][holder]) >> (16 * (number % 2) + 4 * (slot % 4)) & 15
                assert nibble & 3 < nibble >> 2, "places must go up"
                for place, weight in zip(
                    (nibble & 3, nibble >> 2), _two(weights[number], threads, thread), strict=True
                ):
                    matrix[row, 4 * slot + place] = weight
                right[8 * number + 2 * q : 8 * number + 2 * q + 2, g] = _two(inputs[number], threads, thread)
        product = matrix @ right
        for thread in range(32):
            g, q = divmod(thread, 4)
            for number in range(4):
                result[number][threads][thread] += product[g + 8 * (number // 2), 2 * q + number % 2]
    return tuple(_vector(each, tl.float32, places) for each in result)


def _two(words, threads, thread):
    word = torch.tensor([int(words.handle.data[threads][thread])], dtype=torch.int32)
    return word.view(torch.bfloat16).double().numpy()


def _vector(numbers, dtype, like):
    from triton.runtime.interpreter import TensorHandle

    return tl.core.tensor(TensorHandle(numbers, dtype), tl.core.block_type(dtype, like.type.shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "form", "kind"),
    [
        (2, 16, 1024, (1, 1, 2), None),
        (8, 32, 512, (2, 1, 1), None),
        (3, 64, 512, (2, 2, 1), None),
        (11, 32, 512, (2, 1, 2), None),
        (16, 32, 1024, (1, 2, 1, 4), None),
        (5, 32, 1536, (1, 1, 2, 3), None),
        (3, 32, 512, (2, 1, 1), "int8"),
        (9, 16, 1024, (1, 1, 2, 2), "fp8"),
    ],
)
def test_the_instruction_for_sparse_matrices_is_given_what_it_wants(monkeypatch, rows, outputs, inputs, form, kind):
    from steelyard.sparsity import sparse_mma

    if DEVICE == "cpu":
        monkeypatch.setattr(sparse_mma, "_four", loaded)
        monkeypatch.setattr(sparse_mma, "_four_once", loaded)
        monkeypatch.setattr(sparse_mma, "_multiply", multiplied)
    weight = matrix(outputs, inputs)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    held = compressed(weight) if kind is None else eight_bit(weight, kind)
    for _ in range(2):  # Counters are at zero again after the first.
        y = sparse_mma.few_rows(x, held, sparse_mma.MmaConfig(*form))
        expected = x.double() @ dense(held).double().t()
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=0.02 * expected.std().item())


def test_tiles_are_tried_too_where_no_form_divides_a_matrix_well(monkeypatch):
    from steelyard.sparsity import sparse_gemv, sparse_mma
    from steelyard.sparsity.semi_structured import Packed

    monkeypatch.setattr(sparse_gemv, "_INTERPRETED", False)

    def kinds(outputs, inputs, rows):
        values, words = (
            torch.empty(outputs, inputs // 2, device="meta"),
            torch.empty(outputs, inputs // 32, device="meta"),
        )
        ways = sparse_gemv.configs(rows, Packed(values, words, metadata=words))
        return [sum(isinstance(way, kind) for way in ways) for kind in (sparse_mma.MmaConfig, sparse_gemv.GemvConfig)]

    assert kinds(14336, 4096, 8) == [6, 1]  # The one is for GPUs without the instruction.
    few, many = kinds(3584, 18944, 8)
    assert 0 < few <= 6 < many
    assert kinds(14336, 4096, 1)[1] > 1


def test_the_tensor_cores_are_given_forms_that_divide_a_matrix_evenly():
    from steelyard.sparsity import sparse_mma
    from steelyard.sparsity.semi_structured import Packed

    def found(outputs, inputs):
        return sparse_mma.configs(
            Packed(torch.empty(outputs, inputs // 2, device="meta"), torch.empty(0, device="meta"))
        )

    assert found(14336, 4096)[0] == sparse_mma.MmaConfig(2, 1, 4)
    assert found(4096, 14336)[0] == sparse_mma.MmaConfig(1, 4, 2, parts=4)
    for outputs, inputs in ((16, 512), (48, 1536), (14336, 4096)):
        for form in found(outputs, inputs):
            assert outputs // 16 % (form.tiles * form.across) == 0
            assert inputs // 256 % (form.along * form.parts) == 0
