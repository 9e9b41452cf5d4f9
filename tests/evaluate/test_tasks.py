"""Our model behind lm-eval: its three questions, and a task from this folder."""

import builtins
import json
from types import SimpleNamespace

import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.evaluate import tasks
from steelyard.evaluate.generation import Sampling, writer

TASK = """
task: which_word
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: label
doc_to_choice: choices
metric_list: [{metric: acc}]
"""


def asked(*arguments):
    return SimpleNamespace(args=arguments)


@pytest.fixture
def backend(models):
    pytest.importorskip("lm_eval.api.model")
    from steelyard.evaluate.lm_eval_backend import LmEvalModel

    return LmEvalModel(writer(models / "llama"), batch=3)


def plain(backend, before, after):
    """The log probability of ids after others, one row at a time."""
    ids = torch.tensor([before + after])
    with torch.inference_mode():
        chances = backend.writer.network(ids)[0].double().log_softmax(dim=-1)
    return sum(chances[len(before) - 1 + place, token].item() for place, token in enumerate(after))


def test_continuations_of_any_length_are_scored_together_as_alone(backend):
    tokenizer = backend.writer.tokenizer
    pairs = [("def main", "(argv)"), ("x", " = 1"), ("the argument parser", " is a class"), ("a ", "b"), ("", "return")]
    found = backend.loglikelihood([asked(*pair) for pair in pairs])
    for (context, continuation), (score, _) in zip(pairs, found, strict=True):
        whole = tokenizer.encode(context + continuation)
        before = tokenizer.encode(context.rstrip()) or [tokenizer.end_of_document]
        after = whole[len(tokenizer.encode(context.rstrip())) :]
        assert score == pytest.approx(plain(backend, before, after), rel=1e-4)


def test_what_greedy_writing_gives_is_known_as_the_likeliest(backend):
    greedy = backend.writer.text("def main", Sampling(max_tokens=1, temperature=0)).removeprefix("def main")
    tokenizer = backend.writer.tokenizer
    if tokenizer.encode("def main" + greedy)[:-1] != tokenizer.encode("def main"):
        pytest.skip("the token joins the prompt when it is encoded again")
    [(_, likeliest), (_, other)] = backend.loglikelihood([asked("def main", greedy), asked("def main", " zz")])
    assert likeliest
    assert not other


def test_a_long_text_is_scored_once_a_token_with_as_much_before_it_as_fits(backend):
    tokenizer, size = backend.writer.tokenizer, backend.writer.context
    text = "parser = argparse.ArgumentParser(description=__doc__)\n" * 8
    stream = [tokenizer.end_of_document, *tokenizer.encode(text)]
    assert len(stream) > 2 * size
    expected, first = 0.0, 1
    while first < len(stream):
        end = min(first + size, len(stream))
        expected += plain(backend, stream[max(0, end - 1 - size) : first], stream[first:end])
        first = end
    assert backend.loglikelihood_rolling([asked(text), asked("x")])[0] == pytest.approx(expected, rel=1e-4)


def test_writing_ends_before_the_string_that_ends_it(backend):
    [whole] = backend.generate_until([asked("def main", {"max_gen_toks": 20})])
    assert whole
    middle = whole[len(whole) // 2]
    [cut] = backend.generate_until([asked("def main", {"until": [middle], "max_gen_toks": 20})])
    assert cut == whole[: whole.index(middle)]


@pytest.mark.slow
def test_a_task_from_a_folder_is_scored(models, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval.evaluator")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = [{"question": f"{n} plus", "choices": [" one", " two"], "label": n % 2} for n in range(10)]
    (tmp_path / "test.json").write_text("\n".join(map(json.dumps, documents)))
    (tmp_path / "which_word.yaml").write_text(TASK % (tmp_path / "test.json"))
    options = tasks.TaskOptions(limit=6, include=str(tmp_path))
    result = tasks.run(writer(models / "llama"), ["which_word"], options)
    assert 0 <= result["tasks"]["which_word"]["acc"] <= 1
    assert result["samples"]["which_word"] == 6
    assert "which_word" in tasks.as_text(result)
    with pytest.raises(UserError, match="no task nonsense"):
        tasks.run(writer(models / "llama"), ["nonsense"], options)


@pytest.mark.parametrize(
    ("content", "reported"),
    [
        ("task: mine\ndoc_to_text: [\n", "mine.yaml: line 3: expected the node content"),
        ("- task: mine\n", "mine.yaml: it is not a table of settings"),
        ("task: mine\ninclude: _base.yaml\n", "mine.yaml: it includes _base.yaml, which does not exist"),
        (TASK % "x" + "process_docs: !function utils.anything\n", None),
    ],
)
def test_a_task_file_that_cannot_be_read_is_named_with_what_is_wrong_in_it(tmp_path, content, reported):
    pytest.importorskip("yaml")
    (tmp_path / "mine.yaml").write_text(content)
    found = [f"{path.name}: {reason}" for path, reason in tasks._broken(tmp_path).items()]
    assert len(found) == (reported is not None)
    assert not found or reported in found[0]


@pytest.mark.slow
def test_a_task_that_is_not_there_because_its_file_is_broken_says_so(models, tmp_path):
    pytest.importorskip("lm_eval.evaluator")
    (tmp_path / "mine.yaml").write_text("task: mine\ndoc_to_text: [\n")
    with pytest.raises(UserError, match=r"no task mine[^\n]*\n.*mine.yaml: line 3"):
        tasks.run(writer(models / "llama"), ["mine"], tasks.TaskOptions(include=str(tmp_path)))


def test_without_lm_eval_it_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("lm_eval"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="lm-eval") as reported:
        tasks.check_installed()
    assert "steelyard[eval]" in str(reported.value)
