import itertools

import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.sparsity.patterns import Pattern, place_hash


@pytest.mark.parametrize("text", ["2:4", "1:4", "4:8", "3:7", "0.5", "0.75"])
def test_a_pattern_reads_back_as_it_is_written(text):
    assert str(Pattern.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "4:4", "5:4", "0:4", "2:", "1", "1.0", "0", "0.0", "-0.5", "half", "2:4:8", "1:9999"]
)
def test_what_is_no_pattern_is_refused(text):
    with pytest.raises(UserError, match="not a sparsity pattern"):
        Pattern.parse(text)


def test_candidates_come_in_the_order_that_learned_logits_have():
    written = ["".join(str(int(bit)) for bit in row) for row in Pattern.parse("2:4").candidates()]
    assert written == ["1100", "1010", "1001", "0110", "0101", "0011"]
    assert Pattern.parse("1:4").candidates().tolist() == torch.eye(4).tolist()


@pytest.mark.parametrize("text", ["2:4", "1:4", "4:8", "2:3"])
def test_every_group_keeps_its_best_as_trying_all_masks_finds_it(text):
    pattern = Pattern.parse(text)
    scores = torch.rand(5, 24, generator=torch.Generator().manual_seed(0))
    mask = pattern.keep_best(scores)
    assert pattern.follows(mask)
    for group, kept in zip(scores.view(-1, pattern.group), mask.view(-1, pattern.group), strict=True):
        best = max(
            itertools.combinations(range(pattern.group), pattern.keep), key=lambda c: float(group[list(c)].sum())
        )
        assert kept.nonzero().flatten().tolist() == list(best)


@pytest.mark.parametrize("text", ["2:4", "1:4", "4:8", "0.5", "0.75"])
def test_equal_scores_are_kept_without_preference_for_a_row_or_a_column(text):
    pattern = Pattern.parse(text)
    mask = pattern.keep_best(torch.ones(512, 64))
    assert pattern.follows(mask)
    share = mask.float().mean()
    deviation = (share * (1 - share)).sqrt() * 5
    assert (mask.float().mean(0) - share).abs().max() < deviation / 512**0.5
    assert (mask.float().mean(1) - share).abs().max() < deviation / 64**0.5


def test_of_equal_scores_only_those_at_the_cut_are_decided_by_the_hash():
    scores = torch.tensor([[3.0, 1.0, 1.0, 1.0]]).repeat(256, 1)
    mask = Pattern.parse("2:4").keep_best(scores)
    assert mask[:, 0].all()
    assert (mask.sum(0)[1:] > 60).all()


def test_a_shard_keeps_the_ties_that_the_whole_matrix_keeps():
    scores = torch.randint(0, 3, (24, 48), generator=torch.Generator().manual_seed(0)).float()
    pattern = Pattern.parse("2:4")
    whole = pattern.keep_best(scores)
    by_rows = [(scores[at : at + 8], (at, 0)) for at in range(0, 24, 8)]
    by_columns = [(scores[:, at : at + 16], (0, at)) for at in range(0, 48, 16)]
    for shards, dim in ((by_rows, 0), (by_columns, 1)):
        masks = [pattern.keep_best(shard, place_hash(shard.shape, shard.device, first)) for shard, first in shards]
        assert torch.equal(torch.cat(masks, dim), whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", ["2:4", "4:8", "0.5"])
def test_a_gpu_keeps_the_ties_that_a_cpu_keeps(text):
    scores = torch.randint(0, 3, (512, 1024), generator=torch.Generator().manual_seed(0)).float()
    pattern = Pattern.parse(text)
    assert torch.equal(pattern.keep_best(scores.cuda()).cpu(), pattern.keep_best(scores))


def test_the_kept_ties_are_those_of_earlier_versions():
    # Masks of a run, of its export and of another machine must agree: the hash is part of the format.
    kept = Pattern.parse("2:4").keep_best(torch.zeros(3, 8))
    assert ["".join(map(str, row)) for row in kept.int().tolist()] == ["01101010", "10100110", "01011001"]


def test_tied_groups_are_those_whose_cut_is_between_equal_scores():
    pattern = Pattern.parse("2:4")
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [4.0, 2.0, 2.0, 1.0], [3.0, 3.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert pattern.ties(scores, pattern.keep_best(scores)).tolist() == [False, True, False, True]
    half = Pattern.parse("0.5")
    assert half.ties(scores, half.keep_best(scores)).tolist() == [False, True, False, True]
    together = half.keep_best(scores, across_rows=True)
    assert half.ties(scores, together, across_rows=True).tolist() == [False]


def test_a_share_is_taken_from_each_row_or_from_all_rows_together():
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0], [8.0, 7.0, 6.0, 5.0]])
    half = Pattern.parse("0.5")
    assert half.keep_best(scores).int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0]]
    assert half.keep_best(scores, across_rows=True).int().tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert half.follows(half.keep_best(scores, across_rows=True))


def test_one_wrong_group_among_many_is_noticed():
    pattern = Pattern.parse("2:4")
    mask = pattern.keep_best(torch.rand(64, 64))
    mask[63, 60:64] = torch.tensor([True, True, True, False])
    assert not pattern.follows(mask)


def test_inputs_that_groups_do_not_divide_are_refused_by_name():
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.down\.weight has 30 inputs"):
        Pattern.parse("2:4").check({"layers.0.mlp.down.weight": (8, 30)})
