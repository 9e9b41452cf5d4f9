"""Untrusted input: huge numbers, deep nesting and long names get one message at once, and exit code 2."""

import json
import tomllib

import pytest

from steelyard.cli import main
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.toml import parse, parse_value
from steelyard.core.recipe.train_section import BatchRamp, TrainSection
from tests.checkpoint.models import written

LONG, DEEP = "9" * 100_000, 5_000
TINY = '[model]\nfamily = "llama"\nlayers = 2\nhidden = 32\nheads = 4\nvocab = 97\n'
NUMBERS = {
    "hundreds of digits": "1" + "0" * 300,
    "a hundred thousand digits": LONG,
    "a hundred thousand hex digits": "0x" + "f" * 100_000,
    "just past 64 bits": str(2**63),
}
NESTED = {
    "arrays": "a = " + "[" * DEEP + "]" * DEEP,
    "unclosed arrays": "a = " + "[" * DEEP,
    "inline tables": "a = " + "{b = " * DEEP + "1" + "}" * DEEP,
    "a dotted key": "a" + ".a" * 50_000 + " = 1",
    "a quoted dotted key": '"a"' + '."a"' * 50_000 + " = 1",
    "a header": "[a" + ".a" * 50_000 + "]",
    "a key inside a table": "a = {a" + ".a" * 50_000 + " = 1}",
}


def refused(capsys, *words) -> str:
    """The one message of a command that exits with 2."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words)])
    shown = capsys.readouterr()
    assert ended.value.code == 2, shown.err
    assert shown.out == ""
    assert "bug in steelyard" not in shown.err
    assert len(shown.err) < 10_000
    return shown.err


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("key", ["train.steps", "model.layers", "model.vocab"])
def test_a_number_that_is_too_long_is_refused_wherever_it_stands(tmp_path, capsys, key, number):
    (tmp_path / "tiny.toml").write_text(TINY)
    assert key in refused(capsys, "recipe", "check", tmp_path / "tiny.toml", f"{key}={number}")
    section, name = key.split(".")
    others = "".join(line for line in TINY.splitlines(keepends=True) if not line.startswith(name))
    table = "" if section == "model" else f"[{section}]\n"
    (tmp_path / "bad.toml").write_text(f"{others}{table}{name} = {number}\n")
    assert "bad.toml" in refused(capsys, "recipe", "check", tmp_path / "bad.toml")


@pytest.mark.parametrize("text", NESTED.values(), ids=NESTED)
def test_toml_that_is_nested_thousands_deep_is_refused(tmp_path, capsys, text):
    (tmp_path / "bad.toml").write_text(text)
    assert "nested" in refused(capsys, "recipe", "check", tmp_path / "bad.toml")
    key, _, value = text.partition(" = ")
    if value:
        (tmp_path / "tiny.toml").write_text(TINY)
        refused(capsys, "recipe", "check", tmp_path / "tiny.toml", f"{key}={value}")


@pytest.mark.parametrize("text", [NESTED["arrays"], f"a = {LONG}"], ids=["nested", "long"])
def test_every_kind_of_toml_file_is_read_within_the_limits(tmp_path, capsys, monkeypatch, text):
    (tmp_path / "bad.toml").write_text(text)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "steelyard").mkdir()
    (tmp_path / "steelyard" / "sites.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for words in (
        ["plan", "--model", tmp_path / "tiny.toml", "--cluster", tmp_path / "bad.toml"],
        ["tune", tmp_path / "bad.toml"],
        ["submit", tmp_path / "tiny.toml", "--on", "local", "--run", tmp_path / "run"],
    ):
        assert "cannot be read" in refused(capsys, *words)


@pytest.mark.parametrize("value", ["[" * 100_000, f"[{LONG}]", '{"a": ' * 300 + "1" + "}" * 300, "1" * 200])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "adapter_config.json", "model.safetensors.index.json"]
)
def test_every_kind_of_json_file_is_read_within_the_limits(tmp_path, capsys, name, value):
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 97,
              "num_hidden_layers": 2, "intermediate_size": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / name).write_text(value)
    words = {
        "tokenizer_config.json": ["tokenizer", "info", tmp_path],
        "adapter_config.json": ["adapter", "merge", written(tmp_path, "llama"), tmp_path, tmp_path / "out"],
    }
    assert name in refused(capsys, *words.get(name, ["checkpoint", "info", tmp_path]))


TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
    "pre_tokenizer": None, "post_processor": None, "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}  # fmt: skip


def test_the_number_by_which_tokenizers_say_no_limit_is_read(tmp_path):
    from steelyard.core import safe_parse

    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert safe_parse.read_json_object(tmp_path / "tokenizer_config.json")["model_max_length"] == int(1e30)


TOO_LARGE = (
    "model.layers=100000",
    "model.vocab=0x7fffffffffffffff",
    "model.hidden=1000000000",
    "train.global_batch=1000000000000",
    "parallel.pipeline=1000000000",
    "data.sequence_length=9999999999999999",
)


@pytest.mark.parametrize("change", TOO_LARGE)
def test_a_dry_run_of_a_size_beyond_any_model_is_refused(tmp_path, capsys, change):
    (tmp_path / "tiny.toml").write_text(TINY + '[data]\ntrain = "x"\n')
    reported = refused(capsys, "train", tmp_path / "tiny.toml", "--dry-run", change)
    assert change.partition("=")[0] in reported
    assert "less than or equal" in reported


@pytest.mark.parametrize("words", [["recipe", "check"], ["train"], ["checkpoint", "info"], ["checkpoint", "verify"],
                                   ["run", "verify"], ["report"], ["tokenizer", "info"]])  # fmt: skip
def test_a_path_of_five_thousand_characters_is_a_mistake_of_the_user(capsys, words):
    assert "name too long" in refused(capsys, *words, "/tmp/" + "x" * 5_000)


def test_thousands_of_wrong_keys_make_a_message_that_can_be_read(tmp_path, capsys):
    (tmp_path / "bad.toml").write_text("".join(f"key{number} = 1\n" for number in range(2_000)))
    assert "there are more problems" in refused(capsys, "recipe", "check", tmp_path / "bad.toml")


def test_the_lines_of_a_long_file_are_found_without_parsing_it_again_and_again(monkeypatch):
    text = (
        "# a comment\r\n[data]\ntrain = [\n"
        + '  "some]where", # [x\n' * 500
        + "]\nsplit = '''\n98,2,0'''\n[train]\nsteps = 3\n"
    )
    calls = []
    whole = tomllib.loads
    monkeypatch.setattr(tomllib, "loads", lambda text: calls.append(text) or whole(text))
    values, places = parse(text, "f")
    assert len(values["data"]["train"]) == 500
    assert (places["data.train"], places["data.split"], places["train.steps"]) == ("f:3", "f:505", "f:508")
    assert len(calls) < 20


def test_a_path_with_many_dots_is_still_a_value():
    assert parse_value("../" * 50 + "data") == "../" * 50 + "data"
    with pytest.raises(UserError, match="more than the limit"):
        load_recipe({"name": "x"}, ["train.steps=99999999999999999999"])


def test_a_ramp_of_any_length_is_counted_at_once():
    train = TrainSection(global_batch=1_000, batch_ramp=BatchRamp(start=1, increment=1, samples=10**15))
    assert train.samples_in(10**9) == 10**9
    assert train.samples_in(10**14) > 10**14
    assert train.steps_for(train.samples_in(12_345)) == 12_345


@pytest.mark.parametrize("samples", [1, 36, 37, 100, 999])
def test_a_ramp_is_counted_as_its_steps_say(samples):
    train = TrainSection(global_batch=16, batch_ramp=BatchRamp(start=4, increment=3, samples=samples))
    consumed = 0
    for steps in range(120):
        assert train.samples_in(steps) == consumed
        consumed += train.batch_at(consumed)
        assert train.steps_for(consumed) == steps + 1
