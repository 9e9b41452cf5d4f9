"""What becomes of memory checkpoints when a run stops, fails, or finds its checkpoints on disk damaged."""

import os
import signal
from pathlib import Path

import pytest

from steelyard import training
from steelyard.core.errors import Interrupted, RuntimeFailure
from steelyard.core.recipe import load_recipe
from steelyard.training.extension import Extension
from tests.training.test_memory_checkpoint import SETTINGS, Failing, flip


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def test_if_all_checkpoints_on_disk_are_damaged_memory_is_tried(in_workplace, memory, capsys):
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "parallel.zero=0", "checkpoint.every=4"]
    with pytest.raises(RuntimeFailure):
        training.run(load_recipe("tiny.toml", settings), extension=Failing())
    [on_disk] = Path("runs/tiny/checkpoints").glob("step-*/*.distcp")
    flip(on_disk)
    without_memory = [*settings, "checkpoint.memory_dir=/nowhere"]
    with pytest.raises(RuntimeFailure, match="is damaged"):
        training.run(load_recipe("tiny.toml", without_memory))
    assert training.run(load_recipe("tiny.toml", settings)).state == "finished"
    assert "resumed at step 3 from a memory checkpoint (all on disk are damaged)" in capsys.readouterr().err


class Stopping(Extension):
    """Gets a stop signal in step 5."""

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_stop_without_a_save_keeps_memory_checkpoints_that_are_newer_than_the_disk(
    in_workplace, memory, capsys, is_on_disk
):
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "parallel.zero=0", "checkpoint.at_end=false"]
    settings += ["checkpoint.every=5"] if is_on_disk else []
    with pytest.raises(Interrupted) as stopped:
        training.run(load_recipe("tiny.toml", settings), extension=Stopping())
    assert bool(list(memory.iterdir())) != is_on_disk
    assert (f"step 3 is in {memory}" in str(stopped.value)) != is_on_disk
    training.run(load_recipe("tiny.toml", settings))
    expected = "resumed at step 5, " if is_on_disk else "resumed at step 3 from a memory checkpoint"
    assert expected in capsys.readouterr().err
    assert not list(memory.iterdir())
