import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from steelyard.core.recipe import load_recipe
from steelyard.tokens.samples import open_samples


def opened(*overrides: str, split: str = "train"):
    return open_samples(load_recipe("tiny.toml", overrides), split, 300)


def same(a, b) -> bool:
    names = ("document_index", "sample_index", "shuffle_index")
    return all(np.array_equal(getattr(a.maps, name), getattr(b.maps, name)) for name in names)


def test_maps_are_built_once_and_then_read(in_workplace, monkeypatch):
    first = opened()
    monkeypatch.setattr("steelyard.tokens.index_maps.build", None)
    assert same(opened(), first)


@pytest.mark.parametrize("part", ["doc_idx", "sample_idx", "shuffle_idx"])
def test_old_names_are_written_and_read(in_workplace, monkeypatch, part):
    first = opened("data.index_names=old")
    assert Path(f"tokens_text_document_train_indexmap_300ns_16sl_1234s_{part}.npy").is_file()
    monkeypatch.setattr("steelyard.tokens.index_maps.build", None)
    assert same(opened(), first)


@pytest.mark.parametrize("damage", ["cut", "empty", "header", "other"])
def test_a_damaged_array_is_built_again(in_workplace, damage):
    first = opened("data.index_cache=cache")
    (path,) = Path("cache").glob("*sample_index.npy")
    if damage == "other":
        np.save(path, np.zeros((3, 2), dtype=np.int32))
    elif damage == "header":
        path.write_bytes(path.read_bytes().replace(b")", b"(", 1))
    else:
        path.write_bytes(path.read_bytes()[:100] if damage == "cut" else b"")
    assert same(opened("data.index_cache=cache"), first)
    assert len(np.load(path)) == len(first.maps.sample_index)


def test_a_cache_that_cannot_be_written_is_said_and_does_without(in_workplace, capsys):
    Path("taken").touch()
    assert len(opened("data.index_cache=taken")) >= 300
    assert "not cached" in capsys.readouterr().err


def _build(number: int) -> tuple[int, int]:
    samples = opened("data.index_cache=shared")
    return os.getpid(), int(samples.maps.shuffle_index[:50].sum())


def test_many_processes_may_build_at_once(in_workplace):
    with multiprocessing.get_context("fork").Pool(6) as pool:
        results = pool.map(_build, range(6), chunksize=1)
    assert len({total for _, total in results}) == 1
    names = sorted(path.name for path in Path("shared").iterdir())
    assert len([name for name in names if name.endswith(".npy")]) == 3
    assert not [name for name in names if name.startswith(".tmp-")]


def test_folders_and_patterns_share_their_weight(in_workplace):
    from tests.conftest import write_tokens

    Path("many").mkdir()
    for number in range(3):
        write_tokens(in_workplace.path / "many" / f"part{number}", documents=40, seed=number)
    from_folder = opened("data.train=many")
    from_pattern = opened("data.train=many/part*")
    assert np.array_equal(from_folder.dataset_index, from_pattern.dataset_index)
    assert np.bincount(from_folder.dataset_index).tolist() == [100, 100, 100]


def test_validation_may_have_files_of_its_own(in_workplace):
    from tests.conftest import write_tokens

    write_tokens(in_workplace.path / "held-out", documents=50, seed=9)
    samples = opened("data.valid=held-out", split="valid")
    assert samples.tokens.prefix == "held-out"
    assert len(set(samples.maps.document_index.tolist())) == 50


def test_fixed_length_samples_are_whole_documents_in_a_new_order_each_epoch(in_workplace):
    from tests.conftest import write_documents

    write_documents("fixed", [np.full(17, n) for n in range(40)], 97)
    samples = opened("data.train=fixed", "data.fixed_length=true", "data.split=100")
    firsts = [int(samples[number][0]) for number in range(80)]
    assert sorted(firsts[:40]) == sorted(firsts[40:]) == list(range(40))
    assert firsts[:40] != firsts[40:]
    assert len(samples[0]) == 17


def test_maps_of_text_that_was_replaced_are_not_used(in_workplace):
    """As many documents and tokens as before, so that only the documents' lengths tell the two apart."""
    from tests.conftest import write_documents

    documents = [[number % 97] * (5 + number % 50) for number in range(200)]
    write_documents("tokens_text_document", documents, 97)
    stale = opened()
    write_documents("tokens_text_document", documents[:180][::-1] + documents[180:], 97)  # 180 of them are trained on.
    found = opened()
    assert not np.array_equal(found.maps.sample_index, stale.maps.sample_index)
    assert same(found, opened("data.index_cache=elsewhere"))
    assert {len(found[number]) for number in range(len(found))} == {17}


@pytest.mark.parametrize("part", ["document_index", "sample_index", "shuffle_index"])
def test_a_flipped_bit_of_a_map_is_noticed(in_workplace, part):
    first = opened("data.index_cache=cache")
    (path,) = Path("cache").glob(f"*{part}.npy")
    whole, random = path.read_bytes(), np.random.RandomState(0)
    header = len(whole) - getattr(first.maps, part).nbytes
    for bit in random.randint(8 * header, 8 * len(whole), size=40):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        assert same(opened("data.index_cache=cache"), first)
