"""What ranks write when steps stop: the collective that hangs, and the rank that keeps others waiting."""

import threading
import time

import pytest
import torch.distributed as dist

from steelyard.observe import flight_records
from steelyard.training import watchdog
from steelyard.training.extension import Extension
from tests.parallel.conftest import Layouts
from tests.parallel.test_layouts import parallel

AWAY = 10.0


class Away(Extension):
    """One rank does something else for a while in the third step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        if step == 3:
            watchdog.LEAST_PAUSE, watchdog.MUCH = 0.5, 0.0
            threading.Timer(AWAY / 2, self.write_no_more).start()
            if dist.get_rank() == self.rank:
                self.be_away()

    def write_no_more(self) -> None:
        """The records of this moment stay."""
        watchdog.LEAST_PAUSE, watchdog.MUCH = 20.0, 4.0

    def be_away(self) -> None:
        time.sleep(AWAY)


LAYOUTS = {
    "data": (2, parallel(data=2), 1, "rank 0 waits in it"),
    "tensor and data": (4, parallel(tensor=2, data=2), 2, "rank 3 waits in it"),
    "all sharded": (4, parallel(data=4, zero=3), 2, "ranks 0, 1, 3 wait in it"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_collective_and_the_rank_that_did_not_enter_it_are_named(layouts: Layouts, layout: str):
    name_the_rank(layouts, layout)


def name_the_rank(layouts: Layouts, layout: str, *settings: str) -> None:
    """Run a layout, here or over NCCL (gpu_cases.py), and read what its ranks wrote."""
    ranks, words, away, waits = LAYOUTS[layout]
    run = layouts.run(ranks, "llama", *settings, *words, "train.steps=4", "eval.every=0", extension=Away(away))
    records = flight_records.read(run.path, since=0.0)
    assert sorted(records) == list(range(ranks))
    found = flight_records.hang(records)
    assert found is not None, records
    assert found.missing == [away], (found, records)
    said = flight_records.described(found, records, {away: "b2"})
    assert waits in said
    assert f"rank {away} on b2 did not enter it and is in test_flight_records.py" in said, said
    assert said.endswith("be_away")
    del records[away]  # As if it were stopped.
    found = flight_records.hang(records)
    assert found is not None
    said = flight_records.described(found, records, {away: "b2"})
    assert said.endswith(f"rank {away} on b2 did not enter it and does not answer")
