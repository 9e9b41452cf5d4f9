"""Which rank is slow, told by the ranks themselves; and what they say of themselves when they have met."""

import json
import os
import time
from collections import Counter

import pytest

from steelyard.observe.rules.machine_rules import requested
from steelyard.observe.run_state import RunState
from steelyard.training.extension import Extension
from tests.parallel.conftest import Layouts
from tests.parallel.test_layouts import parallel


class Slow(Extension):
    """One rank computes a little more in each step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def weigh(self, engine, batch):
        if engine.mesh.world.index == self.rank:
            end = time.thread_time() + 0.4
            while time.thread_time() < end:
                pass
        return super().weigh(engine, batch)


LAYOUTS = {
    "data, all sharded": parallel(data=4, zero=3),
    "tensor": parallel(tensor=2, data=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_slow_rank_is_named_though_all_take_as_long_as_it(layouts: Layouts, layout: str):
    run = layouts.run(4, "llama", *LAYOUTS[layout], "train.steps=10", "eval.every=0", extension=Slow(2))
    reported = [record["rank_seconds"] for record in run.metrics() if "rank_seconds" in record][1:]
    [(slowest, _)] = Counter(each["slowest"] for each in reported).most_common(
        1
    )  # On a busy machine not in every record.
    assert slowest == 2
    assert sum(each["seconds"] - each["median"] for each in reported) > 0


def test_a_stage_of_one_rank_is_compared_with_its_own_past_and_not_with_longer_stages(layouts: Layouts):
    run = layouts.run(2, "llama", *parallel(pipeline=2, partition="1-3"), "train.steps=8", "eval.every=0")
    reported = [record["rank_seconds"] for record in run.metrics() if "rank_seconds" in record]
    longer = [each for each in reported[3:] if each["seconds"] > 2 * each["median"]]
    assert len(longer) < len(reported[3:]) / 2


def test_the_ranks_of_a_host_say_who_they_are_and_what_they_do(layouts: Layouts):
    began = time.time()
    run = layouts.run(4, "llama", *parallel(pipeline=2, data=2), "train.steps=2")
    (path,) = (run.path / "hosts").iterdir()
    reported = json.loads(path.read_text())
    assert reported["host"] == path.stem == os.uname().nodename
    assert reported["ranks"] == [0, 1, 2, 3]
    assert len(set(reported["process ids"])) == 4
    assert began <= reported["clock"] <= time.time()
    assert {"torch", "steelyard", "python"} <= reported["versions"].keys()
    state = RunState(run.path).refresh()
    assert reported["layout"] == {**requested(state), "world": 4, "data": 2}


def test_a_rank_that_is_alone_has_a_file_and_no_rank_seconds(layouts: Layouts):
    run = layouts.run(1, "llama", "train.steps=2")
    assert all("rank_seconds" not in record for record in run.metrics())
    assert all(record["time"] <= time.time() for record in run.metrics())
    (path,) = (run.path / "hosts").iterdir()
    assert json.loads(path.read_text())["ranks"] == [0]
