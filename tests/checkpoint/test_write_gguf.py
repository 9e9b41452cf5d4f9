"""GGUF files that we write: read back by us, by the package `gguf`, by transformers, and run by llama.cpp."""

import json

import gguf
import numpy as np
import pytest
import torch
import transformers

from steelyard import model
from steelyard.checkpoint.formats import load_into, open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.core.recipe.families.gemma import Gemma2Config, Gemma3Config
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.recipe.families.qwen3 import Qwen3Config
from steelyard.core.recipe.rope_scaling import RopeScaling
from steelyard.sparsity.patterns import Pattern
from steelyard.text.tokenizer import SentencePieceOptions, train_byte_bpe, train_sentencepiece
from tests.checkpoint.models import EXPERTS, SHAPES, Held, assert_equal

SIZES = {"vocab": 320, "layers": 6, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
# transformers ignores other sizes of heads in these families.
GEMMA = {**SIZES, "head_dim": 256, "query_scale": 256, "window": 8}
LINEAR = RopeScaling(kind="linear", factor=4.0)
MODELS = {
    "llama": LlamaConfig(family="llama", **SIZES),
    "llama-tied": LlamaConfig(family="llama", tied=True, head_dim=32, **SIZES),
    "llama-3": LlamaConfig(family="llama", rope_theta=500000.0, rope_scaling=RopeScaling(), **SIZES),
    "llama-linear": LlamaConfig(family="llama", rope_scaling=LINEAR, **SIZES),
    "qwen2": LlamaConfig(family="llama", qkv_bias=True, **SIZES),
    "qwen3": Qwen3Config(family="qwen3", head_dim=128, **SIZES),
    "gemma2": Gemma2Config(family="gemma2", **GEMMA),
    "gemma3": Gemma3Config(family="gemma3", **GEMMA),
    "gemma3-linear": Gemma3Config(family="gemma3", rope_scaling=LINEAR, **GEMMA),
}
# transformers ignores the scaled rotary positions of a GGUF file.
IN_TRANSFORMERS = [name for name in MODELS if "linear" not in name and name != "llama-3"]
TEXTS = [
    "It was the best of times, it was the worst of times; 1984 was a year of 365 days.\n\nDon't they'll know?",
    "  Two spaces, a tab\there, café, naïve, 中文, and the end.",
]
PROMPT = [5, 17, 42, 7, 300, 19, 8, 250, 11, 99, 31, 60]


def tokenizer_folder(tmp_path, kind: str):
    folder = tmp_path / kind
    folder.mkdir()
    many = [f"{text} {number}" for number in range(40) for text in TEXTS]
    if kind == "byte-bpe":
        train_byte_bpe(many, 300, ["<|im_end|>"]).save(folder)
    else:
        options = SentencePieceOptions(type=kind, byte_fallback=kind == "bpe", keep_whitespace=True)
        train_sentencepiece(many, 320 if kind == "bpe" else 100, options).save(folder)
    return folder


def written(source, path, **options):
    convert(source, path, Target("gguf", **options))
    return path


def greedy(config, path, prompt, count):
    network, ids = model.build(config), list(prompt)
    load_into(open_source(path), network)
    network.eval()
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_a_written_file_is_read_as_the_same_model(tmp_path, name):
    held = Held(MODELS[name])
    back = open_source(written(held, tmp_path / "m.gguf", dtype=torch.float32))
    if "gemma" not in name:
        assert_equal(held, back)
        return
    assert back.config == held.config
    for each in held.names():  # 1 + a scale is rounded.
        torch.testing.assert_close(back.tensor(each)[:320], held.tensor(each)[:320], rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "qwen2")) for name in IN_TRANSFORMERS]
)
def test_transformers_computes_the_same_logits(tmp_path, name):
    path = written(Held(MODELS[name]), tmp_path / "m.gguf", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = model.build(MODELS[name])
    load_into(open_source(path), ours)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected, found = theirs(ids).logits, ours(ids)[..., :320]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"), [("F16", {}), ("BF16", {"dtype": torch.bfloat16}), ("Q8_0", {"quantization": "Q8_0"})]
)
def test_the_package_reads_the_types_and_zeros_stay_zeros(tmp_path, kind, options):
    held = Held(MODELS["llama"])
    for name, weight in held.parameters.items():
        if name.startswith("layers.") and weight.ndim == 2:
            weight *= Pattern(2, 4).keep_best(weight.abs())
    reader = gguf.GGUFReader(written(held, tmp_path / "m.gguf", **options))
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    down = found["blk.3.ffn_down.weight"]
    assert down.tensor_type.name == kind
    values = gguf.dequantize(down.data, down.tensor_type).reshape(64, 96)
    expected = held.tensor("layers.3.mlp.down.weight").numpy()
    assert ((values != 0) <= (expected != 0)).all()
    assert np.count_nonzero(expected) == expected.size // 2
    np.testing.assert_allclose(values, expected, atol=np.abs(expected).max() / 127)
    settings = {name: field.contents() for name, field in reader.fields.items()}
    assert settings["general.architecture"] == "llama"
    assert settings["llama.rope.freq_base"] == 10000


def test_rows_that_are_no_multiple_of_32_are_fp16(tmp_path, capsys):
    reader = gguf.GGUFReader(written(Held(SHAPES["llama"]), tmp_path / "m.gguf", quantization="Q8_0"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    assert "4 matrices are F16: their rows are no multiple of 32" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe", "unigram"])
def test_the_vocabulary_is_in_the_file(tmp_path, kind):
    folder = tokenizer_folder(tmp_path, kind)
    path = written(Held(MODELS["llama"]), tmp_path / "m.gguf", tokenizer=str(folder))
    settings = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    named = {"byte-bpe": ("gpt2", "gpt-2"), "bpe": ("llama", "default"), "unigram": ("t5", "default")}
    assert (settings["tokenizer.ggml.model"], settings["tokenizer.ggml.pre"]) == named[kind]
    assert len(settings["tokenizer.ggml.tokens"]) == len(settings["tokenizer.ggml.token_type"]) == 320
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = list(vocabulary) if isinstance(vocabulary, dict) else [piece for piece, _ in vocabulary]
    assert set(settings["tokenizer.ggml.tokens"]) >= set(pieces)
    end = settings["tokenizer.ggml.eos_token_id"]
    assert settings["tokenizer.ggml.tokens"][end] == ("<|endoftext|>" if kind == "byte-bpe" else "</s>")
    assert settings["tokenizer.ggml.token_type"][end] == 3
    if kind == "byte-bpe":
        ours, back = open_source(path).load_tokenizer(), transformers.AutoTokenizer.from_pretrained(folder)
        for text in TEXTS:
            assert ours.encode(text) == back.encode(text)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SHAPES["gpt"], "the family gpt"),
        (EXPERTS["mixtral"], "the family mixtral"),
        (MODELS["llama"].model_copy(update={"rope_scaling": RopeScaling(kind="yarn")}), "yarn"),
        (MODELS["qwen3"].model_copy(update={"qkv_bias": True}), "qkv_bias = true"),
        (MODELS["gemma3"].model_copy(update={"query_scale": 24}), r"query_scale = 24 \(llama.cpp computes 256\)"),
        (MODELS["gemma2"].model_copy(update={"full_every": 3}), "full_every = 3"),
        (MODELS["gemma2"].model_copy(update={"logit_softcap": 0.0}), "a softcap of 0"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(tmp_path, config, reason):
    with pytest.raises(UserError, match=f"{reason}.* has no counterpart in GGUF"):
        written(Held(config), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_llama_cpp_would_run_differently_is_refused(tmp_path):
    folder = tokenizer_folder(tmp_path, "byte-bpe")
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["pre_tokenizer"]["add_prefix_space"] = True
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(UserError, match="no name for the tokenizer's pre-tokenizer"):
        written(Held(MODELS["llama"]), tmp_path / "m.gguf", tokenizer=str(folder))
    assert not (tmp_path / "m.gguf").exists()


def test_a_sliding_window_limits_the_context(tmp_path, capsys):
    config = MODELS["llama"].model_copy(update={"window": 16})
    path = written(Held(config), tmp_path / "m.gguf")
    assert open_source(path).hf_metadata["positions"] == 16
    assert "the context is limited to 16 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_writes_the_same_greedy_tokens(tmp_path, name):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is compiled for minutes")
    folder = tokenizer_folder(tmp_path, "byte-bpe")
    path = written(Held(MODELS[name], std=0.1), tmp_path / "m.gguf", dtype=torch.float32, tokenizer=str(folder))
    runtime = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False, logits_all=True)
    theirs = []
    for token in runtime.generate(PROMPT, top_k=1, temp=0.0, repeat_penalty=1.0):
        theirs.append(token)
        if len(theirs) == 24:
            break
    assert theirs == greedy(MODELS[name], path, PROMPT, 24)


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe", "unigram"])
def test_llama_cpp_gives_the_same_ids(tmp_path, kind):
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: it is compiled for minutes")
    folder = tokenizer_folder(tmp_path, kind)
    path = written(Held(MODELS["llama"]), tmp_path / "m.gguf", tokenizer=str(folder))
    runtime = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, verbose=False, vocab_only=True)
    ours = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert runtime.tokenize(text.encode(), add_bos=False) == ours.encode(text, add_special_tokens=False)
