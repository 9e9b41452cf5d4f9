"""Who is slow, from what the ranks tell each other. With real ranks: tests/parallel/test_straggler.py."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steelyard.parallel.mesh import Mesh, MeshAxis, alone
from steelyard.training.straggler import History, StepTimer, shared_out
from steelyard.training.watchdog import Watchdog


def timer(mesh: Mesh, path: Path) -> StepTimer:
    return StepTimer(mesh, torch.device("cpu"), Watchdog(path, 0, is_on=False))


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
def test_ranks_are_compared_with_those_of_their_stage(times: list[float], slowest: int, usual: float, tmp_path: Path):
    mesh = replace(alone(), pipeline=MeshAxis(0, 2, None), world=MeshAxis(0, 6, None))
    reported = timer(mesh, tmp_path)._slowest(times, [0.1] * 6)
    assert reported == {"slowest": slowest, "seconds": times[slowest], "median": usual}


def test_a_stage_with_one_rank_is_compared_with_its_past(tmp_path: Path):
    mesh = replace(alone(), pipeline=MeshAxis(0, 2, None), world=MeshAxis(0, 2, None))
    step_timer, history = timer(mesh, tmp_path), History()
    for second in range(300):
        assert step_timer._slowest(*history.add(float(second), [1.0, 3.0], 1))["median"] in (1.0, 3.0)
    for second in range(300, 340):
        reported = step_timer._slowest(*history.add(float(second), [1.5, 3.0], 1))
    assert reported == {"slowest": 0, "seconds": 1.5, "median": 1.0}


def test_the_median_of_a_minute_ignores_single_slow_steps_and_follows_many():
    history = History()
    for second in range(120):
        own, _ = history.add(float(second), [1.0, 9.0 if second % 3 == 0 else 1.0], 1)
    assert own == [1.0, 1.0]
    for second in range(120, 160):
        own, past = history.add(float(second), [1.0, 2.0], 1)
    assert own == [1.0, 2.0]
    assert past == [1.0, 1.0]


def test_short_steps_are_averaged_over_a_second():
    history = History()
    for number in range(1000):
        own, _ = history.add(number / 100, [0.01 * (1 + number % 2)], 1)
    assert own == pytest.approx([0.015], rel=0.02)
    assert len(history._last) <= 11


def test_a_device_without_room_for_the_measure_stops_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def full(self: StepTimer) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(StepTimer, "_measured", full)
    assert timer(alone(), tmp_path)._probed_time() == 0.0
