"""Kernels of inference against the plain versions: on a GPU where there is one, otherwise interpreted."""

import pytest
import torch

from steelyard.core.recipe.blocks import Rope
from steelyard.model.attention import KeysUpTo, Scoring, attend_one
from steelyard.model.mlp import gated
from steelyard.model.modules import RmsNorm
from steelyard.model.rope import apply_rope, rope_cos_sin

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def _seed():
    GENERATOR.manual_seed(0)


def random(*size, dtype):
    return torch.randn(*size, generator=GENERATOR).to(DEVICE, dtype)


def assert_close(found, expected):
    small = 2e-2 if expected.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=small, atol=small)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_offset", [False, True])
def test_the_norm(dtype, is_offset):
    from steelyard.model import inference_kernels

    norm = RmsNorm(192, 1e-5, is_offset).to(DEVICE).requires_grad_(False)
    scale = norm.offset if is_offset else norm.weight
    scale.copy_(random(192, dtype=torch.float32))
    x = random(2, 3, 192, dtype=dtype)
    assert_close(inference_kernels.rms_norm(x, scale, 1e-5, is_offset), norm(x))
    branch = random(2, 3, 192, dtype=dtype)
    total, normalized = inference_kernels.add_rms_norm(x, branch, scale, 1e-5, is_offset)
    assert_close(total, x + branch)
    assert_close(normalized, norm(x + branch))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_activations_of_two_tensors_and_of_the_halves_of_one(dtype, activation):
    from steelyard.model import inference_kernels

    both = random(2, 3, 2 * 1100, dtype=dtype)
    gate, up = both.chunk(2, dim=-1)
    expected = gated(gate, up, activation)
    assert_close(inference_kernels.gated(gate, up, activation), expected)
    assert_close(inference_kernels.gated(gate.contiguous(), up.contiguous(), activation), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [3, 12])
@pytest.mark.parametrize("turning", [16, 24])
def test_rotary_positions_of_all_or_a_part_of_each_head(dtype, heads, turning):
    from steelyard.model import inference_kernels

    x = random(2, 5, heads, 24, dtype=dtype).transpose(1, 2)
    for positions in (torch.arange(3, 8)[None], torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])):
        cosine, sine = rope_cos_sin(Rope(width=turning, theta=10000.0), positions.to(DEVICE))
        assert_close(inference_kernels.rotated(x, cosine, sine), apply_rope(x, (cosine, sine)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (12, 4), (9, 3)])
def test_a_token_is_rotated_into_the_cache(dtype, heads, kv_heads):
    from steelyard.model import inference_kernels

    query, key, value = random(2, 1, heads + 2 * kv_heads, 24, dtype=dtype).transpose(1, 2).split(
        [heads, kv_heads, kv_heads], dim=1
    )  # fmt: skip
    buffers = [random(2, kv_heads, 40, 24, dtype=dtype) for _ in range(2)]
    expected = [buffer.clone() for buffer in buffers]
    place = torch.tensor([17], device=DEVICE)
    rotation = rope_cos_sin(Rope(width=16, theta=10000.0), place[None])
    expected[0][:, :, 17], expected[1][:, :, 17] = apply_rope(key, rotation)[:, :, 0], value[:, :, 0]
    turned = inference_kernels.rotated_into_cache(query, key, value, rotation, *buffers, place)
    assert_close(turned, apply_rope(query, rotation))
    for found, wanted in zip(buffers, expected, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", [Scoring(), Scoring(window=100), Scoring(softcap=2.0, scale=0.3)])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "width"), [(2, 1, 1, 16), (1, 6, 2, 24), (1, 40, 2, 64)])
def test_attention_of_one_query_reads_the_keys_up_to_its_place(
    dtype, scoring, batch, heads, kv_heads, width, monkeypatch
):
    from steelyard.model import inference_kernels

    monkeypatch.setattr(inference_kernels, "MOST_PARTS", 5)  # So that a part takes several steps.
    monkeypatch.setattr(inference_kernels, "_processors", lambda _: 100)
    query = random(batch, heads, 1, width, dtype=dtype)
    key, value = (random(batch, kv_heads, 640, width, dtype=dtype)[:, :, :320] for _ in range(2))
    for place in (0, 31, 32, 201, 319):  # Each leaves the counters as zeros for the next.
        where = torch.tensor([place], device=DEVICE)
        expected = attend_one(query, key, value, KeysUpTo(where), scoring)
        assert_close(inference_kernels.attend_one(query, key, value, where, *scoring), expected)
