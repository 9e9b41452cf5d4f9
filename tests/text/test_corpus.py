import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.errors import UserError
from steelyard.text import corpus
from steelyard.text.convert_corpus import convert
from steelyard.text.corpus import documents, pieces, records
from steelyard.text.stdlib import write_corpus

TEXTS = ["eins", "二 three", "안녕 🎉", "tab\tand \u2028 separator", "x" * 500]
NAMES = [f"c{base}{packed}" for base in (".txt", ".jsonl", ".parquet") for packed in ("", ".gz", ".zst")]


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_any_format_converts_to_any_other_and_back(tmp_path, source, target):
    first = tmp_path / "first.jsonl"
    first.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert convert([first], tmp_path / source) == len(TEXTS)
    (tmp_path / "out").mkdir()
    convert([tmp_path / source], tmp_path / "out" / target)
    assert list(documents([tmp_path / "out" / target])) == TEXTS


def test_utf8_is_kept_as_it_is(tmp_path):
    (tmp_path / "a.txt").write_text("日本語\n", encoding="utf-8")
    convert([tmp_path / "a.txt"], tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text(encoding="utf-8") == '{"text":"日本語"}\n'


def test_objects_keep_all_their_keys(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "id": 1, "tags": ["x"]}\n{"text": "b", "id": 2, "tags": []}\n')
    convert([tmp_path / "a.jsonl"], tmp_path / "b.parquet")
    convert([tmp_path / "b.parquet"], tmp_path / "c.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert lines == [{"text": "a", "id": 1, "tags": ["x"]}, {"text": "b", "id": 2, "tags": []}]


def test_a_key_that_only_some_objects_have_is_kept_or_refused_never_dropped(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "extra": 5}\n')
    convert([tmp_path / "a.jsonl"], tmp_path / "b.parquet")
    convert([tmp_path / "b.parquet"], tmp_path / "c.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "c.jsonl").read_text().splitlines()]
    assert lines == [{"text": "a", "extra": None}, {"text": "b", "extra": 5}]
    monkeypatch.setattr("steelyard.text.convert_corpus.ROWS_AT_ONCE", 1)
    with pytest.raises(UserError, match="'extra' first appears after document 1"):
        convert([tmp_path / "a.jsonl"], tmp_path / "d.parquet")
    with pytest.raises(UserError, match="is both input and output"):
        convert([tmp_path / "a.jsonl"], tmp_path / "a.jsonl")


def test_a_document_that_a_line_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "two\\nlines"}\n')
    with pytest.raises(UserError, match="line break"):
        convert([tmp_path / "a.jsonl"], tmp_path / "b.txt")
    assert not (tmp_path / "b.txt").exists()
    convert([tmp_path / "a.jsonl"], tmp_path / "b.txt", mode="blank")
    assert list(documents([tmp_path / "b.txt"], mode="blank")) == ["two\nlines"]


def test_a_text_file_has_documents_by_line_by_blank_line_or_is_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\r\nb\n\n \nc\nd\n\n")
    assert list(documents([path])) == ["a", "b", "", " ", "c", "d", ""]
    assert list(documents([path], mode="blank")) == ["a\nb", "c\nd"]
    assert list(documents([path], mode="file")) == ["a\r\nb\n\n \nc\nd\n\n"]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="ab \n二", max_size=12).map(lambda text: text.replace("\n", " ")), max_size=40),
    size=st.integers(1, 60),
    mode=st.sampled_from(["line", "blank"]),
    ending=st.booleans(),
)
def test_pieces_of_any_size_hold_the_same_documents(tmp_path_factory, lines, size, mode, ending):
    folder = tmp_path_factory.mktemp("pieces")
    text = "\n".join(lines) + ("\n" if ending else "")
    (folder / "a.txt").write_text(text, encoding="utf-8")
    (folder / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    whole = list(documents([folder / "a.txt"], mode=mode))
    for name in ("a.txt", "a.txt.gz"):
        cut = [record["text"] for piece in pieces(folder / name, mode, size) for record in records(piece)]
        assert cut == whole


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "not JSON"),
        (b'{"txt": "a"}', "no text under the key 'text'"),
        (b'{"text": 3}', "a int, not text"),
        (b'{"text": "\xff"}', "not JSON"),
        (b"[1]", "not an object"),
        (b"", "empty"),
        (b'{"text": "a"} {"text": "b"}', "not JSON"),
    ],
)
@pytest.mark.parametrize("name", ["bad.jsonl", "bad.jsonl.gz"])
def test_a_bad_line_is_refused_by_file_and_number(tmp_path, monkeypatch, line, complaint, name):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 20)
    path = tmp_path / name
    data = b'{"text": "good"}\n' * 3 + line + b"\n" + b'{"text": "good"}\n'
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(UserError, match=complaint) as refused:
        list(documents([path]))
    assert refused.value.where == f"{path}:4"


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.parquet.gz"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "empty"])
def test_a_damaged_file_is_one_clear_message(tmp_path, name, damage):
    (tmp_path / "good.jsonl").write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(5000)))
    path = tmp_path / name
    convert([tmp_path / "good.jsonl"], path)
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "garbage": b"garbage" * 100, "empty": b""}[damage])
    if damage == "empty" and "jsonl" in name:
        assert list(documents([path])) == []
        return
    with pytest.raises(UserError) as refused:
        list(documents([path]))
    assert str(path) in str(refused.value)


def test_a_file_of_unknown_form_is_refused(tmp_path):
    (tmp_path / "a.csv").touch()
    with pytest.raises(UserError, match=r"\.jsonl"):
        list(documents([tmp_path / "a.csv"]))


def test_the_standard_library_is_a_corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    count = write_corpus(path)
    names = [json.loads(line)["file"] for line in path.read_text().splitlines()]
    assert count == len(names) > 200
    assert "argparse.py" in names
    assert not any("site-packages" in name or "test" in name.split("/") for name in names)
