"""Conversations and templates that the tokenizer does not know."""

import json

import pytest

from steelyard import cli
from steelyard.core.errors import UserError
from steelyard.finetuning import preview, sft, template_markers, templates
from steelyard.text import tokenizer as tokenizers
from tests.finetuning.conftest import recipe_of, talks, write_jsonl

TOKENIZER = ["data.tokenizer=english.model", "finetune.template=plain", "finetune.valid_share=0.0"]


@pytest.fixture
def english(place):
    """A SentencePiece model of English words without | and #, and conversations in Japanese."""
    text = [message["content"] for row in talks(40) for message in row["messages"]] + ["userassistant"] * 9
    options = tokenizers.SentencePieceOptions(keep_whitespace=True)
    trained = tokenizers.train_sentencepiece(text, 36, options)
    trained.write(place / "english")
    row = {"messages": [{"role": "user", "content": "Say cat"}, {"role": "assistant", "content": "cat 猫である dog"}]}
    write_jsonl(place / "japanese.jsonl", [row] * 8)
    return trained


def test_unknown_text_is_refused_unless_allowed(bases, english, capsys):
    with pytest.raises(UserError, match=r"japanese\.jsonl: 8 of \d+ tokens \(\d+\.\d+%\) are unknown"):
        sft.prepare(recipe_of(bases / "llama", *TOKENIZER, data="japanese.jsonl"))
    prepared = sft.prepare(recipe_of(bases / "llama", *TOKENIZER, "finetune.allow_unknown=true", data="japanese.jsonl"))
    assert "8 tokens are unknown to the tokenizer" in prepared.described()
    assert "warning" in capsys.readouterr().err


def test_the_preview_shows_what_the_model_sees(bases, english, capsys):
    words = ["sft", "preview", "--model", str(bases / "llama"), "--data", "japanese.jsonl", *TOKENIZER, "--json"]
    with pytest.raises(SystemExit) as end:
        cli.main([*words, "data.sequence_length=64", "train.device=cpu"])
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["unknown"] == 8
    assert result["samples"][0] == [
        {"text": "Say cat", "in_loss": False},
        {"text": "cat <unk> dog</s>", "in_loss": True},
    ]


def test_a_preview_of_bytes_and_spaces_is_the_rendered_text(bases, place):
    text = "Say  猫 cat"
    write_jsonl(place / "talks.jsonl", [{"prompt": text, "completion": " 犬 <|im_end|> dog"}] * 2)
    prepared = sft.prepare(recipe_of(bases / "llama", "finetune.valid_share=0.0"))
    shown = preview.preview(prepared, 1)
    assert "".join(part for part, _ in shown.samples[0]).startswith(f"<|im_start|>user\n{text}<|im_end|>\n")
    assert [part for part, in_loss in shown.samples[0] if in_loss] == [" 犬 <|im_end|> dog<|im_end|>"]


@pytest.mark.parametrize(("name", "unknown"), [("chatml", "'<|'"), ("alpaca", "'###'"), ("japanese", "応答")])
def test_a_template_whose_marks_are_unknown_is_refused(english, name, unknown):
    with pytest.raises(UserError) as error:
        template_markers.check(templates.load(name, english), english)
    assert unknown in error.value.message


def test_a_template_whose_marks_are_known_is_accepted(english, capsys):
    template_markers.check(templates.load("plain", english), english)
    assert capsys.readouterr().err == ""
