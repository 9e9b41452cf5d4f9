import json

import pytest

from steelyard.core.errors import UserError
from steelyard.text.corpus import documents
from steelyard.text.stdlib import write_corpus


def test_text_has_a_document_per_line_and_jsonl_one_per_object(tmp_path):
    (tmp_path / "a.txt").write_text("eins\n\n二\r\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "line\\nbreak"}\n{"text": ""}\n')
    paths = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    assert list(documents(paths)) == ["eins", "", "二", "line\nbreak", ""]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"{", "not JSON"),
        (b'{"txt": "a"}', "'text'"),
        (b'{"text": 3}', "'text'"),
        (b"\xff", "not UTF-8"),
        (b"[]", "'text'"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path, line, complaint):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(UserError, match=complaint) as refused:
        list(documents([path]))
    assert refused.value.where == f"{path}:2"


def test_the_standard_library_is_a_corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    count = write_corpus(path)
    names = [json.loads(line)["file"] for line in path.read_text().splitlines()]
    assert count == len(names) > 200
    assert "argparse.py" in names
    assert not any("site-packages" in name or "test" in name.split("/") for name in names)
