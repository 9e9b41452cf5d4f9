import struct

import numpy as np
import pytest

from steelyard.core.errors import UserError
from steelyard.tokens.indexed import IndexedTokens, token_dtype
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
