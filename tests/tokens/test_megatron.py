"""Bit for bit what megatron-core does, by running it."""

import functools
import platform
import warnings

import numpy as np
import pytest

from steelyard.core.recipe import load_recipe
from steelyard.tokens.blend import blend_order, normalised
from steelyard.tokens.indexed_dataset import IndexedTokens
from steelyard.tokens.samples import open_samples
from tests.conftest import write_documents, write_tokens

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.datasets.gpt_dataset")
    from megatron.core.datasets import helpers
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

X86 = ("x86_64", "AMD64")


class Tokenizer:
    """What megatron-core wants of a tokenizer."""

    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012
    eod = 0
    pad = -1
    vocab_size = 97


def megatrons(sizes, tmp_path, **options):
    """megatron-core's own datasets for training, validation and test."""
    config = GPTDatasetConfig(
        random_seed=options.pop("seed", 1234),
        sequence_length=options.pop("sequence_length", 16),
        split=options.pop("split", "90,10,0"),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **options,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def same(ours, theirs, number):
    row = theirs[number]
    return np.array_equal(ours[number], np.append(row["tokens"].numpy(), row["labels"].numpy()[-1]))


@functools.cache
def installed_order():
    """The order of blends that megatron-core's helper has as it was compiled for this machine."""
    orders = ["standard", "fma"]
    for weights in (np.random.RandomState(0).rand(20) ** 4 + 1e-4, np.ones(300), np.arange(1, 21)):
        shares = normalised(weights)
        dataset_index, sample_index = np.zeros(12_000, np.int16), np.zeros(12_000, np.int64)
        helpers.build_blending_indices(dataset_index, sample_index, shares, len(shares), 12_000, False)
        orders = [order for order in orders if np.array_equal(blend_order(shares, 12_000, order)[0], dataset_index)]
    if not orders and platform.machine() not in X86:
        pytest.skip("the helper was built by a compiler that fuses some datasets and not others: see docs/tokens.md")
    return orders[0]


@pytest.mark.parametrize("vocab", [97, 65_499, 65_500, 100_000])
def test_megatron_reads_what_we_write_and_we_read_what_it_writes(tmp_path, vocab):
    random = np.random.RandomState(vocab)
    documents = [random.randint(0, vocab, size=random.randint(0, 40)) for _ in range(50)]
    write_documents(tmp_path / "ours", documents, vocab)
    theirs = IndexedDataset(str(tmp_path / "ours"))
    assert [list(theirs[n]) for n in range(len(theirs))] == [list(d) for d in documents if len(d)]

    import torch

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=IndexedTokens(tmp_path / "ours").dtype.type)
    for document in documents:
        if len(document):
            builder.add_item(torch.from_numpy(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("samples", [1, 50, 300, 700, 1000, 1500, 2000])
@pytest.mark.parametrize(("split", "length", "seed"), [("90,10,0", 16, 1234), ("969,31", 7, 1), ("1,1,1", 33, 42)])
def test_index_maps_are_megatrons(in_workplace, tmp_path, samples, split, length, seed):
    train, valid, _ = megatrons(
        [samples, samples // 3 + 1, 0],
        tmp_path,
        blend=(["tokens_text_document"], None),
        split=split,
        sequence_length=length,
        seed=seed,
        path_to_cache=str(tmp_path / "theirs"),
    )
    recipe = load_recipe(
        "tiny.toml",
        [f"data.split={split}", f"data.sequence_length={length}", f"train.seed={seed}", "data.index_cache=ours"],
    )
    for name, theirs, wanted in (("train", train, samples), ("valid", valid, samples // 3 + 1)):
        ours = open_samples(recipe, name, wanted)
        for part in ("document_index", "sample_index", "shuffle_index"):
            mine, other = getattr(ours.maps, part), getattr(theirs, part)
            assert mine.dtype == other.dtype
            assert np.array_equal(mine, other)
        assert len(ours) == len(theirs)
        assert all(same(ours, theirs, number) for number in range(0, len(ours), 37))


def test_megatrons_cache_is_used_and_its_arrays_are_not_built_again(in_workplace, tmp_path, monkeypatch):
    megatrons([200, 0, 0], tmp_path, blend=(["tokens_text_document"], None), path_to_cache=str(tmp_path / "cache"))
    monkeypatch.setattr("steelyard.tokens.index_maps.build", None)
    samples = open_samples(load_recipe("tiny.toml", [f"data.index_cache={tmp_path / 'cache'}"]), "train", 200)
    assert len(samples) >= 200


def test_a_blend_gives_megatrons_order(in_workplace, tmp_path):
    weights = [0.5, 3.0, 1.2, 0.01]
    prefixes = [f"part{number}" for number in range(4)]
    for number, prefix in enumerate(prefixes):
        write_tokens(in_workplace.path / prefix, documents=30 + number, seed=number)
    train, valid, _ = megatrons([500, 40, 0], tmp_path, blend=(prefixes, weights))
    sources = ", ".join(f"{{prefix='{p}', weight={w}}}" for p, w in zip(prefixes, weights, strict=True))
    recipe = load_recipe("tiny.toml", [f"data.train=[{sources}]", f"data.blend_order={installed_order()}"])
    for name, theirs, wanted in (("train", train, 500), ("valid", valid, 40)):
        ours = open_samples(recipe, name, wanted)
        assert np.array_equal(ours.dataset_index, theirs.dataset_index)
        assert np.array_equal(ours.sample_index, theirs.dataset_sample_index)
        assert all(same(ours, theirs, number) for number in range(len(ours)))


def test_the_installed_helper_has_a_known_order_and_on_x86_the_standard_one():
    assert installed_order() in (["standard"] if platform.machine() in X86 else ["standard", "fma"])
