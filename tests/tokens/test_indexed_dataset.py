import struct
from pathlib import Path

import numpy as np
import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.tokens import checksums
from steelyard.tokens.indexed_dataset import IndexedTokens, token_dtype
from steelyard.tokens.inspect import verify
from tests.conftest import write_documents


def test_the_files_are_laid_out_as_megatron_lays_them_out(tmp_path):
    write_documents(tmp_path / "d", [[1, 2, 3], [], [4]], vocab_size=100)
    assert (tmp_path / "d.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 4)
    expected += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<4q", 0, 1, 1, 2)
    assert (tmp_path / "d.idx").read_bytes() == expected


def test_documents_come_back(tmp_path):
    random = np.random.RandomState(0)
    documents = [random.randint(0, 70_000, size=random.randint(0, 50)) for _ in range(100)]
    write_documents(tmp_path / "d", documents, vocab_size=70_000)
    read = IndexedTokens(tmp_path / "d")
    assert read.dtype == np.int32
    assert all(np.array_equal(a, b) for a, b in zip(read.documents(), documents, strict=True))


@pytest.mark.parametrize(("vocab", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_small_vocabularies_take_two_bytes(vocab, dtype):
    assert token_dtype(vocab) == dtype


@pytest.mark.parametrize("cut", [0, 5, 20, 40])
def test_a_truncated_index_is_one_clear_message(tmp_path, cut):
    write_documents(tmp_path / "d", [[1, 2, 3]], vocab_size=100)
    whole = (tmp_path / "d.idx").read_bytes()
    (tmp_path / "d.idx").write_bytes(whole[:cut])
    with pytest.raises(UserError, match="index"):
        IndexedTokens(tmp_path / "d")


def test_a_truncated_token_file_is_one_clear_message(tmp_path):
    write_documents(tmp_path / "d", [[1, 2, 3]], vocab_size=100)
    (tmp_path / "d.bin").write_bytes(b"\x01\x00")
    with pytest.raises(UserError, match=r"needs 6"):
        IndexedTokens(tmp_path / "d")


def flips(path: Path, first: int = 0):
    """Flip each bit of a file in turn, from a byte on; the file is whole again afterwards."""
    whole = path.read_bytes()
    for bit in range(8 * first, 8 * len(whole)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        yield bit
    path.write_bytes(whole)


DOCUMENTS = [[1, 2, 3], [], [4] * 7, [5], [6, 7]]


def test_no_flipped_bit_of_lengths_or_pointers_is_accepted(tmp_path):
    """An entry of the document index may be another that makes sense too; for that there are checksums."""
    write_documents(tmp_path / "small", DOCUMENTS, 97)
    (tmp_path / "small.sums").unlink(missing_ok=True)
    documents_at = 34 + 4 * 12
    for bit in flips(tmp_path / "small.idx"):
        if bit < 8 * documents_at:
            with pytest.raises(UserError):
                IndexedTokens(tmp_path / "small")


@pytest.mark.parametrize("kind", ["idx", "bin", pytest.param("sums", marks=pytest.mark.slow)])
def test_no_flipped_bit_of_a_pair_with_checksums_is_accepted(tmp_path, kind):
    write_documents(tmp_path / "small", DOCUMENTS, 97)
    checksums.write(tmp_path / "small")
    path = tmp_path / f"small.{kind}"
    for bit in flips(path):
        if kind == "sums" and bit // 8 == path.stat().st_size - 1:  # The newline at the end.
            continue
        with pytest.raises(UserError):
            IndexedTokens(tmp_path / "small")
    assert len(IndexedTokens(tmp_path / "small")) == 4


def test_a_flipped_bit_between_the_blocks_that_opening_reads_is_found_by_verify(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "SMALLEST_BLOCK", 64)
    write_documents(tmp_path / "large", [[number % 97] * 40 for number in range(50)], 97)
    checksums.write(tmp_path / "large")
    found = {"opening": 0, "verify": 0}
    path = tmp_path / "large.bin"
    whole = path.read_bytes()
    for place in range(0, len(whole), 61):
        content = bytearray(whole)
        content[place] ^= 4
        path.write_bytes(content)
        for name, look in (("opening", IndexedTokens), ("verify", verify)):
            try:
                look(str(tmp_path / "large"))
            except (UserError, RuntimeFailure):
                found[name] += 1
    assert 0 < found["opening"] < found["verify"] == len(range(0, len(whole), 61))


def test_a_pair_that_another_program_wrote_over_is_refused_with_the_way_out(tmp_path):
    write_documents(tmp_path / "pair", DOCUMENTS, 97)
    checksums.write(tmp_path / "pair")
    write_documents(tmp_path / "pair", DOCUMENTS[::-1], 97)
    with pytest.raises(UserError, match="does not match its checksum") as refused:
        IndexedTokens(tmp_path / "pair")
    assert f"delete {tmp_path / 'pair.sums'}" in refused.value.hint
