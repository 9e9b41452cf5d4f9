import pytest
import torch

from tests.model.test_loss import drawn, plain
from tests.parallel import jobs
from tests.parallel.conftest import Layouts, difference


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows_at_once", [4, 100])
def test_a_head_whose_rows_lie_on_several_ranks_gives_the_same_loss_and_gradients(
    layouts: Layouts, ranks, rows_at_once
):
    # Of 128 rows 31 only pad: of 4 ranks the last holds one real row, so that its share is nearly empty.
    x, weight, labels, weights = drawn()
    plain(x, weight, labels, weights).backward()
    answers = layouts.ranks.do(ranks, jobs.loss_over_the_vocabulary, rows_at_once)
    for answer in answers:
        torch.testing.assert_close(answer["loss"], plain(x, weight, labels, weights).detach())
        torch.testing.assert_close(answer["x"], x.grad)
    torch.testing.assert_close(torch.cat([answer["weight"] for answer in answers]), weight.grad)


def test_a_rank_may_hold_rows_that_all_only_pad(layouts: Layouts):
    padded = ["model.vocab_multiple=256", "parallel.tensor=2", "train.micro_batch=4", "train.steps=2"]
    alone = layouts.alone("llama", "model.vocab_multiple=256", "train.steps=2")
    curve = layouts.run(2, "llama", *padded).metrics()
    assert difference(curve, alone) < 1e-6
