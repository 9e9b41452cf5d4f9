"""Attention with sliding windows and soft caps: masks by their definition, and the GPU's kernels against the CPU."""

import pytest
import torch

from steelyard.model.attention import CuSeqlens, Scoring, attend, causal_window_mask
from steelyard.model.windowed_attention import BLOCK, _blocks

HEADS, KV_HEADS, LENGTH, WIDTH = 4, 2, 384, 64
DOCUMENTS = [0, 100, 384, 500, 768]
CASES = {
    "window": (Scoring(window=50), False),
    "window, documents": (Scoring(window=50, scale=0.1), True),
    "softcap": (Scoring(softcap=5.0), False),
    "softcap, window": (Scoring(50, 5.0, 0.2), False),
    "softcap, window, documents": (Scoring(50, 5.0, 0.2), True),
}


def inputs(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, heads, LENGTH, WIDTH, generator=generator).to(device, dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def documents(has_documents, device="cpu"):
    return CuSeqlens(torch.tensor(DOCUMENTS, dtype=torch.int32, device=device), 512) if has_documents else None


def test_a_token_attends_to_itself_and_the_tokens_before_it_in_the_window():
    seen = [[key for key in range(6) if row[key]] for row in causal_window_mask(4, 6, 3, torch.device("cpu"))]
    assert seen == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_a_window_over_all_tokens_and_a_large_cap_are_plain_attention():
    query, key, value = inputs()
    plain = attend(query, key, value, None)
    assert torch.equal(attend(query, key, value, None, Scoring(window=LENGTH)), plain)
    torch.testing.assert_close(attend(query, key, value, None, Scoring(softcap=1e4)), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["window", "softcap, window"])
def test_tokens_outside_the_window_change_nothing(name):
    query, key, value = inputs()
    scoring, _ = CASES[name]
    before = attend(query, key, value, None, scoring)
    with torch.no_grad():
        key[:, :, :100] = 7.0
        value[:, :, :100] = -7.0
    after = attend(query, key, value, None, scoring)
    assert torch.equal(before[:, :, 149:], after[:, :, 149:])
    assert not torch.equal(before[:, :, 148], after[:, :, 148])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("last", [1, 130, 256])
@pytest.mark.parametrize("name", ["window", "softcap", "softcap, window"])
def test_a_gpu_computes_the_last_tokens(name, last):
    """As context parallelism and a prompt that continues a cache need it."""
    scoring, _ = CASES[name]
    (query, key, value), reference = inputs("cuda", torch.bfloat16), inputs()
    output = attend(query[:, :, -last:], key, value, None, scoring)
    expected = attend(*reference, None, scoring)[:, :, -last:]
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(gradient.to("cuda", torch.bfloat16))
    expected.backward(gradient)
    pairs = [(output, expected), *((a.grad, b.grad) for a, b in zip((query, key, value), reference, strict=True))]
    for found, wanted in pairs:
        assert (found.float().cpu() - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.parametrize("window", [3, 200, 384])
@pytest.mark.parametrize("last", [1, 128, 130, 256, 384])
def test_the_blocks_of_keys_cover_the_window(last, window):
    blocks = _blocks(last, LENGTH, window, torch.device("cpu"), lambda b, h, q, k: k <= q)
    near = causal_window_mask(last, LENGTH, window, torch.device("cpu"))
    for number, (count, indices) in enumerate(zip(blocks.kv_num_blocks[0, 0], blocks.kv_indices[0, 0], strict=True)):
        reached = near[BLOCK * number : BLOCK * (number + 1)].any(0).nonzero().flatten() // BLOCK
        assert indices[:count].tolist() == reached.unique().tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_what_a_cpu_computes(name, compiled):
    scoring, has_documents = CASES[name]
    ours, reference = inputs("cuda", torch.bfloat16), inputs()
    compute = torch.compile(attend) if compiled else attend
    output = compute(*ours, documents(has_documents, "cuda"), scoring)
    expected = attend(*reference, documents(has_documents), scoring)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(gradient.to("cuda", torch.bfloat16))
    expected.backward(gradient)
    pairs = [(output, expected), *((a.grad, b.grad) for a, b in zip(ours, reference, strict=True))]
    for found, wanted in pairs:
        assert (found.float().cpu() - wanted).abs().max() < 0.02 * wanted.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scoring", [Scoring(window=512), Scoring(512, 30.0)])
def test_a_gpu_holds_no_dense_scores(scoring):
    length = 8192
    query, key, value = (torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 4, 4))
    torch.compile(attend)(query, key, value, None, scoring)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(query, key, value, None, scoring)
    assert torch.cuda.max_memory_allocated() - before < length * length
