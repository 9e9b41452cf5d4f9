"""`steelyard sft` and `steelyard adapter` as they are typed."""

import json
import shutil
import sys

import pytest

from tests import preloaded


def steelyard(*words):
    command = [sys.executable, "-P", "-m", "steelyard", *map(str, words)]
    return preloaded.run(command, capture_output=True, text=True, timeout=600)


WORDS = ["finetune.template=chatml", "data.sequence_length=64", "train.device=cpu", "train.global_batch=4"]


def test_a_model_and_a_file_are_enough(bases, place):
    done = steelyard("sft", "--model", bases / "llama", "--data", "talks.jsonl", "--out", "tuned", *WORDS, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["out"] == "tuned"
    assert (place / "tuned/chat_template.jinja").is_file()
    assert result["steps"] > 1
    again = steelyard("sft", "--model", bases / "llama", "--data", "talks.jsonl", "--out", "tuned", *WORDS)
    assert (again.returncode, again.stderr.splitlines()[0]) == (2, "error: tuned already exists")


@pytest.mark.slow
def test_a_recipe_on_two_ranks_with_an_adapter(bases, place):
    shutil.copytree(bases / "llama", place / "base")
    (place / "tune.toml").write_text("""
        [train]
        init_from = "base"
        steps = 4
        global_batch = 4
        device = "cpu"
        [data]
        sequence_length = 64
        [finetune]
        data = "talks.jsonl"
        template = "chatml"
        adapter = { rank = 4 }
    """)
    done = steelyard("sft", "tune.toml", "--run", "tuned", "--nproc", 2)
    assert done.returncode == 0, done.stderr
    assert (place / "tuned/hf/model.safetensors").is_file()
    assert steelyard("adapter", "export", "tuned", "adapter").returncode == 0
    done = steelyard("adapter", "merge", "base", "adapter", "merged", "--json")
    assert json.loads(done.stdout)["adapted"] == 14
    assert (place / "merged/model.safetensors").read_bytes() == (place / "tuned/hf/model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_preview_is_shown_and_written(bases, place):
    words = ["--model", bases / "llama", "--data", "talks.jsonl", *WORDS]
    done = steelyard("sft", "preview", *words, "--samples", 2, "--html", "page.html")
    assert done.returncode == 0, done.stderr
    assert "packing_efficiency" in done.stdout
    assert "<h1>" in (place / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft"], "Usage"),
        (["sft", "--model", "somewhere"], "there is no model or data to fine-tune"),
        (["sft", "nothing.toml"], "there is no such file or shipped recipe"),
        (["adapter", "merge", "nowhere", "nothing", "out"], "there is no checkpoint nowhere"),
    ],
)
def test_mistakes_are_told_in_one_message(place, words, message):
    done = steelyard(*words)
    assert done.returncode == 2
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
