import numpy as np
import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.tokens import index_maps
from steelyard.tokens.blend import blend_order
from steelyard.tokens.indexed_dataset import IndexedTokens
from steelyard.tokens.samples import open_samples


def cuts_one_by_one(lengths, document_index, sequence_length, samples):
    """The specification: walk the stream token by token."""
    stream = [(position, offset) for position, d in enumerate(document_index) for offset in range(lengths[d])]
    return np.array([stream[number * sequence_length] for number in range(samples + 1)])


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 16])
@pytest.mark.parametrize("seed", range(20))
def test_cuts_equal_a_walk_along_the_stream(seed, block, monkeypatch):
    monkeypatch.setattr(index_maps, "DOCUMENTS_AT_ONCE", block)
    random = np.random.RandomState(seed)
    lengths = random.randint(0, 9, size=random.randint(2, 30)).astype(np.int32)
    lengths[0] += 5
    length = int(random.randint(1, 12))
    bounds = (0, len(lengths))
    plan = index_maps.plan(lengths, bounds, int(random.randint(1, 40)), length)
    maps = index_maps.build(lengths, bounds, plan, seed)
    expected = cuts_one_by_one(lengths, maps.document_index, length, len(maps.sample_index) - 1)
    assert np.array_equal(maps.sample_index, expected)


def test_samples_cover_an_epoch_once_and_share_their_border_token(in_workplace):
    recipe = load_recipe("tiny.toml", ["data.split=100", "data.sequence_length=8"])
    tokens = IndexedTokens("tokens_text_document")
    per_epoch = (int(tokens.lengths.sum()) - 1) // 8
    samples = open_samples(recipe, "train", per_epoch)
    assert len(samples) == per_epoch
    stream = np.concatenate([tokens.sequence(d) for d in samples.maps.document_index])
    rows = np.stack([samples[number] for number in np.argsort(samples.maps.shuffle_index)])
    assert np.array_equal(rows[:, :-1].ravel(), stream[: per_epoch * 8])
    assert np.array_equal(rows[:-1, -1], rows[1:, 0])


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.7, 0.2, 0.1]])
def test_a_blend_keeps_its_shares_at_every_moment(weights):
    datasets, numbers = blend_order(weights, 1000)
    for d, weight in enumerate(weights):
        taken = np.cumsum(datasets == d)
        assert np.abs(taken - weight * np.arange(1, 1001)).max() <= 1
        assert np.array_equal(numbers[datasets == d], np.arange(taken[-1]))


def test_data_that_cannot_fill_one_sequence_is_refused(in_workplace):
    with pytest.raises(UserError, match="too few"):
        open_samples(load_recipe("tiny.toml", ["data.split=100,0,0"]), "valid", 1)


def test_ids_beyond_the_vocabulary_are_refused(in_workplace):
    with pytest.raises(UserError, match=r"model\.vocab"):
        open_samples(load_recipe("tiny.toml", ["model.vocab=50"]), "train", 1)
