"""`steelyard watch`: the page as text, its exit codes, and how a run is found."""

import json
import os
import re
import select
import sys
import termios
import time
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.core.errors import UserError
from steelyard.launch import find_runs
from steelyard.observe import terminal
from steelyard.observe.run_view import view
from tests import preloaded
from tests.conftest import Workplace, kill
from tests.observe.folders import Folder


def test_a_narrow_terminal_has_the_whole_verdict_and_the_beginning_of_all_else(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    folder.logs["n0.err"] = "ValueError: " + "a long story " * 12 + "of a-very-long/path-name\n"
    lines = terminal.rendered(view(folder.state()))
    narrow = [line for line, _ in terminal.fitted(lines, 60)]
    verdict, wide = narrow[1 : narrow.index("")], [line for line, _ in lines[1 : lines.index(("", ""))]]
    assert len(verdict) > len(wide)
    assert all(len(line) <= 60 for line in verdict)
    assert "".join("".join(verdict).split()) == "".join("".join(wide).split())
    assert narrow[narrow.index("") :] == [line for line, _ in lines[lines.index(("", "")) :]]


def test_the_page_has_all_there_is_to_see(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    folder.logs["n1.err"] = "UserWarning: careful\n"
    page = terminal.plain(view(folder.state()))
    for part in (
        "running well, 11:40 left", "step 300 of 1000 (30%)", "loss 5.0000", "1000.0 ms/step", "64 tokens/s", "job 77",
        "running", "partition 1-1", "reported", "n0  ranks 0 to 1  NVIDIA H200", "98%", "40.0 GiB of 140 GiB", "60 C",
        "600 W", "out| step 300/1000", "err| UserWarning: careful", "slowest rank 1",
    ):  # fmt: skip
        assert part in page, part


def test_what_a_host_reports_otherwise_is_shown(tmp_path: Path):
    folder = Folder(tmp_path / "run")
    folder.hosts["n1"]["layout"]["partition"] = "2-0"
    page = terminal.plain(view(folder.state()))
    assert "partition 1-1, but 2-0 on n1" in page


def test_hostile_names_and_secrets_do_not_reach_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    folder = Folder(tmp_path / "run\x1b[31m $(reboot)")
    folder.logs["n0.err"] = (
        "using very-secret-value and hf_abcdefghijklmnopqrstuvwx\n\x1b]0;owned\x07[red]markup[/red]\n"
    )
    folder.jobs[0]["reason"] = "\x1b[2J$(reboot)"
    page = json.dumps(view(folder.state()))
    assert "very-secret" not in page
    assert "hf_abc" not in page
    assert "\\u001b" not in page
    assert "[red]markup[/red]" in page
    folder.logs["n0.err"] = "ValueError: x\n"
    assert "steelyard logs '" in view(folder.state())["verdicts"][0]["what_to_do"]


def test_a_run_is_found_by_folder_name_job_or_as_the_newest(tmp_path: Path):
    folder = Folder(tmp_path / "runs" / "one")
    folder.launch["jobs"] = ["81", "82"]
    one = folder.write()
    two = Folder(tmp_path / "runs" / "deep" / "two").write()
    os.utime(one / "metrics.jsonl", (time.time() + 60, time.time() + 60))
    runs = tmp_path / "runs"
    assert find_runs.find(str(two), runs) == two
    assert find_runs.find("deep/two", runs) == two
    assert find_runs.find("82", runs) == one
    assert find_runs.find("77", runs) == two
    assert find_runs.find(None, runs) == one
    for unknown in ("99", "three", str(tmp_path)):
        with pytest.raises(UserError):
            find_runs.find(unknown, runs)


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path):
    Folder(tmp_path / "elsewhere").write()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    assert list(find_runs.below(tmp_path / "runs")) == []


def test_scripts_are_told_by_exit_codes(workplace: Workplace):
    queued = Folder(workplace.path / "runs" / "queued", time.time())
    queued.jobs, queued.records, queued.hosts, queued.samples = [queued.job("PENDING", reason="Priority")], [], {}, {}
    queued.launch["backend"] = "none"
    queued.write()
    (workplace.path / "runs" / "queued" / "launch.json").unlink()  # No scheduler is asked.
    reported = workplace.steelyard("watch", "runs/queued")
    assert reported.returncode == 3, reported.stderr
    assert "wait: jobs of higher priority come first" in reported.stdout
    reported = workplace.steelyard("watch", "none")
    assert reported.returncode == 2
    assert "none is not a run" in reported.stderr


def test_following_for_a_program_prints_one_object_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = Folder(tmp_path / "run", time.time())
    folder.write()
    (folder.path / "launch.json").unlink()

    def end(seconds: float) -> None:
        folder.manifest["state"] = "finished"
        folder.jobs.append(folder.job("COMPLETED"))
        folder.write()
        (folder.path / "launch.json").unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steelyard.observe.terminal.time.sleep", end)
        with pytest.raises(SystemExit) as ended:
            main(["watch", str(folder.path), "--follow", "--json"])
    assert json.loads(capsys.readouterr().out)["ended"]
    assert ended.value.code == 0
    with pytest.raises(SystemExit) as refused:
        main(["watch", str(folder.path), "--follow", "--once"])
    assert refused.value.code == 2


@pytest.mark.slow
def test_a_real_run_is_healthy_then_killed_and_then_completed(workplace: Workplace):
    words = ("train", "tiny.toml", "train.steps=100000", "checkpoint.every=50", "log.every=20")
    process = workplace.start(*words)
    try:
        metrics = workplace.path / "runs" / "tiny" / "metrics.jsonl"
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.stat().st_size > 2000) and time.monotonic() < deadline:
            time.sleep(0.2)
        reported = workplace.steelyard("watch", "--json")
        seen = json.loads(reported.stdout)
        assert (reported.returncode, seen["verdicts"][0]["kind"]) == (0, "healthy"), seen["verdicts"]
        assert seen["configuration"]["reported"]["world"] == 1
        assert seen["progress"]["seconds_left"] > 0
        kill(process)
        reported = workplace.steelyard("watch")
        assert reported.returncode == 1
        assert re.search(r"WRONG +was killed", reported.stdout)
    finally:
        if process.poll() is None:
            kill(process)
    step = json.loads(workplace.steelyard("watch", "--json").stdout)["progress"]["step"]
    workplace.steelyard("train", "tiny.toml", f"train.steps={step + 20}", "checkpoint.every=50", "log.every=20")
    reported = workplace.steelyard("watch", "--follow")
    assert reported.returncode == 0, reported.stdout
    assert "ok: completed" in reported.stdout


def test_a_terminal_has_a_page_that_renews_itself_and_ends_with_the_run(workplace: Workplace):
    folder = Folder(workplace.path / "runs" / "run", time.time())
    folder.launch = {}
    folder.write()
    (folder.path / "launch.json").unlink()  # No scheduler is asked.
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 100))
    command = [sys.executable, "-P", "-m", "steelyard", "watch", "--every", "0.2"]
    environment = os.environ | {"TERM": "xterm"}
    process = preloaded.Popen(command, cwd=workplace.path, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        assert "running well" in read_until(ours, "running well")
        with open(folder.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(folder.record(310)) + "\n")
        read_until(ours, "step 310 of 1000")
        folder.jobs.append(folder.job("TIMEOUT"))
        (folder.path / "scheduler.jsonl").write_text("".join(json.dumps(job) + "\n" for job in folder.jobs))
        assert "\x1b[1;31m" in read_until(ours, "reached its time limit of 2:00:00")
        assert process.wait(20) == 1
    finally:
        if process.poll() is None:
            kill(process)
        os.close(ours)


def read_until(descriptor: int, wanted: str, seconds: float = 30) -> str:
    """What a terminal shows until it shows something."""
    seen, deadline = "", time.monotonic() + seconds
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([descriptor], [], [], 0.5)[0]:
            seen += os.read(descriptor, 1 << 16).decode("utf-8", "replace")
    return seen


@pytest.mark.slow
def test_a_run_that_filled_its_disk_is_told_so(workplace: Workplace, small_disk: Path):
    run = str(small_disk / "run")
    words = ("train.steps=40", "checkpoint.every=2", "checkpoint.keep_last=100", "checkpoint.background=false")
    assert workplace.steelyard("train", "tiny.toml", *words, "--run", run).returncode == 1
    reported = workplace.steelyard("watch", run, "--json")
    assert reported.returncode == 1
    kinds = {verdict["kind"]: verdict["message"] for verdict in json.loads(reported.stdout)["verdicts"]}
    assert "disk-full" in kinds, kinds
    assert kinds.keys() & {"failed", "killed"}, kinds
