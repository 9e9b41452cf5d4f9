import json
import subprocess
import sys

import pytest

from steelyard.core import run as runs
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.run import Run, for_training
from tests import preloaded


def test_an_unfinished_run_is_resumed_and_beside_a_finished_one_a_new_one_is_made(in_workplace):
    recipe = load_recipe("tiny.toml")
    first = for_training(recipe)
    assert str(first.path) == "runs/tiny"
    assert for_training(recipe).path == first.path
    first.update(state="finished")
    assert str(for_training(recipe).path) == "runs/tiny-2"


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(in_workplace):
    first = for_training(load_recipe("tiny.toml"))
    first.update(state="finished")
    longer = for_training(load_recipe("tiny.toml", ["train.steps=40", "log.every=1", "checkpoint.every=7"]))
    assert longer.path == first.path
    assert longer.recipe().train.steps == 20  # until the run is held and really goes on


def test_a_changed_recipe_is_refused_with_the_difference(in_workplace):
    for_training(load_recipe("tiny.toml"))
    with pytest.raises(UserError, match=r"model\.hidden: 32 -> 64"):
        for_training(load_recipe("tiny.toml", ["model.hidden=64"]))


def test_a_folder_that_is_not_a_run_is_never_written_to(in_workplace):
    (in_workplace.path / "thesis").mkdir()
    (in_workplace.path / "thesis" / "chapter.txt").touch()
    with pytest.raises(UserError, match="not a run folder"):
        for_training(load_recipe("tiny.toml"), in_workplace.path / "thesis")


def test_torn_and_foreign_lines_are_not_records(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    run.append({"step": 1, "loss": 2.5})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('not json\n[1]\n{"step": 2, "lo')
    assert run.metrics() == [{"step": 1, "loss": 2.5}]
    run.forget_after(0)
    assert run.metrics() == []


HOLDS_THE_LOCK = """
import sys, time
from pathlib import Path
from steelyard.core.run import Run
with Run(Path(sys.argv[1])).writing():
    print("held", flush=True)
    time.sleep(60)
"""


def test_only_one_process_writes_and_a_killed_one_lets_go(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    run.update(**runs.session(world_size=1))
    holder = preloaded.Popen([sys.executable, "-c", HOLDS_THE_LOCK, str(run.path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert run.state == "running"
        with pytest.raises(UserError, match=f"process {holder.pid}"), run.writing():
            pass
    finally:
        holder.kill()
        holder.communicate(timeout=150)
    assert run.state == "killed"
    with run.writing():
        assert run.state == "running"


def test_the_manifest_says_what_was_run_where(in_workplace):
    run = for_training(load_recipe("tiny.toml"))
    run.update(**runs.session(world_size=1))
    manifest = json.loads((run.path / "run.json").read_text())
    assert {"state", "versions", "host", "git_commit", "seed", "world_size"} <= manifest.keys()
    assert "torch" in manifest["versions"]


@pytest.mark.parametrize("content", ["", "{", "[]x", "[]", "{}"])
def test_a_manifest_that_is_not_json_is_one_clear_message(in_workplace, content):
    run = for_training(load_recipe("tiny.toml"))
    (run.path / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json"):
        Run.open(run.path)
