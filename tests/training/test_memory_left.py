"""What becomes of memory checkpoints when a run stops, fails, or finds its checkpoints on disk damaged."""

import os
import signal
import socket
from pathlib import Path

import pytest

from steelyard import training
from steelyard.checkpoint import memory_record
from steelyard.core.errors import Interrupted, RuntimeFailure
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
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


def test_what_a_failed_run_leaves_is_recorded_and_removed_at_the_next_start_also_with_another_folder(
    in_workplace, memory, tmp_path
):
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "parallel.zero=0"]
    with pytest.raises(RuntimeFailure):
        training.run(load_recipe("tiny.toml", settings), extension=Failing())
    run = Run.open("runs/tiny")
    [left] = memory.iterdir()
    assert memory_record.read(run) == (left, [socket.gethostname()])
    memory_record.add(run, left, ["lost"])
    foreign = memory / "steelyard-other"
    foreign.mkdir(mode=0o700)
    (tmp_path / "elsewhere").mkdir()
    training.run(load_recipe("tiny.toml", [*settings, f"checkpoint.memory_dir={tmp_path / 'elsewhere'}"]))
    assert list(memory.iterdir()) == [foreign]
    assert not list((tmp_path / "elsewhere").iterdir())
    assert memory_record.read(run) is None


def test_a_lost_host_stays_recorded_and_a_path_that_is_no_memory_checkpoint_is_not_removed(in_workplace, memory):
    settings = [*SETTINGS, f"checkpoint.memory_dir={memory}", "parallel.zero=0", "train.steps=4"]
    run = training.run(load_recipe("tiny.toml", settings))
    assert memory_record.read(run) is None
    memory_record.add(run, memory, ["lost"])
    memory_record.add(run, memory, ["b1"])
    memory_record.discard(run, ["b1"])
    assert memory_record.read(run) == (memory, ["lost"])
    training.run(load_recipe("tiny.toml", [*settings, "train.steps=5"]))
    assert memory.exists()
