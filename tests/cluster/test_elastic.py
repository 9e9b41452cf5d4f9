"""An elastic run on a real Slurm: a node loses its power, and the run continues in the same allocation."""

import shlex
from pathlib import Path

import pytest

from steelyard.launch import elastic_job
from tests.cluster.conftest import STEPS, Yard, everything, losses
from tests.test_guides import commands

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
PLAN = """
[parallel]
data = 2
placement = ["a10:2"]
"""


def test_the_guide_to_elastic_runs_works_as_written_when_a_node_loses_its_power(yard: Yard, undisturbed: Path):
    """Its recipe at toy size, its lines as they are."""
    recipe = (yard.path / "alike.toml").read_text().replace("steps = 20", f"steps = {STEPS}")
    (yard.path / "elastic.toml").write_text(recipe + PLAN)
    lines = [shlex.split(line)[1:] for line in commands("guide-elastic.md") if "elastic" in line]
    assert [line[0] for line in lines] == ["submit", "submit", "watch", "watch", "report"]
    run = yard.path / "runs" / "elastic"
    assert "--no-kill" in yard.steelyard(*lines[0]).stdout
    yard.steelyard(*lines[1])
    with yard.held(run):
        watched = yard.steelyard(*lines[2], code=None)  # A rank is held, which takes a while to be noticed.
        assert "elastic" in watched.stdout
        yard.lab.power_off("a2")
    try:
        assert yard.until_state(run, "finished", "failed", seconds=600) == "finished", everything(run)
    finally:
        yard.lab.power_on("a2")
    yard.steelyard(*lines[3])
    yard.steelyard(*lines[4])
    first, second = (each for each in elastic_job.attempts(run) if "attempt" in each)
    assert (first["nodes"], second["nodes"]) == (["a1", "a2"], ["a1"])
    assert second["unused"]["a2"].startswith("does not answer since")
    assert losses(run) == pytest.approx(losses(undisturbed), rel=1e-3)
    assert {record["restarts"] for record in yard.records(run)} == {0}, "the job was not queued again"
    assert yard.verdicts(run, 0) == {"completed"}
