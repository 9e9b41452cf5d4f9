"""Text outside a vocabulary is counted and reported when text becomes tokens."""

import json
from pathlib import Path

import pytest

from steelyard import cli
from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import SentencePieceOptions, report_unknown
from steelyard.text.tokenizer.json_file import JsonTokenizer
from steelyard.tokens.preprocess import tokenize
from steelyard.tokens.tokenize_job import TokenizeJob
from tests.conftest import write_documents

ENGLISH = ["The quick brown fox jumps over the lazy dog.", "How vexingly quick daft zebras jump!"]
JAPANESE = "吾輩は猫である"


@pytest.fixture(scope="module")
def english():
    return tokenizers.train_sentencepiece(ENGLISH, 40, SentencePieceOptions())


@pytest.fixture
def place(tmp_path, monkeypatch, english):
    """An empty folder to stand in, with an English tokenizer and a text of two languages."""
    monkeypatch.chdir(tmp_path)
    english.write(tmp_path / "english")
    (tmp_path / "text.txt").write_text(f"{JAPANESE}\n{ENGLISH[0]}\n猫 fox 猫\n")
    return tmp_path


def command(*words) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    return int(end.value.code or 0)


def rebuilt(**options) -> JsonTokenizer:
    from tokenizers import Tokenizer, models

    vocab = {"<unk>": 0, "a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    return JsonTokenizer(Tokenizer(models.BPE(vocab, [], **options)), "rebuilt")


def test_only_a_vocabulary_without_bytes_has_unknown_text(english):
    with_bytes = tokenizers.train_sentencepiece(ENGLISH, 290, SentencePieceOptions(byte_fallback=True))
    assert (english.unknown_id, with_bytes.unknown_id) == (0, None)
    assert tokenizers.train_byte_bpe(ENGLISH, 300).unknown_id is None
    assert rebuilt(unk_token="<unk>").unknown_id == 0
    assert rebuilt(unk_token="<unk>", byte_fallback=True).unknown_id is None


def test_a_vocabulary_that_drops_unknown_text_is_reported(english, capsys):
    assert rebuilt().encode("a猫b") == [1, 2]
    report_unknown(0, 100, rebuilt(), None, allowed=False)
    assert "it drops characters" in capsys.readouterr().err
    report_unknown(0, 100, english, None, allowed=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("unknown", "outcome"), [(1, ""), (2, "warning"), (50, "warning"), (51, "error")])
def test_above_a_thousandth_there_is_a_warning_and_above_a_twentieth_an_error(english, unknown, outcome, capsys):
    if outcome == "error":
        with pytest.raises(UserError, match=r"51 of 1000 tokens \(5\.10%\) are unknown"):
            report_unknown(unknown, 1000, english, "data", allowed=False)
        outcome = "warning"
    report_unknown(unknown, 1000, english, "data", allowed=True)
    assert capsys.readouterr().err.startswith(outcome)
    assert (outcome == "") == (unknown == 1)


def test_the_tokenizer_command_counts_unknown_tokens_and_names_their_characters(place, capsys):
    assert command("tokenizer", "info", "english.model", "--text", "text.txt", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["unknown"] == 3
    assert result["unknown_share"] == pytest.approx(3 / result["tokens"], abs=1e-6)
    assert result["unknown_characters"]["猫"] == 3
    assert set(result["unknown_characters"]) == set(JAPANESE)


def test_a_tokenized_corpus_of_an_unknown_script_is_refused_and_continued_if_allowed(place, capsys):
    job = TokenizeJob(("text.txt",), "english.model", "out", append_eod=True)
    with pytest.raises(UserError, match="are unknown to the tokenizer"):
        tokenize(job)
    assert not Path("out_text_document.bin").exists()
    result = tokenize(job, allow_unknown=True)
    assert "resuming an earlier run" in capsys.readouterr().err
    assert result["unknown"] == {"text": 3}
    assert json.loads(Path("out.tokenize.json").read_text())["result"]["unknown"] == {"text": 3}


def test_token_files_are_verified_against_a_tokenizer(place, capsys):
    write_documents("pair", [[5, 0, 6], [0]], vocab_size=40)
    assert command("data", "verify", "pair", "--tokenizer", "english.model", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["unknown"] == 2
    assert "2 of 4 tokens (50.00%) are unknown" in printed.err
    write_documents("other", [[5, 40]], vocab_size=41)
    assert command("data", "verify", "other", "--tokenizer", "english.model") == 1
