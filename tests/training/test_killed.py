"""SIGKILL at random moments, over and over: the losses that remain are those of an undisturbed run, to the bit."""

import os
import random
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from steelyard.core.run import Run
from tests.conftest import kill
from tests.parallel import jobs
from tests.training.test_trainer import curve

LONG = ["train.steps=250", "log.every=1", "eval.every=25", "checkpoint.every=3", "checkpoint.keep_last=2"]


def lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_for_lines(run: Path, wanted: int, is_alive) -> None:
    deadline = time.monotonic() + 300
    while is_alive() and lines(run) < wanted:
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.001)


@pytest.mark.slow
def test_a_run_killed_twenty_times_repeats_its_losses_to_the_bit(workplace):
    """Checkpoints are written in the background, so that many a kill falls into a save."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.jobs"])
    dice = random.Random(0)

    def live(run: str):
        process = context.Process(target=jobs.training_in, args=(workplace.path, LONG, run), daemon=True)
        process.start()
        return process

    killed_alive, run = 0, workplace.path / "killed"
    for life in range(20):
        process = live("killed")
        if life % 4 == 3:
            time.sleep(dice.uniform(0.0, 0.4))  # wherever it is, perhaps not even resumed
        else:
            before = lines(run)
            wait_for_lines(run, before - 3 if life else 1, process.is_alive)
            wait_for_lines(run, before + dice.randint(1, 15), process.is_alive)
            time.sleep(dice.uniform(0.0, 0.01))
        killed_alive += process.is_alive()
        process.kill()
        process.join(60)
    assert killed_alive >= 18, "the runs ended before they were killed"
    assert Run.open(run).state == "killed"
    for name in ("killed", "undisturbed"):
        process = live(name)
        process.join(300)
        assert process.exitcode == 0
    assert Run.open(run).state == "finished"
    undisturbed = curve(Run.open(workplace.path / "undisturbed"))
    assert len(undisturbed) == 261
    assert curve(Run.open(run)) == undisturbed
    assert not [path for path in run.rglob("*") if path.name.startswith(".") and path.name != ".metadata"]


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.slow
def test_two_ranks_of_which_any_is_killed_repeat_their_losses_to_the_bit(workplace):
    words = ["train", "tiny.toml", *LONG, "train.steps=120", "parallel.zero=3", "--nproc", "2"]
    dice, run = random.Random(1), workplace.path / "killed"
    for victim in ("launcher", 0, 1, 1):
        process = workplace.start(*words, "--run", "killed")
        wait_for_lines(run, lines(run) + dice.randint(2, 20), lambda p=process: p.poll() is None)
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(process.pid if victim == "launcher" else ranks[victim], signal.SIGKILL)
        _, reported = process.communicate(timeout=600)
        kill(process)
        if victim != "launcher":
            assert f"rank {victim} was killed by SIGKILL" in reported
        deadline = time.monotonic() + 300
        while any(Path(f"/proc/{rank}").exists() for rank in ranks):
            assert time.monotonic() < deadline, "a rank outlives its job"
            time.sleep(0.02)
    for name in ("killed", "undisturbed"):
        done = workplace.steelyard(*words, "--run", name)
        assert done.returncode == 0, done.stderr
    assert curve(Run.open(run)) == curve(Run.open(workplace.path / "undisturbed"))
