"""What a step leaves: a line of the log, and scalars where the recipe asks for them."""

import json
import os
import re
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch

from steelyard import training
from steelyard.core import host
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.training import peak_memory
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

FILLER = 1 << 28  # bytes that a process touches and frees before its run

# What Megatron's line has: iteration, consumed samples, milliseconds per iteration, learning rate, global batch size,
# lm loss, loss scale, grad norm, skipped and nan iterations; and what it has behind them.
LINE = re.compile(
    r"step (?P<step>\d+)/20  samples (?P<samples>\d+)  (?P<ms>[\d.]+) ms/step  lr (?P<rate>\d\.\d{3}e[-+]\d\d)  "
    r"global_batch (?P<batch>\d+)  loss (?P<loss>\d\.\d{4})  loss_scale 1  grad_norm (?P<norm>\d+\.\d{3})  "
    r"skipped 0  nan 0  "
    r"(?P<tokens>[\d.]+[kM]?) tokens/s  (?P<tflops>\S+) TFLOP/s per rank  (?P<left>\S.*) left"
)


def test_a_line_of_the_log_has_what_megatrons_has(in_workplace, capsys):
    run = training.run(load_recipe("tiny.toml"))
    reported = capsys.readouterr().err
    lines = [found for line in reported.splitlines() if (found := LINE.fullmatch(line))]
    records = [record for record in run.metrics() if "loss" in record]
    assert [int(line["step"]) for line in lines] == [record["step"] for record in records] == list(range(2, 21, 2))
    for line, record in zip(lines, records, strict=True):
        assert int(line["samples"]) == record["samples"] == 4 * record["step"]
        assert float(line["loss"]) == pytest.approx(record["loss"], abs=1e-4)
        assert float(line["rate"]) == pytest.approx(record["learning_rate"], rel=1e-3)
        assert float(line["norm"]) == pytest.approx(record["grad_norm"], abs=1e-3)
        assert float(line["ms"]) == pytest.approx(1000 * record["seconds"], abs=0.1)
        assert record["tokens_per_second"] == pytest.approx(64 / record["seconds"])
        assert float(line["tflops"]) > 0
    assert reported == (run.path / "logs" / os.listdir(run.path / "logs")[0]).read_text()  # noqa: PTH208


def test_a_record_tells_the_memory_of_this_run_and_not_of_the_process_before_it(in_workplace):
    can_reset = system_can_reset_the_peak()
    before = peak_with_a_filler()
    run = training.run(load_recipe("tiny.toml", ["train.steps=2"]))
    manifest, [record] = run.manifest(), [record for record in run.metrics() if "loss" in record]
    slack = 1 << 20  # Linux counts the pages of a process with several threads by and by.
    assert 0 < manifest["memory_before"] < record["peak_memory"] + slack
    assert record["peak_memory"] < before - FILLER // 2 or not can_reset


def system_can_reset_the_peak() -> bool:
    """Some containers accept the write to clear_refs and keep the peak: only trying shows it."""
    before = peak_with_a_filler()
    host.reset_peak()
    return peak_memory.peak(torch.device("cpu")) < before - FILLER // 2


def peak_with_a_filler() -> int:
    filler = bytearray(FILLER)
    peak = peak_memory.peak(torch.device("cpu"))
    assert peak > len(filler)
    return peak


def test_time_for_validation_and_checkpoints_is_not_a_steps(in_workplace, monkeypatch):
    hour, hours, clock = 3600.0, [], time.perf_counter
    monkeypatch.setattr("steelyard.training.metrics.time.perf_counter", lambda: clock() + hour * len(hours))
    monkeypatch.setattr("steelyard.training.trainer.units.perplexity", lambda loss: hours.append(1) or "1")
    run = training.run(load_recipe("tiny.toml", ["eval.every=2", "train.steps=6"]))
    records = [record for record in run.metrics() if "loss" in record]
    assert len(hours) == len(records) + 1 == 4  # The first validation is before the first step.
    assert all(record["seconds"] < hour / 2 for record in records)


class Board:
    """Stands for TensorBoard's writer and remembers."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.is_closed = folder, [], False
        Board.last = self

    def add_scalar(self, key: str, value: float, step: int) -> None:
        self.scalars.append((key, value, step))

    def close(self) -> None:
        self.is_closed = True


class Extra(Extension):
    def metrics(self) -> dict[str, float]:
        return {"extra": 7.0}


def test_tensorboard_gets_what_the_records_hold(in_workplace, monkeypatch):
    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Board
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    run = training.run(load_recipe("tiny.toml", ["log.tensorboard=true", "train.steps=4"]), extension=Extra())
    expected = [
        (key, value, record["step"])
        for record in run.metrics()
        for key, value in record.items()
        if key not in ("step", "time")
    ]
    assert Board.last.scalars == expected
    assert {"loss", "valid_loss", "grad_norm", "extra"} <= {key for key, _, _ in expected}
    assert Board.last.is_closed
    assert Board.last.folder == str(run.path / "tensorboard")


@pytest.mark.parametrize("key", ["log.tensorboard=true", "log.wandb=project"])
def test_what_is_not_installed_is_refused_before_anything_is_made(in_workplace, monkeypatch, key):
    for name in ("torch.utils.tensorboard", "tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match="is not installed") as refused:
        training.run(load_recipe("tiny.toml", [key]))
    assert refused.value.hint.startswith("pip install")
    assert refused.value.where.endswith(key.partition("=")[0])
    assert not (in_workplace.path / "runs").exists()


WANDB = '''
"""Stands for W&B and writes down its calls. It must never be asked to log in."""
import json

def note(*what):
    with open("wandb-calls.jsonl", "a") as file:
        file.write(json.dumps(what, default=str) + "\\\\n")

Settings = dict

def login(*_, **__):
    raise AssertionError("asked to log in")

class Run:
    def log(self, numbers, step):
        note("log", step, sorted(numbers))
    def finish(self, exit_code):
        note("finish", exit_code)

def init(**settings):
    note("init", settings)
    return Run()
'''.replace("\\\\n", "\\n")


@pytest.fixture
def wandb(in_workplace, monkeypatch):
    (in_workplace.path / "stubs").mkdir()
    (in_workplace.path / "stubs" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(in_workplace.path / "stubs")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(in_workplace.path / "no-netrc"))
    sys.modules.pop("wandb", None)
    yield in_workplace.path / "wandb-calls.jsonl"
    sys.modules.pop("wandb", None)


def test_without_a_key_wandb_is_refused_before_training_and_nobody_is_asked(wandb):
    with pytest.raises(UserError, match="W&B has no key") as refused:
        training.run(load_recipe("tiny.toml", ["log.wandb=project"]))
    assert "WANDB_MODE=offline" in refused.value.hint
    assert not wandb.exists()
    assert not (wandb.parent / "runs").exists()


@pytest.mark.parametrize("how", [("WANDB_API_KEY", "k" * 40), ("WANDB_MODE", "offline")])
def test_wandb_gets_records_and_a_resumed_run_goes_on_under_its_name(wandb, monkeypatch, how):
    monkeypatch.setenv(*how)
    settings = ["log.wandb=project", "optim.decay_steps=4"]
    run = training.run(load_recipe("tiny.toml", [*settings, "train.steps=2"]))
    training.run(load_recipe("tiny.toml", [*settings, "train.steps=4"]))
    calls = [json.loads(line) for line in wandb.read_text().splitlines()]
    begun = [call[1] for call in calls if call[0] == "init"]
    identity = run.manifest()["wandb_id"]
    assert [(each["project"], each["id"], each["resume"]) for each in begun] == [("project", identity, "allow")] * 2
    assert begun[0]["config"]["train"]["global_batch"] == 4
    logged = [(call[1], "loss" in call[2]) for call in calls if call[0] == "log"]
    assert logged == [(record["step"], "loss" in record) for record in run.metrics()]
    assert [call for call in calls if call[0] == "finish"] == [["finish", 0]] * 2


@pytest.mark.slow
def test_the_real_wandb_takes_a_run_without_a_network(in_workplace, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = training.run(load_recipe("tiny.toml", ["log.wandb=project", "train.steps=2"]))
    assert list(run.path.glob("wandb/offline-run-*"))


def test_rows_that_numpy_only_lends_are_copied_without_a_warning():
    """One row of places is a view of what many rows would share, which numpy does not let anybody write."""
    lent = np.broadcast_to(np.arange(4), (1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = Engine._to_device(types.SimpleNamespace(device=torch.device("cpu")), lent)
    assert tensor.tolist() == [[0, 1, 2, 3]]
