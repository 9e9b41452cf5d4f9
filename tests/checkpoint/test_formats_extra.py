"""What a model says of itself beyond its weights: it comes along wherever the weights go, or its loss is told."""

import json

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.hf_metadata import BESIDE_MEGATRON, disagreement, validated
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.text import tokenizer as tokenizers
from tests.checkpoint.models import SHAPES, Held, written

TEXT = [f"the {word} of a small {word} stops here" for word in ("model", "token", "text", "word", "line", "end")] * 9
IDS = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}


@pytest.fixture(scope="module", params=["unigram", "bytes", "byte-level"])
def tokenizer(request, tmp_path_factory):
    """A SentencePiece Unigram, a SentencePiece BPE with bytes, and a byte-level BPE."""
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "byte-level":
        trained = tokenizers.train_byte_bpe(TEXT, 280)
        trained.save(folder)
        return str(folder)
    kind = {"unigram": ("unigram", False, 30), "bytes": ("bpe", True, 300)}[request.param]
    options = tokenizers.SentencePieceOptions(type=kind[0], byte_fallback=kind[1])
    tokenizers.train_sentencepiece(TEXT, kind[2], options).write(folder / "sp")
    return str(folder / "sp.model")


def held(vocab: int = 320) -> Held:
    return Held(LlamaConfig(family="llama", vocab=vocab, layers=1, hidden=32, heads=4, ffn=48))


def config_of(folder, name="config.json"):
    return json.loads((folder / name).read_text())


def edited(folder, name="config.json", **change):
    (folder / name).write_text(json.dumps(config_of(folder, name) | change))
    return folder


@pytest.mark.parametrize("through", [None, "megatron", "megatron-dist", "steelyard"])
def test_an_export_stops_where_its_tokenizer_does(tmp_path, tokenizer, through):
    loaded = tokenizers.load_tokenizer(tokenizer)
    source, named = held(), tokenizer
    if through:
        convert(source, tmp_path / "between", Target(through, tokenizer=tokenizer))
        source, named = open_source(tmp_path / "between"), None
    convert(source, tmp_path / "hf", Target("hf", tokenizer=named))
    config = config_of(tmp_path / "hf")
    assert config["eos_token_id"] == loaded.end_id is not None
    assert config["bos_token_id"] == loaded.special_id("bos_token") is not None
    assert config_of(tmp_path / "hf", "generation_config.json")["eos_token_id"] == loaded.end_id


def test_ids_that_come_along_outweigh_the_tokenizer_beside_them_and_yield_to_one_that_is_named(
    tmp_path, tokenizer, capsys
):
    convert(held(), tmp_path / "a", Target("hf", tokenizer=tokenizer))
    for name in ("config.json", "generation_config.json"):
        edited(tmp_path / "a", name, eos_token_id=11)
    convert(open_source(tmp_path / "a"), tmp_path / "b", Target("hf"))
    assert config_of(tmp_path / "b")["eos_token_id"] == 11
    assert "the EOS token of the config is 11, but that of the tokenizer is" in capsys.readouterr().err
    convert(open_source(tmp_path / "a"), tmp_path / "c", Target("hf", tokenizer=tokenizer))
    for name in ("config.json", "generation_config.json"):
        assert config_of(tmp_path / "c", name)["eos_token_id"] == tokenizers.load_tokenizer(tokenizer).end_id
    assert "the ids of the tokenizer from the command line are written" in capsys.readouterr().err


def test_settings_of_generation_without_an_end_get_one(tmp_path, tokenizer):
    source = held()
    source.hf_metadata = {"generation_config": {"temperature": 0.6}}
    convert(source, tmp_path / "hf", Target("hf", tokenizer=tokenizer))
    generation = config_of(tmp_path / "hf", "generation_config.json")
    assert generation == {"temperature": 0.6, "eos_token_id": tokenizers.load_tokenizer(tokenizer).end_id}


def test_that_nothing_names_an_end_is_told(tmp_path, capsys):
    written(tmp_path, "llama")
    assert "generation in transformers will not stop" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["megatron", "megatron-dist", "steelyard"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_everything_beside_the_weights_comes_back_from_every_format(tmp_path, name, to):
    folder = edited(written(tmp_path, name), **IDS, attn_pdrop=0.1, embd_pdrop=0.2, resid_pdrop=0.3)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 6}))
    convert(open_source(folder), tmp_path / "there", Target(to))
    convert(open_source(tmp_path / "there"), tmp_path / "back", Target("hf"))
    kept = {key: value for key, value in config_of(folder).items() if name == "gpt" or not key.endswith("_pdrop")}
    assert config_of(tmp_path / "back") == kept
    assert config_of(tmp_path / "back", "generation_config.json") == {"temperature": 0.6, "eos_token_id": 6}
    assert (tmp_path / "there" / BESIDE_MEGATRON).exists() == to.startswith("megatron")


def test_a_gpt2_that_leaves_its_dropout_to_transformers_keeps_it(tmp_path):
    folder = written(tmp_path, "gpt")
    config = {key: value for key, value in config_of(folder).items() if not key.endswith("_pdrop")}
    (folder / "config.json").write_text(json.dumps(config))
    convert(open_source(folder), tmp_path / "back", Target("hf"))
    assert [config_of(tmp_path / "back")[f"{part}_pdrop"] for part in ("attn", "embd", "resid")] == [0.1] * 3


def test_a_mistral_comes_back_as_one_and_says_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    change = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    folder = edited(written(tmp_path, "llama"), **change)
    convert(open_source(folder), tmp_path / "there", Target("megatron"))
    convert(open_source(tmp_path / "there"), tmp_path / "back", Target("hf"))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(theirs).__name__ == "MistralForCausalLM"
    assert not any(report.values()), report
    ids = torch.randint(0, 100, (1, 12))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(ids).logits, Held(SHAPES["llama"]).network(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("table", [None, [], {"eos_token_id": "2"}, {"positions": "many"}, {"dropout": [1]}, {"x": 1}])
def test_what_is_not_as_it_should_be_is_left_out(table):
    assert not any(validated(table).values())


def test_a_damaged_file_beside_megatron_is_named(tmp_path):
    folder = edited(written(tmp_path, "llama"), **IDS)
    convert(open_source(folder), tmp_path / "there", Target("megatron"))
    (tmp_path / "there" / BESIDE_MEGATRON).write_text("{")
    with pytest.raises(UserError, match=BESIDE_MEGATRON):
        open_source(tmp_path / "there")


def test_an_end_among_several_is_no_disagreement(tokenizer):
    loaded = tokenizers.load_tokenizer(tokenizer)
    assert disagreement({"eos_token_id": [1000, loaded.end_id]}, loaded) is None
    assert "has no EOS token" in disagreement({}, loaded)


@pytest.mark.parametrize("to", ["hf", "megatron", "steelyard"])
def test_a_damaged_tokenizer_is_not_passed_on(tmp_path, tokenizer, to):
    convert(held(), tmp_path / "a", Target("hf", tokenizer=tokenizer))
    vocabulary = tmp_path / "a" / "tokenizer.json"
    vocabulary.write_bytes(vocabulary.read_bytes()[:100])
    with pytest.raises(UserError, match="the tokenizer of the checkpoint cannot be used") as refused:
        convert(open_source(tmp_path / "a"), tmp_path / "b", Target(to))
    assert vocabulary.name in str(refused.value)
    assert "download it again" in str(refused.value)
    assert ".cc" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    convert(open_source(tmp_path / "a"), tmp_path / "b", Target(to, tokenizer=tokenizer))
