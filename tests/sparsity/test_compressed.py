"""Compressed 2:4 checkpoints: written from anything that is 2:4, read as dense or as they are, refused when broken."""

import json
import os
import subprocess
import sys

import pytest
import torch

from steelyard import model
from steelyard.checkpoint.formats import load_into, open_source, safetensors
from steelyard.checkpoint.formats.compressed_tensors import INDICES, VALUES, WEIGHT, compress, crowded, matrices
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.evaluate.load_model import loaded
from steelyard.sparsity import frozen_base as bases
from steelyard.sparsity import mask_file, sparse_linear
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.pruned_source import opened
from steelyard.sparsity.random_source import RandomCompressed
from steelyard.sparsity.semi_structured import compressible, export, packed
from steelyard.sparsity.target_modules import maskable
from tests.checkpoint.models import EXPERTS, SHAPES, Held, assert_equal

PATTERN = Pattern.parse("2:4")
SPARED = "layers.1.mlp.up.weight"


def pruned(name, dtype=torch.bfloat16, spared=()):
    """A model of a kind in which every matrix of the layers but some is 2:4."""
    held = Held((SHAPES | EXPERTS)[name], dtype=dtype)
    for weight, tensor in held.parameters.items():
        if weight.startswith("layers.") and tensor.ndim > 1 and weight not in spared and ".router." not in weight:
            rows = tensor.view(-1, tensor.shape[-1])  # of all experts
            rows.mul_(PATTERN.keep_best(rows.abs()))
    return held


def logits(source):
    network = model.build(source.config)
    load_into(source, network)
    with torch.inference_mode():
        return network(torch.arange(12)[None])


@pytest.mark.parametrize("name", ["gpt", "llama-tied", "qwen2"])
def test_a_compressed_model_says_what_the_pruned_one_says_to_the_bit(tmp_path, name):
    source = pruned(name)
    result = export(source, tmp_path / "out", None, allow_dense=False)
    read = open_source(tmp_path / "out")
    assert_equal(read, source)
    assert torch.equal(logits(read), logits(source))
    matrices = [tensor for key, tensor in source.parameters.items() if key in read.compressed]
    assert result["compressed"] == len(matrices) == SHAPES[name].layers * (6 if name == "gpt" else 7)
    sizes = [place.size[0] * place.size[1] * place.dtype.itemsize for key, place in read.places.items()
             if key.endswith((".values", ".indices"))]  # fmt: skip
    assert sum(sizes) * 16 == 9 * sum(2 * matrix.numel() for matrix in matrices)


LOAD = """
import json, runpy, sys
from pathlib import Path
sys.modules["steelyard"] = None  # Its import fails.
import torch, transformers
for folder in map(Path, sys.argv[1:]):
    sys.argv = ["expand_sparse.py", f"{folder}-dense"]
    runpy.run_path(str(folder / "expand_sparse.py"), run_name="__main__")
    for path, remote in ((folder, True), (f"{folder}-dense", False)):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=remote, dtype=torch.float32)
        with torch.inference_mode():
            logits = model(torch.arange(12)[None]).logits
        print(json.dumps([type(model).__name__, logits.tolist()]))
"""


@pytest.mark.slow
def test_transformers_loads_the_folder_without_steelyard(tmp_path):
    names = {"gpt": "GPT2LMHeadModel", "llama-tied": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}
    sources = {name: pruned(name) for name in names}
    for name, source in sources.items():
        export(source, tmp_path / name, None, allow_dense=False)
    folders = [str(tmp_path / name) for name in names]
    home = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *folders], capture_output=True, text=True, timeout=900, cwd="/", env=home
    )
    assert done.returncode == 0, done.stderr
    loaded = iter(map(json.loads, done.stdout.splitlines()))
    for name, source in sources.items():
        expected = logits(source)[..., : source.config.vocab]
        for _ in range(2):
            kind, found = next(loaded)
            assert kind == names[name]
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
        assert_equal(open_source(tmp_path / f"{name}-dense"), source)


def test_many_weights_are_written_to_several_files(tmp_path):
    source = compressible(pruned("llama"), allow_dense=False)
    convert(source, tmp_path / "out", Target("compressed", dtype=torch.bfloat16, shard_bytes=10_000))
    assert len(list((tmp_path / "out").glob("sparse-*-of-*.safetensors"))) > 3
    assert_equal(open_source(tmp_path / "out"), source)
    next((tmp_path / "out").glob("sparse-00002-*")).unlink()
    read = open_source(tmp_path / "out")
    with pytest.raises(UserError, match="missing"):
        load_into(read, model.build(read.config))


def test_a_matrix_that_is_not_two_of_four_is_refused_by_name_unless_it_may_stay_dense(tmp_path):
    source = pruned("llama", spared=[SPARED])
    with pytest.raises(UserError, match=rf"{SPARED}: \d+ of its 384 groups of four") as refused:
        export(source, tmp_path / "out", None, allow_dense=False)
    assert "layers.0" not in str(refused.value)
    assert not (tmp_path / "out").exists()
    assert export(source, tmp_path / "out", None, allow_dense=True)["dense_matrices"] == 1
    assert_equal(open_source(tmp_path / "out"), source)


def test_compressed_weights_go_back_to_a_hugging_face_folder(tmp_path):
    source = pruned("llama-3")
    export(source, tmp_path / "sparse", None, allow_dense=False)
    convert(open_source(tmp_path / "sparse"), tmp_path / "hf", Target("hf"))
    assert_equal(open_source(tmp_path / "hf"), source)


@pytest.mark.parametrize("damage", ["order", "size", "kind"])
def test_a_damaged_file_is_told_by_name(tmp_path, damage):
    export(pruned("llama"), tmp_path / "out", None, allow_dense=False)
    file = tmp_path / "out" / "sparse.safetensors"
    tensors = {name: extent.read().clone() for name, extent in safetensors.extents(file).items()}
    about = safetensors.metadata(file)
    wrong = "layers.2.mlp.down.indices"
    if damage == "order":
        tensors[wrong][3, 2] = 0x11  # the places 1 and 0
    elif damage == "size":
        tensors[wrong] = tensors[wrong][:, :-1]
    else:
        about = {"format": "pt"}
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    list(safetensors.write(file, sizes, {n: t.dtype for n, t in tensors.items()}, tensors.values(), about))
    with pytest.raises(UserError, match="not a file of compressed" if damage == "kind" else "layers.2.mlp.down"):
        open_source(tmp_path / "out").tensor("layers.2.mlp.down.weight")


@pytest.mark.parametrize("name", ["gpt", "qwen2"])
def test_maps_that_keep_their_weights_compressed_compute_the_same(name):
    source = compressible(pruned(name, torch.float32, spared=[SPARED]), allow_dense=True)
    device = torch.device("cpu")
    dense, sparse = (loaded(source, device, torch.float32, sparse=kept) for kept in (False, True))
    kinds = [type(module) for module in sparse.modules()]
    assert kinds.count(sparse_linear.SparseLinear) == len(source.compressed)
    tokens = torch.arange(24).view(2, 12)
    with torch.inference_mode():  # A product's rounding may depend on where its weight lies in memory (ARM).
        torch.testing.assert_close(sparse(tokens), dense(tokens), rtol=1e-5, atol=1e-5)


def test_compressed_maps_hold_half_of_the_weights_and_run_compiled():
    source = compressible(pruned("llama"), allow_dense=False)
    network = loaded(source, torch.device("cpu"), torch.bfloat16, compiled=False, sparse=True)
    attention = network.layers["0"].attention
    held = attention.query.values.numel() * 2
    assert held == attention.query.in_features * attention.query.out_features
    assert not list(attention.query.parameters())
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        compiled = torch.compile(attention.query, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x), attention.query(x))


def test_the_fastest_way_that_is_right_is_chosen_and_remembered(monkeypatch, capsys):
    held = packed(*compress(torch.eye(8)))
    x, nothing = torch.ones(3, 8), torch.empty(0)
    factors = {"slow": 1.0, "wrong": 1.1, "fast": 1.0, None: 1.0}
    milliseconds = {"slow": 3.0, "wrong": 0.5, "fast": 1.0, None: 2.0}

    def multiplied(x, held, for_many, way):
        if way == "broken":
            raise RuntimeError("out of resources")
        return factors[way] * x

    def timed(product):
        return milliseconds[product.args[-1]]

    monkeypatch.setattr(sparse_linear, "CHOICES", sparse_linear.Choices())
    monkeypatch.setattr(sparse_linear, "candidates", lambda *_: ["slow", "broken", "wrong", "fast", None])
    monkeypatch.setattr(sparse_linear, "multiplied", multiplied)
    monkeypatch.setattr(sparse_linear, "_milliseconds", timed)
    assert sparse_linear.choose(x, held, nothing) == "fast"
    reported = capsys.readouterr().err
    assert "out of resources" in reported
    assert "relative error of 0.1" in reported
    key = sparse_linear._key(torch.ones(4, 8), held)
    assert sparse_linear.CHOICES.found[key] == "fast"  # Three and four rows share a measurement,
    assert sparse_linear._key(torch.ones(5, 8), held) not in sparse_linear.CHOICES.found  # five have their own,
    with sparse_linear.for_graphs():
        assert sparse_linear._key(x, held) not in sparse_linear.CHOICES.found  # and so has what is recorded.


def write_pruned(place):
    """A pruned model with a tokenizer, as a Hugging Face folder."""
    from steelyard.text import tokenizer as tokenizers

    tokenizers.train_byte_bpe(["a b c d e f g h"], 260).save(place / "tokenizer")
    held = Held(SHAPES["llama"].model_copy(update={"vocab": 300}))
    for name, tensor in held.parameters.items():
        if name.startswith("layers.") and tensor.ndim == 2:
            tensor.mul_(PATTERN.keep_best(tensor.abs()))
    convert(held, place / "pruned", Target("hf", dtype=torch.bfloat16, tokenizer=str(place / "tokenizer")))
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pruned(tmp_path_factory.mktemp("exported"))


def test_what_is_exported_writes_and_scores_as_the_pruned_model(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert run("export-sparse", "pruned", "sparse", "--json") == 0
    assert json.loads(capsys.readouterr().out)["compressed"] == 28
    (folder / "text.txt").write_text("a b c d e f g h " * 20)
    answers = []
    for model_ in ("pruned", "sparse"):
        assert run("generate", model_, "--prompt", "a b", "--max-tokens", "8", "--json") == 0
        written = json.loads(capsys.readouterr().out)["text"]
        assert run("eval", "ppl", model_, "--data", "text.txt", "--sequence-length", "16", "--json") == 0
        answers.append((written, json.loads(capsys.readouterr().out)["loss"]))
    assert answers[0] == answers[1]


def test_a_base_and_its_masks_are_exported_together(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    convert(Held(SHAPES["qwen2"]), folder / "base", Target("hf", dtype=torch.bfloat16))
    base = open_source(folder / "base")
    each = ((name, PATTERN.keep_best(base.tensor(name).float().abs())) for name in maskable(base.config))
    mask_file.write(folder / "magnitude.mask", each, PATTERN, bases.identity(base))
    assert run("export-sparse", "base", "together", "--mask", "magnitude.mask") == 0
    assert_equal(open_source(folder / "together"), opened(folder / "base", "magnitude.mask"))
    assert run("export-sparse", "base", "alone") == 2


@pytest.mark.slow
def test_a_run_that_learned_masks_is_exported_with_its_base(place):
    place.learn("masks", "train.steps=2")
    assert run("export-sparse", "masks", "out", "--dtype", "fp32") == 0
    learned = opened("masks")
    assert_equal(open_source("out"), learned)
    assert not torch.equal(learned.tensor(SPARED), open_source("base").tensor(SPARED))


def test_a_source_that_is_seen_through_something_keeps_its_own_tokenizer():
    held = pruned("llama")
    held.load_tokenizer = lambda: "inside the file"
    assert compressible(held, allow_dense=False).load_tokenizer() == "inside the file"


def test_a_benchmark_of_sparse_speed_wants_a_gpu_or_to_be_told_otherwise(folder, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(folder)
    assert run("bench", "sparse", "pruned") == 2
    assert "--device cpu" in capsys.readouterr().err
    words = ("--device", "cpu", "--prompt", "8", "--context", "4", "--batch", "2", "--json")
    assert run("bench", "sparse", "pruned", *words) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["what"] for row in rows] == ["memory", "prefill 8", "decode 2"]
    assert all(row["dense"] > 0 and row["sparse"] > 0 for row in rows)


def test_a_shape_is_measured_with_random_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = (
        'extends = "llama3.2-1b"\n[model]\nlayers = 2\nhidden = 64\nheads = 4\nkv_heads = 2\nffn = 128\nvocab = 96\n'
    )
    (tmp_path / "small.toml").write_text(small)
    source = RandomCompressed("small.toml")
    assert source.compressed == matrices(source.sizes())
    assert all(crowded(source.tensor(name)) is None for name in source.compressed)
    for name in source.compressed:
        parts = [source.tensor(name.removesuffix(WEIGHT) + part) for part in (VALUES, INDICES)]
        assert all(map(torch.equal, parts, compress(source.tensor(name))))
    words = ("--device", "cpu", "--prompt", "8", "--context", "4", "--batch", "2", "--json")
    assert run("bench", "sparse", "--shape", "small.toml", "--values", "int8", *words) == 0
    rows = {row["what"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["memory"]["int8"] < rows["memory"]["sparse"] < rows["memory"]["dense"]
    assert run("bench", "sparse", *words) == 2
    assert "either a checkpoint or --shape" in capsys.readouterr().err


def test_a_model_that_is_not_pruned_is_refused_with_a_way_out(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    convert(Held(SHAPES["llama"]), folder / "dense", Target("hf"))
    assert run("export-sparse", "dense", "out") == 2
    reported = capsys.readouterr().err
    assert "layers.0.attention.query.weight" in reported
    assert "and 18 more" in reported
    assert "steelyard prune" in reported


def run(*words):
    from steelyard.cli import main

    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code
