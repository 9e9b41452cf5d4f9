"""Dropout by hash: as random as a generator's, and the same wherever it is computed."""

import pytest
import torch

from steelyard.core.recipe.families.gpt import GptConfig
from steelyard.model import Batch, build, init_weights
from steelyard.model.attention import rows_of
from steelyard.model.dropout import Dropout, drop, salt_of

SAMPLES, LENGTH, WIDTH, SHARE = 64, 64, 64, 0.1
# The share of n draws lies within five standard deviations of p but for one time in a million.
N = SAMPLES * LENGTH * WIDTH


def within(share: torch.Tensor, draws: int) -> bool:
    return bool(((share - SHARE).abs() < 5 * (SHARE * (1 - SHARE) / draws) ** 0.5).all())


def dropped(name: str = "a", seed: int = 1, first: int = 0) -> torch.Tensor:
    """True where an element is dropped."""
    dropout = Dropout(SHARE)
    dropout.salt = salt_of(seed, name)
    places = torch.arange(LENGTH).expand(SAMPLES, LENGTH)
    return dropout(torch.ones(SAMPLES, LENGTH, WIDTH), torch.arange(first, first + SAMPLES), places) == 0


@pytest.mark.parametrize("seed", [0, 1, 1234])
def test_the_share_is_dropped_at_every_sample_place_and_channel(seed):
    mask = dropped(seed=seed).double()
    assert within(mask.mean(), N)
    assert within(mask.mean(dim=(1, 2)), LENGTH * WIDTH)
    assert within(mask.mean(dim=(0, 2)), SAMPLES * WIDTH)
    assert within(mask.mean(dim=(0, 1)), SAMPLES * LENGTH)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 7, 32])
def test_neighbours_are_dropped_independently(dim, distance):
    mask = dropped().double() - SHARE
    length = mask.shape[dim] - distance
    together = (mask.narrow(dim, 0, length) * mask.narrow(dim, distance, length)).mean() / (SHARE * (1 - SHARE))
    assert abs(together) < 5 / (N * length / mask.shape[dim]) ** 0.5


@pytest.mark.parametrize("other", [{"name": "b"}, {"seed": 2}, {"first": SAMPLES}])
def test_another_module_seed_or_sample_drops_others(other):
    mask, another = dropped().double() - SHARE, dropped(**other).double() - SHARE
    assert abs((mask * another).mean()) / (SHARE * (1 - SHARE)) < 5 / N**0.5


def test_what_is_kept_is_scaled_up_and_evaluation_drops_nothing():
    x = torch.full((2, 4, 8), 3.0)
    dropout = Dropout(0.5)
    samples, places = torch.arange(2), torch.arange(4).expand(2, 4)
    assert set(dropout(x, samples, places).unique().tolist()) == {0.0, 6.0}
    assert torch.equal(dropout(x, None, None), x)
    assert torch.equal(dropout.eval()(x, samples, places), x)


def test_a_part_of_the_sequence_drops_what_the_whole_does():
    x, samples, places = torch.ones(2, 8, 16), torch.arange(2), torch.arange(8).expand(2, 8)
    dropout = Dropout(0.3)
    whole = dropout(x, samples, places)
    parts = []
    for index in range(4):
        dropout.shard = index, 4
        parts.append(dropout(x[:, :2], samples, places))
    assert torch.equal(torch.cat(parts, dim=1), whole)
    dropout.shard = 0, 1
    some = torch.tensor([0, 1, 6, 7])
    assert torch.equal(dropout(x[:, some], samples, places[:, some]), whole[:, some])


def test_attention_drops_its_share_in_every_head_and_some_heads_alone_drop_the_same():
    samples, places = torch.arange(16), torch.arange(64).expand(16, 64)
    rows = rows_of(samples, places, range(8), salt=5)
    mask = (drop(torch.ones(16, 8, 64, 64), rows, SHARE) == 0).double()
    assert within(mask.mean(dim=(0, 2, 3)), 16 * 64 * 64)
    assert within(mask.mean(dim=(0, 1, 2)), 16 * 8 * 64)
    assert torch.equal(rows_of(samples, places, range(4, 8), salt=5), rows[:, 4:])


def test_every_layer_of_a_model_has_dropouts_of_its_own():
    model = build(GptConfig(family="gpt", layers=3, hidden=8, heads=2, vocab=9, dropout=0.1, attention_dropout=0.1))
    model.seed_dropout(7)
    salts = [module.salt for module in model.modules() if hasattr(module, "salt")]
    assert len(salts) == len(set(salts)) == 1 + 3 * 3
    assert 0 not in salts
    init_weights(model, 1, 0.02, 3)
    tokens = torch.arange(8)[None] % 9
    first, again, other = (model(Batch(tokens, sample_ids_B=torch.tensor([number]))) for number in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
