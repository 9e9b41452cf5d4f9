"""Ranks that read different recipes do not begin."""

import socket

import pytest

from steelyard.training import config_check
from tests.parallel import jobs
from tests.parallel.conftest import TWO_STEPS, Layouts

pytestmark = pytest.mark.timeout(600)  # The first of these tests imports everything for the pool.


def test_ranks_that_read_different_recipes_name_what_differs_and_write_nothing(layouts: Layouts):
    ours = [*TWO_STEPS, "optim.clip=0.5"]
    stale = [*ours, "train.micro_batch=2", "train.seed=7"]
    said = layouts.ranks.do(2, jobs.training_by_another_recipe, [ours, stale], "astray")
    here = socket.gethostname()
    assert said[0].startswith(
        "the ranks read different recipes:\n"
        f"  train.micro_batch: 1 on rank 0 ({here}), 2 on rank 1 ({here})\n"
        f"  train.seed: 1234 on rank 0 ({here}), 7 on rank 1 ({here})\n"
    ), said[0]
    assert said[0].endswith("True")  # Shared: one rank tells it.
    assert said[1] == said[0]
    assert not (layouts.folder / "astray").exists()


def test_a_copy_of_the_recipe_and_of_its_files_elsewhere_is_the_same_recipe(layouts: Layouts):
    elsewhere = ["name=copied", "site.slurm.account=other", f"data.train={layouts.folder / 'tokens_text_document'}"]
    said = layouts.ranks.do(2, jobs.training_by_another_recipe, [TWO_STEPS, [*TWO_STEPS, *elsewhere]], "copied")
    assert said == ["trained", "trained"]


def test_many_hosts_are_named_in_few_words():
    ours, stale = {"train.seed": "1"}, {"train.seed": "2", "log.every": "5"}
    everyone = [(f"a{rank // 2}", ours) for rank in range(16)] + [("b1", stale), ("b2", stale)]
    assert config_check.differences(everyone) == [
        "log.every: unset on a0, a1, a2, a3 and 4 more, 5 on b1 and b2",
        "train.seed: 1 on a0, a1, a2, a3 and 4 more, 2 on b1 and b2",
    ]
