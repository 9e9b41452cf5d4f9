"""GGUF files as llama.cpp's own package writes them."""

import math

import numpy as np
import pytest
import torch

from steelyard import model
from steelyard.checkpoint.formats import load_into, open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, FFN, VOCAB, THETA = 256, 4, 512, 64, 500_000.0
QUANTS = gguf.GGMLQuantizationType
K_QUANTS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
# Where a block of a K-quant has its fp16 scales: after everything else, or before (Q4_K and Q5_K).
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def quantised(name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Rows of a type: by the package's quantiser, or for K-quants, of which it has none, any blocks at all."""
    random = np.random.default_rng(seed)
    if name not in K_QUANTS:
        return gguf.quantize(random.normal(0, 0.02, (rows, columns)).astype(np.float32), QUANTS[name])
    _, size = gguf.GGML_QUANT_SIZES[QUANTS[name]]
    blocks = random.integers(0, 256, (rows * columns // 256, size), dtype=np.uint8)
    for at in SCALES[name]:
        scales = random.uniform(1e-5, 1e-4, len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


def written(path, name: str, divisors: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """A Llama of one layer whose matrices are all of one type; gives the matrices as `gguf` dequantises them."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_context_length(1024)
    writer.add_vocab_size(VOCAB)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(THETA)
    sizes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "blk.0.ffn_down": (HIDDEN, FFN)}
    sizes |= {f"blk.0.ffn_{part}": (FFN, HIDDEN) for part in ("gate", "up")}
    sizes |= {f"blk.0.attn_{part}": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
    expected = {}
    for seed, (tensor, (rows, columns)) in enumerate(sizes.items()):
        data = quantised(name, rows, columns, seed)
        writer.add_tensor(f"{tensor}.weight", data, raw_dtype=QUANTS[name])
        expected[tensor] = gguf.dequantize(data, QUANTS[name])
    for norm in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{norm}.weight", np.ones(HIDDEN, np.float32))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", *K_QUANTS])
def test_weights_are_those_that_gguf_dequantises(tmp_path, name):
    expected = written(tmp_path / "m.gguf", name)
    source = open_source(tmp_path / "m.gguf")
    assert source.layout["types"] == sorted(["F32", name])
    ours = {"layers.0.mlp.down": "blk.0.ffn_down", "layers.0.mlp.gate": "blk.0.ffn_gate"}
    ours |= {"layers.0.mlp.up": "blk.0.ffn_up", "layers.0.attention.value": "blk.0.attn_v"}
    ours |= {"layers.0.attention.output": "blk.0.attn_output"}
    for mine, theirs in ours.items():
        np.testing.assert_array_equal(source.tensor(f"{mine}.weight").numpy(), expected[theirs])
        assert np.unique(expected[theirs]).size > 100
    np.testing.assert_array_equal(source.tensor("embed.weight")[:VOCAB].numpy(), expected["token_embd"])
    network = model.build(source.config)
    load_into(source, network)
    with torch.inference_mode():
        assert network(torch.arange(10)[None]).isfinite().all()


def llama3_divisors(factor: float, original: int = 8192, low: float = 1.0, high: float = 4.0) -> np.ndarray:
    """What each frequency is divided by: 1 for waves shorter than original / high, the factor beyond original / low."""
    half = HIDDEN // HEADS // 2
    divisors = []
    for number in range(half):
        turns = original / (2 * math.pi * THETA ** (number / half))
        blend = min(max((turns - low) / (high - low), 0), 1)
        divisors.append(1 / (blend + (1 - blend) / factor))
    return np.array(divisors)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rotary_frequencies_of_llama_3_are_read(tmp_path, factor):
    divisors = llama3_divisors(factor)
    assert ((divisors > 1) & (divisors < factor)).any()
    written(tmp_path / "m.gguf", "Q8_0", divisors)
    source = open_source(tmp_path / "m.gguf")
    assert source.config.rope_scaling.factor == factor
    assert source.config.rope_scaling.original_positions == 8192
    convert(source, tmp_path / "hf", Target("hf"))
    assert open_source(tmp_path / "hf").config.rope_scaling == source.config.rope_scaling


def test_divisors_of_one_leave_the_frequencies_as_they_are(tmp_path):
    written(tmp_path / "m.gguf", "Q8_0", np.ones(HIDDEN // HEADS // 2))
    assert open_source(tmp_path / "m.gguf").config.rope_scaling is None


@pytest.mark.parametrize(
    "divisors",
    [
        llama3_divisors(8.0, original=4096),
        llama3_divisors(8.0)[:-1],
        llama3_divisors(8.0) * math.nan,
        -llama3_divisors(8.0),
        np.linspace(1, 1e30, HIDDEN // HEADS // 2),
    ],
    ids=["another original length", "too few", "nan", "negative", "huge"],
)
def test_other_rotary_frequencies_are_refused(tmp_path, divisors):
    written(tmp_path / "m.gguf", "Q8_0", divisors)
    with pytest.raises(UserError, match=r"the rotary frequencies in rope_freqs\.weight are not"):
        open_source(tmp_path / "m.gguf")
