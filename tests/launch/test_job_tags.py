"""A job is found again though whoever submitted it was killed before it could write down its number."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.launch import find_runs, launch_record, run_list
from steelyard.launch.backends import slurm_queue
from steelyard.launch.launch_record import Launch, intended
from steelyard.launch.submit import cancel_run
from steelyard.observe.run_state import RunState
from steelyard.observe.scheduler_poll import SchedulerPoll
from steelyard.tune import submitted_trial

pytestmark = pytest.mark.timeout(60)
# In the place of Slurm's: sbatch has the job queued and then loses whoever waits for its number.
PROGRAMS = {
    "sbatch": """
        word=; for word; do :; done
        number=$((40 + $(ls "$QUEUE" | wc -l))); echo "${@: -2}" >"$QUEUE/$number"
        [ ! -e "$QUEUE/../kill" ] || kill -9 $PPID
        echo $number""",
    "squeue": """
        case "$*" in
            *command*) for job in "$QUEUE"/*; do printf "%-40s%s\\n" "$(basename "$job")" "$(cat "$job")"; done ;;
            *) job=$(echo "$*" | sed -n "s/.*--jobs=\\([0-9]*\\).*/\\1/p")
               printf "%-40s%-12s%-24s%-12s\\n" "$job" N/A PENDING 0 ;;
        esac""",
    "scancel": """echo "$@" >"$QUEUE/../cancelled" """,
}


@pytest.fixture
def queue(tmp_path, monkeypatch) -> Path:
    for name, text in PROGRAMS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "queue").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(tmp_path / "queue"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "queue"


def submit(*words: str, code: int = 0) -> None:
    command = [sys.executable, "-P", "-m", "steelyard", "submit", "--on", "slurm", *words]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, timeout=150)
    assert done.returncode == code


def test_a_submission_killed_behind_sbatch_is_listed_taken_up_and_cancelled(queue: Path, tmp_path: Path):
    (tmp_path / "kill").touch()
    submit("--name", "lost", "--", "doctor", code=-signal.SIGKILL)
    run = tmp_path / "runs" / "lost"
    assert json.loads((run / "launch.json").read_text())["jobs"] == []
    copy = shutil.copytree(run, tmp_path / "watched" / "lost")  # For watch, which asks as it goes.
    SchedulerPoll(copy).update(RunState(copy))
    assert RunState(copy).refresh().job_states == {"queued"}
    [row] = run_list.rows(tmp_path / "runs")
    assert (row["jobs"], row["state"]) == (["40"], "queued")
    assert submitted_trial.can_be_taken_up(run)
    assert find_runs.find("40", tmp_path / "runs") == run  # It is written down now.
    assert cancel_run(run)["cancelled"]
    assert (tmp_path / "cancelled").read_text() == "40\n"


def test_a_submission_killed_before_sbatch_has_no_job(queue: Path, tmp_path: Path):
    run = tmp_path / "runs" / "none"
    launch_record.write(run, Launch("slurm", "x", [], [], 1, 1, marks=["abc-1"]))
    (queue / "39").write_text("/elsewhere/job.sh abc-11\n")
    assert [(row["jobs"], row["state"]) for row in run_list.rows(run.parent)] == [([], "not submitted")]
    assert not submitted_trial.can_be_taken_up(run)
    with pytest.raises(UserError, match="slurm has no job for"):
        cancel_run(run)


def test_a_master_without_its_follower_is_cancelled_and_not_taken_up(queue: Path, tmp_path: Path):
    run = tmp_path / "runs" / "half"
    launch_record.write(run, Launch("slurm", "x", [], [], 1, 1, marks=["abc-1.0", "abc-1.1"]))
    (queue / "7").write_text("/run/launch/job-0.sh abc-1.0\n")
    assert not submitted_trial.can_be_taken_up(run)
    submitted_trial.abandon(run)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_a_job_that_squeue_has_forgotten_has_left_its_number(queue: Path, tmp_path: Path):
    """The script is run by a real bash, as a task of an array and as a job of its own."""
    submit("--name", "early", "--", "doctor")
    run = tmp_path / "runs" / "early"
    mark = json.loads((run / "launch.json").read_text())["marks"][0]
    script = (run / "launch" / "job.sh").read_text().split("srun")[0]
    for word, given, number in (
        (mark, {"SLURM_JOB_ID": "77"}, "77"),
        (f"{mark}_3", {"SLURM_JOB_ID": "79", "SLURM_ARRAY_JOB_ID": "75", "SLURM_ARRAY_TASK_ID": "3"}, "75_3"),
    ):
        subprocess.run(["bash", "-c", script, "job.sh", word], env=os.environ | given, check=True, timeout=150)
        launch_record.write(run, Launch("slurm", "x", [], [], 1, 1, marks=[word]))
        (queue / "40").unlink(missing_ok=True)
        launch = launch_record.launched(run)
        assert launch is not None
        assert launch.jobs == [number]


def test_parts_and_tasks_are_found_by_the_mark_of_their_job(tmp_path: Path, monkeypatch):
    lines = ["12+0 x.sh a-1", "12+1 x.sh a-1", "13_0 y.sh b-1", "13_1 y.sh b-1", "9 x.sh a-1"]
    text = "\n".join(line.partition(" ")[0].ljust(40) + line.partition(" ")[2] for line in lines)
    assert slurm_queue.marked(text) == {"a-1": "12", "b-1": "13"}
    monkeypatch.setattr(slurm_queue, "output_of", lambda command: text)
    launch_record.write(tmp_path, Launch("slurm", "x", [], [], 1, 1, marks=["b-1_1"]))
    assert launch_record.launched(tmp_path).jobs == ["13_1"]


def test_every_launch_of_a_folder_has_a_mark_of_its_own_and_what_is_refused_leaves_the_last(tmp_path: Path):
    first = launch_record.next_mark(tmp_path)
    assert first == launch_record.next_mark(tmp_path)
    earlier = Launch("slurm", "x", ["7"], [], 1, 1, marks=[f"{first}.0", f"{first}.1"])
    launch_record.write(tmp_path, earlier)
    assert launch_record.next_mark(tmp_path) == first.replace("-1", "-2")
    coming = Launch("slurm", "x", [], [], 1, 1, marks=[launch_record.next_mark(tmp_path)])
    with pytest.raises(UserError), intended({tmp_path: coming}):
        assert launch_record.read(tmp_path) == coming
        raise UserError("sbatch refuses the job")
    assert launch_record.read(tmp_path) == earlier
    assert launch_record.read_records(tmp_path) == []
