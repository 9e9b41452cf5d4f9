"""Who is slow, from what the ranks tell each other. With real ranks: tests/parallel/test_straggler.py."""

from dataclasses import replace

import pytest
import torch

from steelyard.parallel.mesh import MeshAxis, alone
from steelyard.training.straggler import StepTimer, shared_out


def test_a_step_is_as_long_as_the_slowest_device_needs():
    assert shared_out(2.0, [1.0, 1.0, 4.0]) == [0.5, 0.5, 2.0]
    assert shared_out(2.0, [0.0, 0.0]) == [0.0, 0.0]
    assert shared_out(-1.0, [1.0]) == [0.0]


@pytest.mark.parametrize(
    ("times", "slowest", "usual"),
    [
        ([1.0, 1.0, 1.1, 3.0, 3.0, 3.1], 2, 1.0),  # Stages differ, and are not compared.
        ([1.0, 1.0, 1.0, 3.0, 4.5, 3.0], 4, 3.0),
    ],
)
def test_ranks_are_compared_with_those_of_their_stage(times: list[float], slowest: int, usual: float):
    mesh = replace(alone(), pipeline=MeshAxis(0, 2, None), world=MeshAxis(0, 6, None))
    reported = StepTimer(mesh, torch.device("cpu"))._slowest(times)
    assert reported == {"slowest": slowest, "seconds": times[slowest], "median": usual}


def test_a_stage_with_one_rank_is_compared_with_its_past():
    mesh = replace(alone(), pipeline=MeshAxis(0, 2, None), world=MeshAxis(0, 2, None))
    pace = StepTimer(mesh, torch.device("cpu"))
    for _ in range(5):
        assert pace._slowest([1.0, 3.0])["median"] in (1.0, 3.0)
    assert pace._slowest([1.5, 3.0]) == {"slowest": 0, "seconds": 1.5, "median": 1.0}


def test_a_device_without_room_for_the_measure_stops_no_run(monkeypatch: pytest.MonkeyPatch):
    def full(self: StepTimer) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pace = StepTimer(alone(), torch.device("cpu"))
    monkeypatch.setattr(StepTimer, "_measured", full)
    assert pace._probed_time() == 0.0
