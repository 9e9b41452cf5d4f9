"""The host does not make the device wait: stops are agreed on a step later, garbage is collected at fixed steps."""

import gc
import os
import signal

import torch
import torch.distributed as dist

from steelyard.core.run import Run
from steelyard.training import garbage
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from tests.parallel import jobs
from tests.parallel.conftest import FAMILIES, TWO_STEPS, Layouts, difference
from tests.parallel.test_settings import SGD_ROUNDING

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "all_gather_object", "broadcast_object_list")


class RankOneSignalled(Extension):
    """Sends one of the ranks a signal before its second step."""

    def begin_step(self, step, batch, loss_scale):
        if step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_to_one_rank_stops_all_after_the_same_step_and_the_run_resumes(layouts: Layouts):
    plain = ["train.steps=4", "eval.every=0"]
    settings = [*TWO_STEPS, FAMILIES["gpt"], "parallel.zero=1", *plain]
    said = layouts.ranks.do(2, jobs.interrupted_training, settings, "signalled-step", RankOneSignalled())
    assert [message.split(";")[0] for message in said] == ["saved step 3 of 4"] * 2
    run = layouts.run(2, "gpt", "parallel.zero=1", *plain, path="signalled-step")
    assert difference(run.metrics(), layouts.alone("gpt", *plain)) < 10 * SGD_ROUNDING


class Counting(Extension):
    """Counts the collectives that the trainer calls between two steps of the engine, and automatic collections."""

    def __init__(self) -> None:
        self.blocking = self.started = self.collected = 0
        self.is_in_engine = False
        self.step = 0

    def begin_step(self, step, batch, loss_scale):
        self.step = step
        if step > 1:
            return
        for name in COLLECTIVES:
            setattr(dist, name, self.counted(getattr(dist, name)))
        step_of = Engine.step

        def marked(engine, *inputs):
            self.is_in_engine = True
            outcome = step_of(engine, *inputs)
            self.is_in_engine = False
            return outcome

        Engine.step = marked
        gc.callbacks.append(self.note)

    def counted(self, collective):
        def called(*inputs, **options):
            if not self.is_in_engine and self.step > 2:  # After two steps the ranks compare their memory, once.
                self.started += bool(options.get("async_op"))
                self.blocking += not options.get("async_op")
            return collective(*inputs, **options)

        return called

    def note(self, phase, info):
        self.collected += phase == "start"

    def metrics(self):
        return {"blocking": self.blocking, "started": self.started, "collected": self.collected}


def counting_training(overrides: list[str], run: str) -> str:
    """Train with `Counting`, and undo what it patched in this rank of the pool."""
    before, step, callbacks = {name: getattr(dist, name) for name in COLLECTIVES}, Engine.step, list(gc.callbacks)
    try:
        return jobs.training(overrides, run, Counting())
    finally:
        Engine.step, gc.callbacks[:] = step, callbacks
        for name, collective in before.items():
            setattr(dist, name, collective)


def test_no_rank_waits_for_another_between_steps_and_none_collects_garbage(layouts: Layouts):
    settings = [*TWO_STEPS, FAMILIES["gpt"], "parallel.zero=1", "eval.every=0", "train.steps=6", "log.every=6"]
    layouts.ranks.do(2, counting_training, settings, "counted")
    [record] = [record for record in Run.open(layouts.folder / "counted").metrics() if "loss" in record]
    assert (record["blocking"], record["started"], record["collected"]) == (0, 3, 0)


def test_garbage_is_collected_after_fixed_steps_only():
    steps, now = [], 0

    def note(phase, info):
        if phase == "start":
            steps.append((now, info["generation"]))

    with garbage.at_fixed_steps() as collect:
        gc.callbacks.append(note)
        try:
            for now in range(1, 1001):
                keep = [[torch.Size()] for _ in range(200)]  # Enough for an automatic collection within a few steps.
                collect(now)
        finally:
            gc.callbacks.remove(note)
    assert keep
    assert gc.isenabled()
    assert [step for step, _ in steps] == list(range(50, 1001, 50))
    assert {generation for _, generation in steps[:-1]} == {1}
    assert steps[-1] == (1000, 2)
