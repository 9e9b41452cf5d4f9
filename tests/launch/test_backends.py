"""A launch backend is one file: its jobs are submitted, watched and cancelled by the same commands."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch import backends, find_runs, launch_record, log_reader, run_list, submit
from steelyard.launch.backends import JobState
from steelyard.launch.submit import SubmitRequest
from steelyard.observe import verdict
from steelyard.observe.run_state import RunState
from steelyard.observe.scheduler_poll import SchedulerPoll
from steelyard.tune import outcome, submitted_trial
from steelyard.tune.trial_output import TrialLog

pytestmark = pytest.mark.timeout(300)
# A scheduler that is a folder: a job is a file that holds its state. Its ids are no numbers.
FOURTH = '''"""Jobs in a spool folder."""

import os
from dataclasses import replace
from pathlib import Path

from steelyard.launch import job_spec, site_environment
from steelyard.launch.backends import Backend, JobState, Place
from steelyard.launch.job_spec import agent_command

STATES = {"waits": JobState.QUEUED, "works": JobState.RUNNING, "is gone": JobState.CANCELLED}
BLANK = {"reason": "", "nodes": "n1", "exit_code": None, "elapsed": 1, "time_limit": None, "restarts": 0}


class Spool(Backend):
    """Jobs in a spool folder."""

    rank_variables = ("SPOOL_NODE",)

    def nodes(self, request, cluster):
        return job_spec.nodes_of(request, cluster)

    def scripts(self, spec):
        words = agent_command(spec, "spool", self.rank_variables, *spec.command_arguments)
        return {"job.sh": site_environment.preamble(spec.site, spec.workdir) + site_environment.executing(words)}

    def commands(self, spec):
        return [["spool", str(spec.run / "launch" / "job.sh")]]

    def submit(self, spec, launch):
        job = f"spool:{spec.name}"
        (Path(os.environ["SPOOL"]) / job).write_text("waits")
        return replace(launch, jobs=[job])

    def poll(self, run, launch, last):
        found = {job: (Path(os.environ["SPOOL"]) / job).read_text() for job in launch.jobs}
        return [{"job": job, "state": STATES[word], **BLANK} for job, word in found.items()]

    def cancel(self, run, launch, at_once):
        for job in launch.jobs:
            (Path(os.environ["SPOOL"]) / job).write_text("is gone")

    def place(self, environ):
        return Place(int(environ.get("SPOOL_NODE", "0")), address="n1")


BACKEND = Spool()
'''


@pytest.fixture
def spool(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    (tmp_path / "more" / "spool.py").parent.mkdir()
    (tmp_path / "more" / "spool.py").write_text(FOURTH)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path / "more")])
    (tmp_path / "spooled").mkdir()
    monkeypatch.setenv("SPOOL", str(tmp_path / "spooled"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "spooled"
    sys.modules.pop("steelyard.launch.backends.spool", None)


def test_a_fourth_backend_in_one_file_submits_watches_and_cancels(spool: Path, tmp_path: Path):
    assert backends.names() == ["local", "mpi", "slurm", "spool"]
    request = SubmitRequest("spool", SiteSection(), words=["doctor"], name="mine")
    shown, _ = submit.preview(request)
    assert shown["lines"] == [f"spool {tmp_path}/runs/mine/launch/job.sh"]
    assert "--backend spool" in shown["scripts"]["job.sh"]
    submitted = submit.submit(request)
    run = Path(submitted["run"])
    assert (submitted["jobs"], submitted["state"]) == (["spool:mine"], JobState.QUEUED)
    assert find_runs.find("spool:mine", tmp_path / "runs") == run

    state = RunState(run)
    SchedulerPoll(run).update(state)
    assert "queued" in {each.kind for each in verdict.judge(state.refresh())}
    trial = submitted_trial.SubmittedTrial(run, TrialLog(tmp_path / "trial.log", []))
    assert trial.is_waiting()

    (spool / "spool:mine").write_text("works")
    SchedulerPoll(run).update(state)
    assert state.refresh().is_live
    assert [(row["state"], row["backend"]) for row in run_list.rows(tmp_path / "runs")] == [("running", "spool")]
    (run / "logs" / "n1.out").write_text("hello\n")
    assert backends.load("spool").logs(run) == log_reader.paths(run) == [run / "logs" / "n1.out"]

    assert submit.cancel_run(run) == {
        "run": str(run), "jobs": ["spool:mine"], "state": JobState.CANCELLED, "cancelled": True,
    }  # fmt: skip
    assert "cancelled" in {each.kind for each in verdict.judge(state.refresh())}
    assert submit.wait(run) == 1
    assert launch_record.is_over(run)
    trial = submitted_trial.SubmittedTrial(run, TrialLog(tmp_path / "trial.log", []))
    assert trial.failure() == (outcome.LOST, "its job was cancelled")
    words = [json.loads(line)["state"] for line in (run / "scheduler.jsonl").read_text().splitlines()]
    assert words == ["queued", "running", "cancelled"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_limit": "1:00:00"}, "--on spool has no time limits\n.*--on slurm"),
        ({"job": "7"}, "--on spool has no allocations\n.*--on slurm"),
        ({"on": "nowhere"}, "there is no backend nowhere\n.*local, mpi, slurm, spool"),
    ],
)
def test_what_a_backend_does_not_take_is_refused(spool: Path, changes, message):
    with pytest.raises(UserError, match=message):
        submit.groups_of(SubmitRequest(**({"on": "spool", "site": SiteSection(), "words": ["doctor"]} | changes)))


@pytest.mark.parametrize(
    ("name", "environment", "place"),
    [
        ("slurm", {"SLURM_PROCID": "3", "SLURMD_NODENAME": "a4"}, backends.Place(node=3, address="a4")),
        ("mpi", {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, backends.Place(rank=5, local_rank=1)),
        ("local", {"RANK": "2", "LOCAL_RANK": "2"}, backends.Place(rank=2, local_rank=2)),
        ("local", {"SLURM_PROCID": "3"}, backends.Place()),
    ],
)
def test_a_process_knows_its_place_from_the_variables_of_its_backend(name, environment, place):
    assert backends.load(name).place(environment) == place


def test_records_in_the_words_of_slurm_are_read_as_neutral_ones(tmp_path: Path):
    """Run folders from before have them, whichever backend wrote them."""
    old = [("PENDING", "Priority"), ("PENDING", "PartitionTimeLimit"), ("CANCELLED by 1000", None), ("BOOT_FAIL", "")]
    lines = [json.dumps({"job": "7", "state": state, "reason": reason}) for state, reason in old]
    (tmp_path / "scheduler.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "launch").mkdir()
    first, second, third, fourth = launch_record.read_records(tmp_path)
    assert (first["state"], first["hint"]) == ("queued", "wait: jobs of higher priority come first")
    assert "never" not in first
    assert (second["state"], second["never"]) == ("held", True)
    assert (third["state"], third["reason"]) == ("cancelled", "by 1000")
    assert (fourth["state"], fourth["reason"]) == ("node_failed", "the node did not boot")
    assert [each["state"] for each in RunState(tmp_path).refresh().scheduler] == [
        "queued", "held", "cancelled", "node_failed",
    ]  # fmt: skip


def test_a_word_of_slurm_stands_in_its_backend_alone():
    """`steelyard/launch` outside `backends/`, `observe` and `tune` compare no state with one of a scheduler's words.

    The table of known errors has advice for each scheduler's messages.
    """
    package = Path(backends.__file__).parents[2]
    words = ('"PENDING"', '"COMPLETED"', '"NODE_FAIL"', "SLURM_", "SLURMD_", "squeue", "sacct", "scancel", '== "slurm"')
    found = {
        f"{path.relative_to(package)}: {word}"
        for room in ("launch", "observe", "tune")
        for path in (package / room).rglob("*.py")
        for word in words
        if "backends" not in path.parts and path.name != "known_errors.py" and word in path.read_text()
    }
    assert not found
