"""Real commands that end well, die, hang and hide: each outcome by its name, and no process left."""

import os
import sys
import time
from pathlib import Path

import pytest

from steelyard.core.errors import Interrupted
from steelyard.core.recipe.site_section import SiteSection
from steelyard.launch.backends import JobState
from steelyard.launch.submit import SubmitRequest
from steelyard.tune import local_trial, outcome, storage, submitted_trial, trial
from steelyard.tune.command import STORAGE
from steelyard.tune.objective import Objective, ObjectiveValues
from steelyard.tune.trial_output import LOG

SCORE = Objective(name="score", regex=r"score: ([\d.]+)", goal="maximize")


def run(folder: Path, code: str, timeout=20.0, hang=20.0, **options):
    measured = [ObjectiveValues(SCORE)]
    limits = trial.TrialLimits(timeout, hang, **options.pop("limits", {}))
    ended = local_trial.run([sys.executable, "-c", code], folder, measured, limits, **options)
    return ended, measured[0]


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("code", "ended", "reason"),
    [
        ("print('score: 3.5')", outcome.FINISHED, ""),
        ("print('nothing')", outcome.CRASHED, "score was not found"),
        ("raise ValueError('boom')", outcome.CRASHED, "ValueError: boom"),
        ("import sys; sys.exit(3)", outcome.CRASHED, "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", outcome.CRASHED, "killed by SIGKILL"),
        ("import sys; sys.exit('rank 1 was killed by SIGKILL\\n  out of memory? see dmesg')", outcome.CRASHED, ""),
        ("raise SystemExit('torch.OutOfMemoryError: CUDA out of memory. Tried')", outcome.OUT_OF_MEMORY, "Tried"),
        ("print('CUDA_ERROR_OUT_OF_MEMORY')  # | tee log", outcome.OUT_OF_MEMORY, "OUT_OF_MEMORY"),
        ("x = [0] * (1 << 62)", outcome.OUT_OF_MEMORY, "MemoryError"),
    ],
)
def test_an_end_is_told_by_its_kind(tmp_path, code, ended, reason):
    reported, _ = run(tmp_path, code)
    assert reported.outcome == ended
    assert reason in reported.reason


@pytest.mark.parametrize(
    ("state", "code", "tail", "reported"),
    [
        (JobState.FINISHED, 0, [], None),
        (JobState.OUT_OF_MEMORY, 0, ["step 3"], (outcome.OUT_OF_MEMORY, "killed by the scheduler: out of memory")),
        (
            JobState.FAILED,
            1,
            ["RuntimeError: CUDA out of memory"],
            (outcome.OUT_OF_MEMORY, "RuntimeError: CUDA out of memory"),
        ),
        (JobState.FAILED, 1, ["ValueError: boom", "srun: error"], (outcome.CRASHED, "ValueError: boom")),
        (JobState.FAILED, 137, [], (outcome.CRASHED, "killed by SIGKILL")),
        (JobState.TIMED_OUT, None, [], (outcome.TIMED_OUT, "killed by the scheduler: time limit")),
        (JobState.NODE_FAILED, None, [], (outcome.LOST, "its node failed")),
        (JobState.PREEMPTED, None, [], (outcome.LOST, "preempted by another job")),
        (JobState.CANCELLED, None, [], (outcome.LOST, "its job was cancelled")),
    ],
)
def test_an_end_is_told_by_the_schedulers_word(state, code, tail, reported):
    assert outcome.of_state(state, code, tail) == reported


@pytest.mark.parametrize(
    ("groups", "counted"),
    [("0::/slurm/job_7\n", "sys/fs/cgroup/slurm/job_7/memory.events"),
     ("4:cpu,memory:/job\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control"),
     ("0::/\n", "sys/fs/cgroup/memory.events"), ("", "proc/vmstat")],
)  # fmt: skip
def test_kills_by_memory_are_counted_where_the_process_is(tmp_path, groups, counted):
    for name, text in (("proc/self/cgroup", groups), (counted, "oom 9\noom_kill 3\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert outcome.kills_by_memory(tmp_path) == 3


def test_a_silent_trial_is_hung_and_a_long_one_timed_out(tmp_path):
    reported, _ = run(tmp_path, "import time; time.sleep(60)", hang=0.3)
    assert reported.outcome == outcome.HUNG
    reported, _ = run(tmp_path, "import time\nwhile True: print('tick', flush=True); time.sleep(0.05)", timeout=0.6)
    assert reported.outcome == outcome.TIMED_OUT
    reported, _ = run(tmp_path, "import time; time.sleep(60)", limits={"deadline": time.monotonic() + 0.3})
    assert (reported.outcome, "hours" in reported.reason) == (outcome.CUT_SHORT, True)


def test_a_command_that_is_not_there_crashes(tmp_path):
    reported = local_trial.run(["/no/such/program"], tmp_path, [ObjectiveValues(SCORE)], trial.TrialLimits(20, 20))
    assert reported.outcome == outcome.CRASHED
    assert "could not be started" in reported.reason


def test_secrets_of_the_environment_never_reach_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdefgh12345678")
    monkeypatch.setenv("STEELYARD_TUNE_STORAGE", "postgresql://tuner@host/db?password=of-the-database")
    code = """
import os, sys
for half in ("score: 1 abcdefgh", "12345678 "):
    sys.stdout.write(half)
    sys.stdout.flush()
print(os.environ)
"""
    reported, measured = run(tmp_path, code)
    log = (tmp_path / LOG).read_text()
    assert (reported.outcome, measured.value) == (outcome.FINISHED, 1.0)
    assert "abcdefgh12345678" not in log
    assert "[hidden]" in log
    assert "of-the-database" not in log
    shown = storage.shown("postgresql+psycopg://tuner@host/db?password=of-the-database")
    assert shown == "postgresql+psycopg://tuner@host/db?password=***"


def test_where_the_study_is_reaches_no_job(tmp_path, monkeypatch):
    monkeypatch.setenv(STORAGE, "postgresql://tuner@host/db?password=of-the-database")
    seen = {}

    def submit(request):
        seen.update(os.environ)
        return {"jobs": ["7"], "ranks": 1, "run": str(tmp_path)}

    monkeypatch.setattr(submitted_trial, "submit", submit)
    submitted_trial.start(SubmitRequest("slurm", SiteSection()))
    assert (STORAGE in seen, STORAGE in os.environ) == (False, True)


def test_nothing_that_a_command_started_outlives_it(tmp_path):
    code = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print("score: 1", flush=True)
"""
    reported, _ = run(tmp_path, code)
    assert reported.outcome == outcome.FINISHED
    assert not is_alive(int((tmp_path / "pid").read_text()))
    reported, _ = run(tmp_path, code + "time.sleep(600)", hang=0.3)
    assert reported.outcome == outcome.HUNG
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_an_interruption_ends_the_trial_and_goes_on(tmp_path):
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt():
        if (tmp_path / "pid").exists():
            raise Interrupted

    with pytest.raises(Interrupted):
        run(tmp_path, code, is_behind=interrupt)
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_live_records_stop_a_trial_that_is_behind(tmp_path):
    (tmp_path / "run").mkdir()
    code = f"""
import json, time
for step in range(1, 1000):
    with open({str(tmp_path / "run/metrics.jsonl")!r}, "a") as file:
        file.write(json.dumps({{"step": step, "loss": 5.0}}) + "\\n" + "torn")
    time.sleep(0.05)
"""
    measured = [ObjectiveValues(Objective(metric="loss"))]
    behind = lambda: "far behind" if len(measured[0].curve) >= 1 else None  # noqa: E731
    reported = local_trial.run([sys.executable, "-c", code], tmp_path, measured, trial.TrialLimits(30, 30), behind)
    assert (reported.outcome, reported.reason) == (outcome.STOPPED_EARLY, "far behind")
