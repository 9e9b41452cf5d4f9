"""The data of the charts: what a reader of a growing run folder draws, and the attempts of a run."""

import json
import math
import random
import time
from pathlib import Path

import numpy as np
import pytest

from steelyard import training
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run
from steelyard.observe.attempts import attempts
from steelyard.observe.run_curves import RunCurves, thinned
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import curves_view
from tests.observe.folders import Folder


def chart(data: dict, title: str) -> dict:
    return next(each for each in data["charts"] if each["title"] == title)


def test_a_long_curve_is_thinned_and_keeps_its_spike_and_its_gap():
    y = np.ones(100_000)
    y[77_777], y[50_000] = 50.0, math.nan
    steps, values = thinned(np.arange(100_000.0), y, 4000)
    assert len(steps) <= 4000
    assert (np.diff(steps) > 0).all()
    assert values[list(steps).index(77_777)] == 50.0
    assert np.isnan(values[list(steps).index(50_000)])


@pytest.mark.parametrize("count", [1, 2, 1999, 4001, 65_537])
def test_a_thinned_curve_has_the_range_of_the_whole(count: int):
    y = np.random.RandomState(count).rand(count)
    _, values = thinned(np.arange(float(count)), y, 2000)
    assert len(values) <= 2000
    assert (values.min(), values.max()) == (y.min(), y.max())


def test_a_follower_of_a_growing_run_sees_what_a_later_reader_sees(tmp_path: Path):
    folder = Folder(tmp_path / "run", time.time())
    path = folder.write()
    files = {name: (path / name).read_bytes() for name in ("metrics.jsonl", "logs/n0.gpu", "logs/n1.gpu")}
    for name in files:
        (path / name).write_bytes(b"")
    following, chance = RunCurves(path), random.Random(0)
    while any((path / name).stat().st_size < len(data) for name, data in files.items()):
        for name, data in files.items():
            done = (path / name).stat().st_size
            with open(path / name, "ab") as file:
                file.write(data[done : done + chance.randrange(1, 900)])
        following.refresh()
    assert following.data() == RunCurves(path).refresh().data()
    # A resumed run drops the records that it will repeat.
    Run(path).forget_after(200)
    assert chart(following.refresh().data(), "Loss")["lines"][0]["x"][-1] == 200


def test_metrics_and_samples_share_their_axes(tmp_path: Path):
    path = Folder(tmp_path / "run", time.time()).write()
    data = RunCurves(path).refresh().data()
    axes = data["axes"]
    assert axes["tokens"] == [64 * step for step in axes["step"]]
    assert np.diff(axes["time"]) == pytest.approx(np.full(29, 10.0), abs=1e-3)
    last = chart(data, "Power")["lines"][0]
    assert last["over"] == "time"
    assert last["x"][-1] == pytest.approx(axes["time"][-1] + 10, abs=0.1)  # The last record was 10 s before.


def test_values_that_are_no_numbers_are_gaps_and_a_share_has_limits(tmp_path: Path):
    folder = Folder(tmp_path / "run", time.time())
    folder.records += [{"step": 310, "loss": None, "mfu": 0.4}, {"step": 320, "loss": "x", "time": "y", "tokens": []}]
    data = RunCurves(folder.write()).refresh().data()
    assert chart(data, "Loss")["lines"][0]["y"][-2:] == [None, None]
    assert chart(data, "MFU")["limits"] == (0, 100)
    json.dumps(data, allow_nan=False)


def test_a_resumed_run_has_two_attempts_and_says_what_it_repeats(in_workplace):
    run = training.run(load_recipe("tiny.toml", ["train.steps=7", "checkpoint.every=3", "log.every=1"]))
    (run.path / "checkpoints" / "step-00000007").rename(in_workplace.path / "lost")
    run = training.run(load_recipe("tiny.toml", ["train.steps=9", "train.micro_batch=4", "log.every=1"]))
    first, second = attempts(RunState(run.path).refresh(), "finished")
    assert (first["kind"], first["step"], first["last_step"], first["repeated"]) == ("start", 0, 7, 0)
    assert (second["kind"], second["step"], second["repeated"], second["last_step"]) == ("replan", 6, 1, 9)
    assert second["changed"] == "micro_batch 2 -> 4"
    assert second["end"] == "finished"
    found = curves_view(RunState(run.path).refresh(), RunCurves(run.path))["markers"]
    assert [(marker["kind"], marker["step"]) for marker in found if marker["kind"] != "checkpoint"] == [("replan", 6)]
    assert {marker["step"] for marker in found if marker["kind"] == "checkpoint"} >= {6, 9}


def test_a_folder_of_an_older_version_has_one_attempt_and_odd_lines_spoil_nothing(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    state = folder.state()
    (only,) = attempts(state, "running")
    assert (only["hosts"], only["layout"]) == (
        ["n0", "n1"],
        "4 ranks, pipeline 2, data 2, partition 1-1, micro-batch 2",
    )
    odd = [[], {"step": "x", "hosts": 3, "layout": [1], "time": {}}, {"step": 5, "layout": {"world": 2}}]
    (folder.path / "sessions.jsonl").write_text("{\n" + "".join(json.dumps(each) + "\n" for each in odd))
    assert [each["step"] for each in attempts(state.refresh(folder.now), "running")] == [None, 5]


def test_a_planned_attempt_and_its_start_are_one_and_the_next_plan_tells_why_it_ended(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    state = folder.state()
    planned = [
        {"submitted": "slurm", "time": 990},
        {"attempt": 1, "time": 1000, "why": "submitted", "nodes": ["a1", "b2"], "layout": {"data": 2, "pipeline": 1}},
        {"waiting": "needs 2 nodes, 1 is alive", "time": 1100},
        {
            "attempt": 2,
            "time": 1200,
            "why": "b2 does not answer",
            "nodes": ["a1"],
            "layout": {"data": 1, "pipeline": 1},
        },
    ]
    started = [
        {"time": 1010.0, "step": 0, "repeated": 0, "hosts": ["a1", "b2"], "layout": {"world": 2, "data": 2}},
        {"time": 1210.0, "step": 30, "repeated": 5, "hosts": ["a1"], "layout": {"world": 1, "data": 1}},
    ]
    for name, records in (("attempts.jsonl", planned), ("sessions.jsonl", started)):
        (folder.path / name).write_text("".join(json.dumps(each) + "\n" for each in records))
    first, second = attempts(state.refresh(folder.now), "running")
    assert first["end"] == "b2 does not answer; waiting: needs 2 nodes, 1 is alive"
    assert (first["step"], first["last_step"], first["layout"]) == (0, 35, "2 ranks, data 2")
    assert (second["kind"], second["hosts"], second["changed"]) == ("replan", ["a1"], "data 2 -> 1, world 2 -> 1")
