"""`steelyard init`: a recipe whose size follows from text and machine, and commands that run as printed."""

import json
import shlex

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.sizes.memory import memory_of
from steelyard.sizes.param_count import parameters
from steelyard.text.survey import Survey, survey
from steelyard.tune.first_recipe import Hardware, finetuning, pretraining
from steelyard.tune.init_run import is_conversation

H100S = Hardware("H100", 8, 78 * GIB, 8 * 280e12, "bf16")
LINE = "The quick brown fox number {} jumps over the lazy dog, and the dog does not mind at all, since it is asleep.\n"
TALKS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]})
    + "\n"
    for n in range(40)
)


def text_of(size, tmp_path) -> Survey:
    return Survey([tmp_path / "a.txt"], ["a.txt"], int(size), "text", "line", [{"text": "a"}])


def recipe_of(made):
    return load_recipe(dict(made.settings))


def test_the_model_grows_with_the_text_and_the_hours_and_sees_twenty_tokens_per_parameter(tmp_path):
    sizes = []
    for size in (1e5, 1e7, 1e9, 1e11, 1e13):
        made = recipe_of(pretraining(text_of(size, tmp_path), H100S, tmp_path / "x.toml", 24))
        sizes.append(parameters(made.model).total)
        tokens = made.train.steps * made.train.global_batch * made.data.sequence_length
        assert tokens / sizes[-1] >= 19 or made.model.layers == 2  # The smallest is never too large.
        assert tokens <= 4.1 * size / 2
        assert max(memory.total for memory in memory_of(made, 8)) <= H100S.usable
    assert sizes == sorted(sizes)
    assert sizes[0] < 1e6 < 1e8 < sizes[3]
    assert sizes[3] == sizes[4]  # Here the hours are the limit.
    longer = recipe_of(pretraining(text_of(1e13, tmp_path), H100S, tmp_path / "x.toml", 1000))
    assert parameters(longer.model).total > sizes[4]


def test_a_model_that_does_not_fit_gives_way_to_a_smaller_one(tmp_path):
    small = Hardware("small", 8, 2 * GIB, H100S.flops, "bf16")
    found, path = text_of(1e12, tmp_path), tmp_path / "x.toml"
    roomy, tight = (recipe_of(pretraining(found, each, path, 24)) for each in (H100S, small))
    assert parameters(tight.model).total < parameters(roomy.model).total
    assert max(memory.total for memory in memory_of(tight, 8)) <= small.usable


def test_weights_that_do_not_fit_for_training_get_adapters(tmp_path):
    config = LlamaConfig(family="llama", layers=32, hidden=4096, heads=32, vocab=32000)
    for machine, adapter in ((H100S, False), (Hardware("one", 1, 40 * GIB, 1e14, "bf16"), True)):
        made = finetuning(text_of(1e6, tmp_path), machine, tmp_path / "x.toml", "base", 4096, config)
        assert ("adapter" in made.settings["finetune"]) == adapter
    assert "--nproc 8" in finetuning(text_of(1, tmp_path), H100S, tmp_path / "x.toml", "b", 64, config).commands[1]


def test_a_survey_finds_the_text_its_key_and_its_documents(tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 1}' * 5000)
    (tmp_path / "a.jsonl").write_text('{"id": "1", "body": "a longer text"}\n')
    found = survey(str(tmp_path))
    assert (found.key, found.mode, found.inputs) == ("body", "line", [str(tmp_path / "*.jsonl")])
    (tmp_path / "b.jsonl").write_text('{"text": "of another kind"}\n')
    with pytest.raises(UserError, match="no key 'body'"):
        survey(str(tmp_path))
    (tmp_path / "poem.txt").write_text("short\nlines\n\nof a poem\n")
    assert survey(str(tmp_path / "poem.txt")).mode == "blank"
    with pytest.raises(UserError, match="no text files"):
        survey(str(tmp_path / ".."))


def test_conversations_are_told_from_texts(tmp_path):
    for content, expected in ((TALKS, True), ('{"text": "plain"}\n', False), ('{"text": "### Human: hi"}\n', True)):
        (tmp_path / "x.jsonl").write_text(content)
        assert is_conversation(survey(str(tmp_path / "x.jsonl"))) == expected


def carried_out(place, *words) -> dict:
    """Run init and the commands that it prints, as a shell would."""
    done = place.steelyard("init", "--json", *words)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert len(made["commands"]) == 3
    for line in made["commands"]:
        program, *rest = shlex.split(line)
        assert program == "steelyard"
        done = place.steelyard(*rest)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
    return made


@pytest.fixture
def text(workplace):
    folder = workplace.path / "data"
    folder.mkdir()
    (folder / "my text.txt").write_text("".join(LINE.format(n) for n in range(200)))
    return folder


@pytest.mark.slow
def test_the_printed_commands_train_a_model_and_nothing_is_overwritten(workplace, text):
    made = carried_out(workplace, "--hours", "1e-6")
    assert (workplace.path / "runs" / "pretrain" / "report.html").is_file()
    before = (workplace.path / "pretrain.toml").read_bytes()
    again = workplace.steelyard("init")
    assert again.returncode == 2
    assert "pretrain.toml already exists" in again.stderr
    assert (workplace.path / "pretrain.toml").read_bytes() == before
    assert made["task"] == "pretrain"


@pytest.mark.slow
def test_the_printed_commands_tune_and_prune_a_model(workplace, text):
    carried_out(workplace, "--hours", "1e-6")
    (workplace.path / "talks.jsonl").write_text(TALKS)
    assert carried_out(workplace, "--data", "talks.jsonl", "--model", "runs/pretrain")["task"] == "sft"
    carried_out(workplace, "--task", "prune", "--model", "runs/pretrain")
    assert (workplace.path / "runs" / "prune" / "report.html").is_file()


def test_a_task_that_starts_from_a_model_asks_for_it(workplace, text):
    done = workplace.steelyard("init", "--task", "prune")
    assert done.returncode == 2
    assert "--model" in done.stderr
