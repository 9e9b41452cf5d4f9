import os
import struct
from pathlib import Path

import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.tokens import checksums
from steelyard.tokens.indexed_dataset import IndexedTokens
from steelyard.tokens.inspect import describe, histogram_lines, verify
from steelyard.tokens.merge import merge
from tests.conftest import write_documents


@pytest.fixture
def pair(tmp_path) -> str:
    prefix = str(tmp_path / "pair")
    write_documents(prefix, [[1, 2, 3], [], [4], list(range(20))], vocab_size=100)
    return prefix


def damage(pair: str, kind: str) -> None:
    index, tokens = Path(f"{pair}.idx"), Path(f"{pair}.bin")
    content = bytearray(index.read_bytes())
    if kind == "negative length":
        content[34:38] = struct.pack("<i", -3)
    elif kind == "wild pointer":
        content[34 + 12 + 8 : 34 + 12 + 16] = struct.pack("<q", 2)
    elif kind == "document index":
        content[-8:] = struct.pack("<q", 1)
    elif kind == "longer index":
        content += b"garbage"
    elif kind == "no entries":
        content[26:34] = struct.pack("<Q", 0)
    elif kind == "odd tokens":
        tokens.write_bytes(tokens.read_bytes() + b"x")
    elif kind == "more tokens":
        tokens.write_bytes(tokens.read_bytes() + b"xxxx")
    elif kind == "fewer tokens":
        tokens.write_bytes(tokens.read_bytes()[:-2])
    index.write_bytes(content)


KINDS = ["negative length", "wild pointer", "document index", "longer index", "no entries"]
KINDS += ["odd tokens", "more tokens", "fewer tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_found_and_never_merged(pair, tmp_path, kind):
    assert verify(pair)["tokens"] == 24
    damage(pair, kind)
    with pytest.raises(RuntimeFailure):
        verify(pair)
    with pytest.raises(RuntimeFailure):
        merge([pair, pair], str(tmp_path / "merged"))
    assert not (tmp_path / "merged.idx").exists()


def test_a_pair_is_complete_only_with_its_checksums(pair, tmp_path, monkeypatch):
    def killed(*_):
        raise OSError("as if killed here")

    with monkeypatch.context() as patched:
        patched.setattr(checksums.files, "write_text", killed)
        with pytest.raises(OSError, match="as if killed"):
            merge([pair, pair], str(tmp_path / "merged"))
    assert not (tmp_path / "merged.idx").exists()
    merge([pair, pair], str(tmp_path / "merged"))
    assert checksums.check(tmp_path / "merged", everything=True)


def test_an_id_outside_the_vocabulary_is_found_with_its_place(pair):
    with pytest.raises(RuntimeFailure, match="token 23 has the id 19"):
        verify(pair, vocab_size=19)


def test_a_pair_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError):
        verify(str(tmp_path / "nothing"))


@pytest.mark.parametrize("by_kernel", [True, False])
def test_merged_pairs_hold_all_documents_in_order(pair, tmp_path, monkeypatch, by_kernel):
    if not by_kernel:  # As on macOS.
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    merge([pair, pair], str(tmp_path / "merged"))
    once = [ids.tolist() for ids in IndexedTokens(pair).documents()]
    assert [ids.tolist() for ids in IndexedTokens(tmp_path / "merged").documents()] == once * 2
    verify(str(tmp_path / "merged"), vocab_size=100)


def test_a_description_counts_and_shows(pair):
    reported = describe(f"{pair}.bin", decode=lambda ids: " ".join(map(str, ids)))
    assert (reported["documents"], reported["sequences"], reported["tokens"], reported["longest"]) == (4, 3, 24, 20)
    assert reported["sample"] == "1 2 3"
    assert reported["histogram"] == {"1 to 1": 1, "2 to 3": 1, "16 to 31": 1}
    assert len(histogram_lines(reported["histogram"])) == 3
