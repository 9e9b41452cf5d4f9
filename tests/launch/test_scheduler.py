"""What schedulers say is read as they say it, and only changes are written down."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from steelyard import cli
from steelyard.core.errors import Interrupted, UserError
from steelyard.launch import find_runs, launch_record, log_reader, run_list, supervisor
from steelyard.launch.backends import neutral, slurm_queue
from steelyard.launch.launch_record import Launch
from steelyard.launch.submit import cancel_run
from tests import preloaded

WIDTHS = slurm_queue.QUEUE_FIELDS


def queue_line(**fields: str) -> str:
    return "".join(fields.get(name, "N/A").ljust(width) for name, width in WIDTHS.items())


def launched(run: Path, **changes) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "logs").mkdir(exist_ok=True)
    values = {"backend": "slurm", "name": "x", "jobs": ["7"], "command": [], "nodes": 2, "ranks": 2}
    launch_record.write(run, Launch(**{**values, **changes}))
    return run


def test_squeue_is_read_by_its_columns():
    running = queue_line(
        jobarrayid="7", state="RUNNING", restartcnt="1", timeused="1-02:03:04", timelimit="UNLIMITED", exit_code="0",
        reason="None", nodelist="a[1-2]", partition="a10", numnodes="2",
    )  # fmt: skip
    assert slurm_queue.queued(running) == [
        {"job": "7", "state": "running", "reason": "", "nodes": "a[1-2]", "exit_code": None, "elapsed": 93784,
         "time_limit": None, "restarts": 1, "partition": "a10", "needed": 2},
    ]  # fmt: skip
    old = "\n".join(
        queue_line(jobarrayid=str(7 + part), hetjoboffset=str(part), state="PENDING", reason="Priority")
        for part in (0, 1)
    )
    assert [each["job"] for each in slurm_queue.queued(old)] == ["7+0", "7+1"]
    assert [each["job"] for each in slurm_queue.queued(queue_line(jobarrayid="7_3", state="PENDING"))] == ["7_3"]
    assert slurm_queue.queued("slurm_load_jobs error: Invalid job id specified\n") == []


@pytest.mark.parametrize(
    ("text", "code"),
    [("0", 0), ("256", 1), ("33280", 130), ("15", 143), ("137", 137), ("1:0", 1), ("0:9", 137), ("", None)],
)
def test_exit_codes_are_read_as_squeue_and_sacct_write_them(text, code):
    """squeue prints what wait() returned: 15 is a signal, 137 signal 9 with a core, 256 exit code 1."""
    [found] = slurm_queue.queued(queue_line(jobarrayid="7", state="FAILED", exit_code=text or "N/A"))
    assert found["exit_code"] == code


def test_sacct_tells_the_last_of_several_starts():
    text = "7|NODE_FAIL|1:0|00:01:00|01:00:00|a[1-2]\n7|CANCELLED by 1000|0:15|00:00:10|01:00:00|None assigned\n"
    [found] = slurm_queue.accounted(text)
    assert (found["state"], found["reason"], found["exit_code"], found["restarts"]) == ("cancelled", "by 1000", 143, 1)
    assert (found["nodes"], found["elapsed"], found["time_limit"]) == ("", 10, 3600)


@pytest.mark.parametrize(
    ("states", "word"),
    [
        (["COMPLETED", "COMPLETED"], "finished"),
        (["COMPLETED", "RUNNING"], "running"),
        (["RUNNING", "NODE_FAIL"], "node_failed"),
        (["SIGNALING", "COMPLETED"], "running"),
        (["COMPLETED", "SPECIAL_EXIT"], "held"),
        (["COMPLETED", "SOMETHING_NEW"], "unknown"),
        ([], None),
    ],
)
def test_the_parts_of_a_job_have_one_word(states, word):
    records = [neutral({"job": f"7+{number}", "state": state}) for number, state in enumerate(states)]
    other, launch = {"job": "6", "state": "failed"}, Launch("slurm", "x", ["7"], [], 1, 1)
    assert launch_record.state([other, *records], launch) == word


def test_only_changes_are_written_down(tmp_path, monkeypatch):
    """Programs of ours in the place of squeue and sacct."""
    run = launched(tmp_path / "run")
    programs, line = tmp_path / "bin", tmp_path / "line"
    programs.mkdir()
    (programs / "squeue").write_text(f"#!/bin/sh\ncat {line}\n")
    (programs / "sacct").write_text("#!/bin/sh\necho '7|TIMEOUT|0:0|00:01:00|00:01:00|a1'\n")
    for name in ("squeue", "sacct"):
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for state, used in (("PENDING", "0:00"), ("RUNNING", "0:01"), ("RUNNING", "0:02")):
        line.write_text(queue_line(jobarrayid="7", state=state, timeused=used) + "\n")
        launch_record.refresh(run)
    line.write_text("")  # squeue has forgotten it.
    records = (run / "scheduler.jsonl").rename(tmp_path / "kept")
    (run / "scheduler.jsonl").mkdir()  # Nothing can be written there: whoever may only read is answered, too.
    assert [each["state"] for each in launch_record.refresh(run)] == ["timed_out"]
    assert launch_record.is_over(run)
    (run / "scheduler.jsonl").rmdir()
    records.rename(run / "scheduler.jsonl")
    assert [each["state"] for each in launch_record.refresh(run)] == ["queued", "running", "timed_out"]
    assert launch_record.is_over(run)
    with open(run / "scheduler.jsonl", "a") as file:
        file.write('{"torn')
    assert len(launch_record.read_records(run)) == 3


@pytest.mark.parametrize(
    ("queue", "account", "word"),
    [
        ("slurm_load_jobs error: Invalid job id specified", "Slurm accounting storage is disabled", "failed"),
        ("slurm_load_jobs error: Invalid job id specified", "sacct: error: Connection refused", "running"),
        ("Unable to contact slurm controller", "Slurm accounting storage is disabled", "running"),
    ],
)
def test_a_forgotten_job_has_ended_only_where_nobody_could_know_more(tmp_path, monkeypatch, queue, account, word):
    run, programs = launched(tmp_path / "run"), tmp_path / "bin"
    (run / "scheduler.jsonl").write_text('{"time": "then", "job": "7", "state": "RUNNING"}\n')
    programs.mkdir()
    for name, complaint in (("squeue", queue), ("sacct", account)):
        (programs / name).write_text(f"#!/bin/sh\necho {complaint!r} >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    for _ in range(2):
        records = launch_record.refresh(run)
    assert [each["state"] for each in records] == (["running", word] if word != "running" else ["running"])


def test_a_supervisor_is_known_by_more_than_its_number(tmp_path):
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    who = supervisor.start(run, ["sleep", "30"])
    launched(run, backend="local", jobs=[str(who["pid"])], process=who)
    try:
        assert launch_record.refresh(run)[-1]["state"] == "running"
        assert supervisor.is_alive(who | {"started": 1}) is False
        assert supervisor.is_alive(who | {"host": "elsewhere"}) is None
    finally:
        reported = cancel_run(run)
    assert reported["state"] == "cancelled"
    assert supervisor.is_alive(who) is False
    assert cancel_run(run)["cancelled"] is False


def test_a_supervisor_that_was_killed_takes_its_ranks_with_it(tmp_path):
    run, mark = tmp_path / "run", tmp_path / "pid"
    (run / "logs").mkdir(parents=True)
    who = supervisor.start(run, ["bash", "-c", f"echo $$ >{mark}; exec sleep 30"])
    launched(run, backend="local", jobs=[str(who["pid"])], process=who)
    while not mark.exists() or not mark.read_text():
        time.sleep(0.02)
    os.kill(who["pid"], signal.SIGKILL)
    os.waitpid(who["pid"], 0)
    found = launch_record.refresh(run)[-1]
    assert (found["state"], found["reason"]) == ("failed", "its supervisor was killed, or the machine went down")
    deadline = time.monotonic() + 5
    while supervisor.started(int(mark.read_text())) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_is_found_by_folder_name_and_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = launched(Path("runs/mine"), jobs=["12", "13"])
    assert [find_runs.find(word) for word in ("runs/mine", "mine", "13", "12+1")] == [run] * 4
    with pytest.raises(UserError, match="no run below runs has the job 14"):
        find_runs.find("14")
    with pytest.raises(UserError, match="yours is not a run"):
        find_runs.find("yours")


def test_runs_in_folders_of_runs_are_listed_by_their_path(tmp_path):
    for name in ("one", "deep/two"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    assert sorted(row["name"] for row in run_list.rows(tmp_path)) == ["deep/two", "one"]


@pytest.mark.parametrize("jobs", [["--user=me"], ["1;x"], None, [7]])
def test_a_launch_whose_jobs_are_no_numbers_is_not_believed(tmp_path, jobs):
    run = launched(tmp_path, jobs=jobs)
    with pytest.raises(UserError, match="not a valid launch record"):
        launch_record.read(run)


def test_logs_are_shown_as_text_and_samples_as_devices(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a1.out").write_text("x" * (1 << 19) + "\none\n\x1b[2Jtwo\n")
    device = {"index": 0, "name": "NVIDIA A10", "temperature": 49, "utilisation": 97, "memory_used": 9 << 30,
              "memory_total": 22 << 30, "power": None, "processes": [{}]}  # fmt: skip
    (folder / "a1.gpu").write_text(json.dumps({"devices": [device]}) + "\n{torn")
    assert log_reader.tail(folder / "a1.out", 2) == ["one", "?two"]
    assert log_reader.tail(folder / "a1.gpu", 5) == [
        "[0] NVIDIA A10 |  49 C,  97 % |   9216 /  22528 MiB |    - W | 1 process"
    ]
    assert log_reader.devices('{"devices": [7]}') == []
    assert [path.name for path in log_reader.paths(tmp_path)] == ["a1.out"]
    with pytest.raises(UserError, match="hosts: a1"):
        log_reader.paths(tmp_path, node="b7")
    (folder / "launcher.log").write_text("srun: error: no\n")
    assert [path.name for path in log_reader.paths(tmp_path, stream="err")] == ["launcher.log"]
    (folder / "a1.err").touch()
    assert [path.name for path in log_reader.paths(tmp_path, stream="err")] == ["a1.err"]


def test_following_shows_what_is_added_and_hosts_that_join(tmp_path, monkeypatch):
    monkeypatch.setattr(log_reader, "SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(log_reader, "SECONDS_BETWEEN_QUESTIONS", 0.0)
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a1.out").write_text("old\n")
    turns = iter(
        [lambda: (folder / "a1.out").open("a").write("new\nhal"), lambda: (folder / "a2.err").write_text("x\n")]
    )

    def is_over() -> bool:
        turn = next(turns, None)
        if turn is not None:
            turn()
        return turn is None

    ends = log_reader.sizes(log_reader.paths(tmp_path))
    (folder / "a1.out").open("a").write("between\n")
    assert log_reader.tail(folder / "a1.out", 5, ends[folder / "a1.out"]) == ["old"]
    lines = [(path.name, line) for path, line in log_reader.follow(lambda: log_reader.paths(tmp_path), is_over, ends)]
    assert lines == [("a1.out", "between"), ("a1.out", "new"), ("a2.err", "x"), ("a1.out", "hal")]


def test_a_starter_keeps_the_streams_apart_and_hides_secrets(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "launch").mkdir()
    monkeypatch.setenv("MY_TOKEN", "very-secret-value")
    talk = (
        "import os, sys; r = os.environ['RANK']; print('out', r, os.environ['WORLD_SIZE'], os.environ['MY_TOKEN']);"
        "print('err', r, file=sys.stderr); sys.exit(3 if r == '1' else 0)"
    )
    words = ["--run", str(tmp_path), "--groups", "1x2", "--", sys.executable, "-c", talk]
    done = preloaded.run(
        [sys.executable, "-P", "-m", "steelyard.launch.node_agent", *words], timeout=600, capture_output=True
    )
    assert done.returncode == 3
    [out, err] = (next((tmp_path / "logs").glob(f"*.{kind}")).read_text().splitlines() for kind in ("out", "err"))
    assert sorted(out) == ["out 0 2 [hidden]", "out 1 2 [hidden]"]
    assert {"err 0", "err 1", "error: rank 1 ended with exit code 3"} <= set(err)
    [sample] = next((tmp_path / "logs").glob("*.gpu")).read_text().splitlines()
    assert json.loads(sample)["kind"] in ("cpu", "gpu")


def test_a_warning_over_two_roads_is_heard_once(monkeypatch):
    monkeypatch.setattr(cli, "_interrupted_at", -1.0)
    with pytest.raises(Interrupted):
        cli._interrupt(signal.SIGUSR1, None)
    cli._interrupt(signal.SIGUSR1, None)
    monkeypatch.setattr(cli, "_interrupted_at", time.monotonic() - 2)
    with pytest.raises(Interrupted):
        cli._interrupt(signal.SIGUSR1, None)
