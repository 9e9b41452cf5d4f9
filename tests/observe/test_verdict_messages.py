"""What verdicts say: which rank, node, error and time they name, and which of several causes."""

import json
import os
import time
from typing import Any

import pytest

from steelyard.core import files
from steelyard.observe import scheduler_poll
from steelyard.observe.known_errors import explain_line
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import view
from steelyard.observe.scheduler_poll import SchedulerPoll
from steelyard.observe.terminal import plain
from steelyard.observe.verdict import judge
from tests.doctor.test_explain import MESSAGES
from tests.observe.folders import NOW, RECIPE, Folder, iso
from tests.observe.troubles import (
    alone,
    ended,
    error_on_stderr,
    frozen,
    lost_node,
    nobody,
    older,
    powered_off,
    slow,
    slow_steps,
    too_few_nodes,
    verdicts,
    wedged,
)


def test_a_stopped_process_is_named_by_its_rank_and_how_to_let_it_go_on(folder: Folder):
    frozen(folder)
    (verdict,) = judge(folder.state())
    assert verdict.message == "stopped by a signal (SIGSTOP): rank 3, process 2, on n1"
    assert verdict.what_to_do == "resume it: kill -CONT 2 on n1"
    folder.samples["n1"].append(folder.sample(NOW))
    assert verdicts(folder) == {"healthy": "ok"}


def test_memory_checkpoints_that_a_run_left_are_named(folder: Folder):
    left = {"folder": "/dev/shm/steelyard-0123456789abcdef", "hosts": ["n1", "n0"]}
    alone("failed", error="no", memory_checkpoints=left)(folder)
    (verdict,) = judge(folder.state())
    assert "in /dev/shm/steelyard-0123456789abcdef on n0, n1, if it is still there" in verdict.what_to_do
    assert verdict.what_to_do.endswith("rm -r /dev/shm/steelyard-0123456789abcdef on each")
    folder.manifest["memory_checkpoints"] = None
    assert "/dev/shm" not in judge(folder.state())[0].what_to_do


def test_a_lost_node_is_named_with_the_time_since_when_it_is_lost(folder: Folder):
    lost_node(folder)
    at = time.strftime("%H:%M:%S", time.localtime(NOW - 11))
    (verdict,) = judge(folder.state())
    assert verdict.message == f"n1 does not answer since {at}"
    folder.jobs += [folder.job("NODE_FAIL"), folder.job("PENDING", reason="BeginTime", restarts=1)]
    (verdict,) = judge(folder.state())
    assert verdict.kind == "requeued"
    assert verdict.message.endswith(f"after 1 restart; n1 does not answer since {at}")
    folder.jobs.pop()
    messages = {each.kind: each.message for each in judge(folder.state())}
    assert messages["node-failed"].startswith(f"job 77 lost a node: n1 does not answer since {at}")


def test_a_lost_node_of_an_earlier_attempt_is_not_lost_now(folder: Folder):
    lost_node(folder)
    folder.logs["n0.err"] = ""
    folder.jobs += [folder.job("PENDING", reason="BeginTime", restarts=1), folder.job("RUNNING", at=NOW - 2)]
    folder.beats |= {"n0": NOW - 1, "n2": NOW - 1}
    (verdict,) = judge(folder.state())
    assert verdict.message == "has been starting again for 0:02; no rank has reported yet"


def test_a_node_that_srun_names_is_lost(folder: Folder):
    folder.logs["n0.err"] = "srun: error: Node failure on n1\n"
    verdict = judge(folder.state())[0]
    assert (verdict.kind, verdict.message[:18]) == ("lost-node", "n1 does not answer")


def test_a_job_that_cannot_start_says_what_it_needs(folder: Folder):
    too_few_nodes(folder)
    (verdict,) = judge(folder.state())
    assert verdict.message == "job 77 cannot start: needs 2 nodes of type a100, 1 is alive (n1 is down)"
    folder.launch["placement"] = []
    (verdict,) = judge(folder.state())
    assert "needs 2 nodes of partition gpu, 1 is alive" in verdict.message


def test_slow_steps_and_the_slow_rank_are_one_verdict(folder: Folder):
    slow_steps(folder)
    (verdict,) = judge(folder.state())
    assert verdict.message == "steps take 6.0 times as long as 10 minutes ago; no rank is slower than its peers"
    slow(folder)
    (verdict,) = judge(folder.state())
    assert verdict.message == (
        "steps take 6.0 times as long as 10 minutes ago; rank 3 on n1 is 1.6 times slower than its peers, "
        "and all ranks wait for it"
    )
    for record in folder.records[-8:]:
        record["rank_seconds"]["data_wait"] = 0.4
    (verdict,) = judge(folder.state())
    assert "1.6 times slower than its peers, waiting for data, and all ranks wait" in verdict.message
    assert "filesystem of the token files" in verdict.what_to_do


def test_a_failed_run_says_what_is_not_said_already_and_from_where_it_would_go_on(folder: Folder):
    folder.manifest |= {"state": "failed", "ended": iso(NOW), "error": "the gradient became nan\n  lower the rate"}
    ended("FAILED", exit_code=1)(folder)
    (verdict,) = judge(folder.state())
    assert (
        verdict.message
        == "job 77 failed with exit code 1 on n[0-1], at step 300 of 1000; error: the gradient became nan\n"
        "  lower the rate"
    )
    assert verdict.what_to_do.endswith("the same command starts from step 0: no checkpoint was written yet")
    folder.logs["n0.err"] = "error: the gradient became nan\n"
    (folder.path / "checkpoints" / "step-00000250").mkdir(parents=True)
    (folder.path / "checkpoints" / "step-x").mkdir()
    error, end = judge(folder.state())
    assert error.message == "n0: error: the gradient became nan"
    assert end.message == "job 77 failed with exit code 1 on n[0-1], at step 300 of 1000"
    assert end.what_to_do.endswith("the same command resumes from step 250")


def test_a_rank_that_lost_another_is_told_in_words(folder: Folder):
    gloo = "[/x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:9115: Connection reset by peer. GLHF!"
    folder.manifest |= {"error": gloo}
    alone("failed", error=gloo)(folder)
    (verdict,) = judge(folder.state())
    assert (
        verdict.message == "failed, at step 300 of 1000: a rank lost its connection to another rank, which ended first"
    )


def test_what_the_scheduler_says_counts_where_it_cannot_be_written_down(folder: Folder, monkeypatch):
    state = folder.state()
    said = [*folder.jobs, folder.job("failed", exit_code=1)]
    monkeypatch.setattr(scheduler_poll.launch_record, "refresh", lambda path: said)
    SchedulerPoll(folder.path).update(state)
    assert state.unwritten == said[1:]
    assert [(verdict.kind, verdict.level) for verdict in judge(state)] == [("failed", "wrong")]


def test_the_first_error_is_named_and_not_what_follows_from_it(folder: Folder):
    error_on_stderr(folder)
    (verdict,) = judge(folder.state())
    assert verdict.message.startswith("n1: ValueError: the cause (and 2 more on 2 hosts)")


def test_an_error_of_several_lines_is_shown_whole_with_the_advice_of_doctor_explain(folder: Folder):
    folder.logs["n0.err"] = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n"
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
        "[rank1]:   GPU 0 has 1 GiB free\nstep 3\n"
    )
    seen = view(folder.state())
    (verdict,) = seen["verdicts"]
    assert verdict["message"] == (
        "n0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n  GPU 0 has 1 GiB free"
    )
    known = explain_line("torch.OutOfMemoryError: CUDA out of memory")
    assert known is not None
    assert verdict["what_to_do"].startswith(known.meaning)
    assert known.hint.rstrip(".") in verdict["what_to_do"]
    page = plain(seen).splitlines()
    assert "  GPU 0 has 1 GiB free" in page[2]
    assert known.meaning in page[3]
    folder.logs["n0.err"] = ""
    folder.manifest |= {"state": "failed", "ended": iso(NOW), "error": "CUDA out of memory. Tried to allocate 2 GiB"}
    ended("FAILED", exit_code=1)(folder)
    (verdict,) = judge(folder.state())
    assert verdict.what_to_do.startswith(known.meaning)


def test_the_lines_of_an_exception_that_are_not_indented_belong_to_it(folder: Folder):
    folder.logs["n0.err"] = (
        "[rank1]: Traceback (most recent call last):\n[rank1]:   File\n"
        "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error\n"
        "[rank1]: ncclSystemError: System call failed or device error.\n"
        "[rank1]: Last error:\n[rank1]: socketStartConnect: Connect to 10.0.0.2<41> failed\n"
        "[rank1]:[W1116 12:00:00] destroy_process_group() was not called\nstep 3\n"
    )
    (verdict,) = judge(folder.state())
    assert verdict.message.splitlines() == [
        "n0: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled system error",
        "ncclSystemError: System call failed or device error.",
        "Last error:",
        "socketStartConnect: Connect to 10.0.0.2<41> failed",
    ]


@pytest.mark.parametrize("message", [text for text, _, is_harmless in MESSAGES if not is_harmless])
def test_every_message_that_doctor_explain_knows_has_its_advice_in_the_verdict(folder: Folder, message):
    folder.logs["n0.err"] = f"started\n{message}\n"
    folder.manifest |= {"state": "failed", "ended": iso(NOW)}
    ended("FAILED", exit_code=1)(folder)
    known = explain_line(message)
    assert known is not None
    assert any(verdict.what_to_do.startswith(known.meaning) for verdict in judge(folder.state()))


def test_an_error_that_did_not_stop_the_run_is_a_warning_and_an_earlier_attempts_is_none(folder: Folder):
    error_on_stderr(folder)
    folder.errors_at = NOW - 100
    assert verdicts(folder) == {"errors": "warning"}
    folder.errors_at = NOW - 5000
    assert verdicts(folder) == {"healthy": "ok"}


def test_an_error_gets_no_younger_by_the_warnings_that_follow_it(folder: Folder):
    folder.logs["n0.err"], folder.errors_at = "ValueError: long ago\n", NOW - 300
    state = folder.state()
    with open(folder.path / "logs" / "n0.err", "a") as log:
        log.write("UserWarning: again\n")
    os.utime(folder.path / "logs" / "n0.err", (NOW, NOW))
    state.refresh(NOW).disk = (1 << 40, 4 << 40)
    assert [(verdict.kind, verdict.level) for verdict in judge(state)] == [("errors", "warning")]


def test_an_error_is_as_old_as_the_samples_say_and_not_as_the_last_line_of_its_log(folder: Folder):
    """A watcher that meets the log late sees a line that was written just now behind an error from long ago."""
    error = "ValueError: long ago\n"
    folder.logs["n0.err"], folder.errors_at = error + "UserWarning: again\n", NOW
    assert verdicts(folder) == {"errors": "wrong"}
    for sample in folder.samples["n0"]:
        sample["logged"] = len(error) if sample["time"] >= NOW - 60 else 0
    assert verdicts(folder) == {"errors": "warning"}
    for sample in folder.samples["n0"]:
        sample["logged"] = len(error) if sample["time"] >= NOW - 20 else 0
    assert verdicts(folder) == {"errors": "wrong"}
    folder.hosts = {}
    folder.jobs[0]["time"] = iso(NOW - 10)
    assert "errors" not in verdicts(folder)  # An earlier attempt's.


def test_of_several_hosts_the_one_that_complained_first_is_named(folder: Folder):
    error = "ValueError: no\n"
    folder.logs |= {"n0.err": error, "n1.err": error}
    for host, since in (("n0", 10), ("n1", 25)):
        for sample in folder.samples[host]:
            sample["logged"] = len(error) if sample["time"] >= NOW - since else 0
    (verdict,) = judge(folder.state())
    assert verdict.message.startswith("n1: ")


def test_a_run_that_was_asked_to_stop_has_no_error_and_was_interrupted(folder: Folder):
    folder.logs["n0.err"] = "error: interrupted; saved step 300 of 1000\n"
    ended("CANCELLED")(folder)
    assert verdicts(folder) == {"cancelled": "wrong"}
    ended("FAILED", exit_code=130)(folder)
    folder.manifest |= {"state": "interrupted", "ended": iso(NOW)}
    assert verdicts(folder) == {"interrupted": "wrong"}


def test_what_a_job_said_that_ended_before_its_ranks_began_is_named(folder: Folder):
    folder.logs, folder.hosts, folder.records, folder.samples = {}, {}, [], {}
    folder.logs["launcher.log"] = "bash: line 1: /none/python: No such file or directory\n"
    ended("FAILED", exit_code=127)(folder)
    reported = {verdict.kind: verdict.message for verdict in judge(folder.state())}
    assert "failed" in reported
    assert "/none/python" in reported["errors"]


@pytest.mark.parametrize("seconds", [-4000.0, -100.0, 100.0, 4000.0])
def test_a_host_whose_clock_is_wrong_is_judged_like_any_other(folder: Folder, seconds: float):
    def set_back(host: str) -> None:
        folder.behind[host] = seconds
        folder.hosts[host]["clock"] -= seconds
        for sample in folder.samples[host]:
            sample["time"] -= seconds

    set_back("n1")
    assert verdicts(folder) == {"clocks-differ": "warning"}
    nobody(folder)
    assert verdicts(folder) == {"no-process": "wrong", "clocks-differ": "warning"}
    powered_off(folder)
    folder.behind["n1"] = 0.0
    assert "lost-node" in verdicts(folder)


def test_records_are_timed_by_the_clock_of_their_writer(folder: Folder):
    for host in folder.hosts:
        folder.behind[host] = 500.0
        folder.hosts[host]["clock"] -= 500
        for sample in folder.samples[host]:
            sample["time"] -= 500
    for record in folder.records:
        record["time"] -= 500
    assert verdicts(folder) == {"healthy": "ok"}
    wedged(folder)
    assert verdicts(folder) == {"no-progress": "wrong"}


def test_what_stood_in_the_log_before_the_ranks_met_did_not_stop_them(folder: Folder):
    folder.logs["n0.err"] = "RuntimeError: of the attempt before\n"
    folder.hosts["n0"]["logged"] = len(folder.logs["n0.err"])
    assert verdicts(folder) == {"healthy": "ok"}
    folder.logs["n0.err"] += "ValueError: of this one\n"
    (verdict,) = judge(folder.state())
    assert verdict.message == "n0: ValueError: of this one"


def test_a_pause_is_measured_by_the_runs_own_pace_and_by_the_watchers_patience(folder: Folder):
    """A record every 10 s, of which four are much, and a validation of 8 s that may be under way."""
    older(folder, 50)
    path = folder.write()

    def kinds(patience: float) -> list[str]:
        state = RunState(path, patience).refresh(NOW)
        state.disk = (1 << 40, 4 << 40)
        return [verdict.kind for verdict in judge(state)]

    assert kinds(60.0) == kinds(55.0) == ["healthy"]
    assert kinds(0.0) == kinds(42.0) == ["no-progress"]
    assert "expected at most 0:48" in judge(RunState(path, 0.0).refresh(NOW))[0].message


def test_the_device_that_stands_still_while_others_wait_is_named(folder: Folder):
    wedged(folder)
    for sample in folder.samples["n1"]:
        sample["devices"][0]["utilisation"] = 0
    (verdict,) = judge(folder.state())
    assert "n1's GPU 0 is idle" in verdict.message


def test_a_job_in_two_parts_of_which_one_failed_is_wrong_while_the_other_runs(folder: Folder):
    folder.jobs = [folder.job("RUNNING", job="77+0", at=NOW - 3600), folder.job("FAILED", job="77+1", exit_code=9)]
    (verdict,) = judge(folder.state())
    assert "job 77+1 failed with exit code 9" in verdict.message
    assert "still run" in verdict.message


def test_the_jobs_of_an_earlier_launch_no_longer_count(folder: Folder):
    folder.jobs.insert(0, folder.job("FAILED", job="12"))
    assert verdicts(folder) == {"healthy": "ok"}


def test_what_was_submitted_counts_as_asked_for_and_not_what_the_ranks_read(folder: Folder):
    (folder.path / "launch").mkdir()
    (folder.path / "launch" / "recipe.toml").write_text(RECIPE.replace("micro_batch = 2", "micro_batch = 1"))
    (verdict,) = judge(folder.state())
    assert verdict.message.startswith("n0 has micro_batch 2, but 1 was requested")


def test_a_run_that_goes_on_by_hand_after_its_job_ended_is_judged_by_itself(folder: Folder):
    folder.jobs.append(folder.job("FAILED"))
    folder.launch["ranks"] = 8
    folder.samples = {}
    folder.write()
    with files.locked(folder.path / "run.lock"):
        assert verdicts(folder) == {"healthy": "ok"}
    assert "failed" in verdicts(folder)
    for host in folder.hosts.values():  # The attempt that took over has ended too.
        host["clock"] = NOW + 10
    folder.manifest["state"] = "interrupted"
    assert verdicts(folder) == {"interrupted": "wrong"}


def test_files_that_hold_nonsense_do_no_harm(folder: Folder):
    path = folder.write()
    for name in ("run.json", "launch.json", "hosts/n0.json", "recipe.toml"):
        (path / name).write_text("{")
    (path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": "x", "rank_seconds": 3}\nnull\n{"step": 2, "loss": NaN}\n[[['
    )
    (path / "logs" / "n0.gpu").write_text('{"time": 1, "devices": [3, {"utilisation": "x"}]}\n{"time": "x"}\n')
    (path / "scheduler.jsonl").write_text(json.dumps({"state": 3}) + "\n")
    assert judge(RunState(path).refresh(NOW))


@pytest.mark.parametrize("junk", [3.5, "x", True, [None], {"a": 1}, float("nan"), "\ud800"])
def test_fields_that_hold_nonsense_do_no_harm(folder: Folder, junk: Any):
    folder.launch["jobs"] = junk
    folder.jobs[0] |= {"time_limit": junk, "elapsed": junk}
    folder.hosts["n0"] |= {"ranks": junk, "layout": {"world": junk, "tensor": junk}, "versions": junk}
    folder.samples["n0"] = [folder.sample(NOW - 5 * ago, processes=junk, power=junk) for ago in range(9, -1, -1)]
    folder.samples["n0"][-1]["devices"][0] |= {"temperature": junk, "utilisation": junk, "memory_used": junk}
    folder.samples["n0"][-1]["devices"].append(junk)
    folder.samples["n1"][-1]["devices"] = junk
    folder.records[-1]["rank_seconds"] = {"slowest": junk, "seconds": 1.0, "median": 1.0}
    seen = view(folder.state())
    assert plain(seen).encode()
    assert json.dumps(seen, allow_nan=False)
