"""Statistics and exact duplicates of corpora: against plain Python, and killed at every write."""

import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import regex

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.text import corpus_stats, dedup, exact_duplicates
from steelyard.text.convert_corpus import convert
from steelyard.text.corpus import corpus_files, documents
from steelyard.text.dedup import DedupJob
from steelyard.text.tokenizer.train_tokenizer import SentencePieceOptions, train_sentencepiece

SLOW = pytest.mark.slow
SEED = random.Random(0)
# Few texts, so that many documents are equal, within files and between them.
TEXTS = [[f"text {SEED.randrange(40)} {'ä二' * SEED.randrange(3)}" for _ in range(60)] for _ in range(3)]


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """These jobs have chunks of some bytes; waiting for the disk after each would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def corpus_in(folder: Path, names: list[str]) -> Path:
    (folder / "in" / "deeper").mkdir(parents=True)
    for name, texts in zip(names, TEXTS, strict=False):
        first = folder / "first.jsonl"
        first.write_text("".join(json.dumps({"text": text, "id": number}) + "\n" for number, text in enumerate(texts)))
        convert([first], folder / "in" / name)
    return folder / "in"


def unique(texts: list[list[str]]) -> list[list[str]]:
    """The texts without those that occur before."""
    seen: set[str] = set()
    return [[text for text in each if not (text in seen or seen.add(text))] for each in texts]


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FORMATS = {
    "lines": ["a.jsonl", "b.jsonl", "deeper/c.jsonl"],
    "packed": ["a.jsonl.gz", "b.jsonl.zst", "deeper/c.txt.gz"],
    "tables": ["a.parquet", "b.parquet.gz", "deeper/c.txt"],
}


@pytest.mark.parametrize("kind", FORMATS)
def test_the_first_of_equal_documents_stays_in_every_format(tmp_path, kind):
    source = corpus_in(tmp_path, FORMATS[kind])
    report = dedup.dedup(DedupJob((str(source),), tmp_path / "out", piece_bytes=300))
    kept = [list(documents([tmp_path / "out" / name])) for name in FORMATS[kind]]
    assert kept == unique(TEXTS)
    total, stays = sum(map(len, TEXTS)), sum(map(len, kept))
    assert (report["documents"], report["kept"], report["removed"]) == (total, stays, total - stays)
    removed = [json.loads(line) for line in (tmp_path / "out" / "removed.jsonl").read_text().splitlines()]
    assert len(removed) == total - stays
    by_name = dict(zip(FORMATS[kind], TEXTS, strict=True))
    for line in removed:
        same = line["same_as"]
        assert by_name[line["file"]][line["document"] - 1] == line["text"]
        assert by_name[same["file"]].index(line["text"]) == same["document"] - 1
    assert not (tmp_path / "out" / ".dedup").exists()


def test_lines_that_stay_are_the_same_bytes(tmp_path):
    lines = ['{"id": 1,  "text": "a"}\n', '{"text": "\\u0061"}\n', '{"text": "\\ud800 b"}\n', '{"text": "c"}']
    (tmp_path / "a.jsonl").write_text("".join(lines))
    with pytest.raises(UserError, match="not JSON"):
        dedup.dedup(DedupJob((str(tmp_path / "a.jsonl"),), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    del lines[2]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    dedup.dedup(DedupJob((str(tmp_path / "a.jsonl"),), tmp_path / "out"))
    assert (tmp_path / "out" / "a.jsonl").read_text() == lines[0] + lines[2] + "\n"


@pytest.mark.parametrize("mode", ["blank", "file"])
def test_documents_can_be_paragraphs_or_whole_files(tmp_path, mode):
    for name, text in {"a": "one\ntwo\n\nthree\n", "b": "one\ntwo\n\nthree\n", "c": "three\n\nfour\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    inputs = tuple(str(tmp_path / f"{name}.txt") for name in "abc")
    dedup.dedup(DedupJob(inputs, tmp_path / "out", mode))
    kept = {path.name: list(documents([path], mode=mode)) for path in (tmp_path / "out").glob("*.txt")}
    if mode == "blank":
        assert kept == {"a.txt": ["one\ntwo", "three"], "c.txt": ["four"]}
    else:
        assert kept == {"a.txt": ["one\ntwo\n\nthree\n"], "c.txt": ["three\n\nfour\n"]}


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("kind", "every"),
    [("packed", 7), pytest.param("packed", 1, marks=SLOW), pytest.param("tables", 1, marks=SLOW)],
)
def test_killed_at_any_write_the_same_command_gives_the_same_bytes(tmp_path, monkeypatch, kind, every):
    source = corpus_in(tmp_path, FORMATS[kind])
    whole = tmp_path / "whole" / "out"
    dedup.dedup(DedupJob((str(source),), whole, piece_bytes=900))
    expected = content_of(whole)
    write_json, rename = files.write_json, os.replace

    def run(folder: Path, kill_at: int | None, before: bool) -> int:
        """Run the job, and raise before or after a write of the journal or a rename; returns the number of writes."""
        writes = 0

        def dying(write):
            def at(*arguments):
                nonlocal writes
                writes += 1
                if writes == kill_at and before:
                    raise Killed
                write(*arguments)
                if writes == kill_at:
                    raise Killed

            return at

        with monkeypatch.context() as patch:
            patch.setattr(files, "write_json", dying(lambda *arguments: _plain(write_json, rename, *arguments)))
            patch.setattr(os, "replace", dying(rename))
            dedup.dedup(DedupJob((str(source),), folder / "out", piece_bytes=900))
        return writes

    total = run(tmp_path / "counted", None, before=True)
    assert total > 15
    for kill_at in range(1, total + 1, every):
        for before in (True, False):
            folder = tmp_path / f"{kill_at}-{before}"
            with pytest.raises(Killed):
                run(folder, kill_at, before)
            run(folder, None, before)
            ours = content_of(folder / "out")
            report = json.loads(ours.pop("dedup.json"))
            assert report["kept"] == json.loads(expected["dedup.json"])["kept"]
            assert ours == {name: content for name, content in expected.items() if name != "dedup.json"}, kill_at


def _plain(write_json, rename, path, value):
    """Write without fsync, and with the real rename."""
    path.with_suffix(".new").write_text(json.dumps(value))
    rename(path.with_suffix(".new"), path)


def test_other_jobs_and_overlaps_are_refused(tmp_path):
    source = corpus_in(tmp_path, FORMATS["lines"])
    dedup.dedup(DedupJob((str(source),), tmp_path / "out"))
    assert dedup.dedup(DedupJob((str(source),), tmp_path / "out"))["removed"] > 0
    for inputs, out, message in (
        ((str(source / "a.jsonl"),), tmp_path / "out", "output of another job"),
        ((str(source),), source / "out", "inside an input folder"),
        ((str(source / "a.jsonl"),), source, "contains an input file"),
        ((str(source / "a.jsonl"), str(source / "a.jsonl")), tmp_path / "other", "have the same name"),
        ((str(source),), tmp_path, "contains an input file"),
    ):
        with pytest.raises(UserError, match=message):
            dedup.dedup(DedupJob(inputs, out))
    assert not (tmp_path / "other").exists()


def test_many_partitions_and_ranges_find_what_one_finds(tmp_path, monkeypatch):
    texts = [str(SEED.randrange(3000)) for _ in range(5000)]
    (tmp_path / "hashes").write_bytes(b"".join(map(exact_duplicates.hash_of, texts)))
    first: dict[str, int] = {}
    expected = {}
    for number, text in enumerate(texts):
        if first.setdefault(text, number) != number:
            expected[number] = first[text]
    for partition, at_once, ranges in ((1 << 22, 1 << 20, 1 << 22), (100, 333, 700)):
        monkeypatch.setattr(exact_duplicates, "PARTITION_HASHES", partition)
        monkeypatch.setattr(exact_duplicates, "HASHES_AT_ONCE", at_once)
        monkeypatch.setattr(exact_duplicates, "RANGE", ranges)
        found = exact_duplicates.Duplicates(tmp_path / "hashes", tmp_path / f"work-{partition}")
        assert found.count == len(expected)
        assert found.between(0, 5000) == expected
        assert found.between(650, 1500) == {n: e for n, e in expected.items() if 650 <= n < 1500}


def test_statistics_are_those_of_plain_python(tmp_path):
    source = corpus_in(tmp_path, FORMATS["packed"])
    result = corpus_stats.stats(list(corpus_files([str(source)]).values()))
    texts = [text for each in TEXTS for text in each]
    lengths = sorted(map(len, texts))
    assert (result["documents"], result["characters"]) == (len(texts), sum(lengths))
    assert result["duplicates"]["documents"] == len(texts) - len(set(texts))
    assert result["lengths"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert [result["lengths"][key] for key in ("least", "median", "most")] == [lengths[0], lengths[89], lengths[-1]]
    assert sum(result["histogram"].values()) == len(texts)
    joined = "".join(texts)
    assert result["scripts"]["Han"] == pytest.approx(len(regex.findall(r"\p{Han}", joined)) / len(joined))
    assert "180, of which 0 empty" in corpus_stats.as_text(result)


def test_scripts_are_those_that_unicode_assigns_to_letters():
    letters = {
        "Latin": "aéßﬁ\uff21", "Han": "二語々", "Hiragana": "あん", "Katakana": "アｱ", "Hangul": "한ㄱ", "Greek": "Ωβ",
        "Cyrillic": "дЖ", "Arabic": "عر", "Hebrew": "א", "Devanagari": "हि", "Thai": "ก", "Armenian": "Ա",
    }  # fmt: skip
    for script, characters in letters.items():
        for character in characters:
            assert corpus_stats.script_of(character) == script, character
            assert regex.match(rf"\p{{{script}}}", character), character
    kinds = [corpus_stats.script_of(character) for character in "1.+ \n\u0301\ue000"]
    assert kinds == ["digits", "punctuation", "symbols", "spaces", "control", "combining marks", "control"]


def test_unknown_characters_are_counted_under_a_tokenizer(tmp_path):
    english = train_sentencepiece(["the quick brown fox jumps over the lazy dog"] * 50, 30, SentencePieceOptions())
    counts = Counter("the fox 日本 日 🎉")
    unknown = corpus_stats.unknown_characters(counts, english)
    assert unknown["most_common"][0] == ["日", 2]
    assert (unknown["characters"], unknown["distinct"]) == (4, 3)
    assert unknown["share"] == pytest.approx(4 / counts.total())
    bytes_ = train_sentencepiece(["abc abd"] * 50, 264, SentencePieceOptions(byte_fallback=True))
    assert corpus_stats.unknown_characters(counts, bytes_)["characters"] == 0


def test_unreadable_documents_are_counted_with_examples(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"no": 1}\nbad\n{"text": "a"}\n{"text": 5}\n')
    result = corpus_stats.stats([tmp_path / "a.jsonl"])
    assert (result["documents"], result["duplicates"]["documents"], result["unreadable"]["documents"]) == (2, 1, 3)
    places = [example.split(": ")[0].rsplit(":")[-1] for example in result["unreadable"]["examples"]]
    assert places == ["2", "3", "5"]
