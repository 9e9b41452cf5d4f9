"""Each rule of the verdict, on a run folder made for it: what must be said, and what must not."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelyard.core import files
from steelyard.observe import scheduler_poll
from steelyard.observe.known_errors import explain_line
from steelyard.observe.run_state import RunState
from steelyard.observe.run_view import view
from steelyard.observe.scheduler_poll import Asking
from steelyard.observe.terminal import plain
from steelyard.observe.verdict import RULES, exit_code, has_ended, judge
from tests.observe.folders import NOW, RECIPE, Folder, iso


def verdicts(folder: Folder) -> dict[str, str]:
    """Kind and level of all verdicts."""
    return {verdict.kind: verdict.level for verdict in judge(folder.state())}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "run")


def test_a_healthy_run_is_healthy(folder: Folder):
    assert verdicts(folder) == {"healthy": "ok"}
    state = folder.state()
    (verdict,) = judge(state)
    assert "left" in verdict.message
    assert exit_code([verdict]) == 0
    assert not has_ended(state)


def ended(state: str, **fields) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.jobs.append(folder.job(state, **fields))
        folder.samples = {}

    return change


def finished(folder: Folder) -> None:
    folder.manifest |= {"state": "finished", "ended": iso(NOW)}
    folder.records += [folder.record(step) for step in range(310, 1001, 10)]
    ended("COMPLETED", exit_code=0)(folder)


def finished_before_the_scheduler_says_so(folder: Folder) -> None:
    finished(folder)
    folder.jobs = folder.jobs[:1]


def failed_in_an_earlier_attempt(folder: Folder) -> None:
    folder.manifest |= {"state": "failed", "error": "no", "ended": iso(NOW - 4000)}


def finished_and_failed(folder: Folder) -> None:
    finished(folder)
    ended("FAILED", exit_code=1)(folder)


def alone(state: str, **fields) -> Callable[[Folder], None]:
    """A run that no scheduler knows of."""

    def change(folder: Folder) -> None:
        folder.launch, folder.jobs, folder.samples = {}, [], {}
        folder.manifest |= {"state": state, **fields}

    return change


def waiting(reason: str, **fields) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.jobs = [folder.job("PENDING", reason=reason, nodes="", **fields)]
        folder.samples, folder.records, folder.hosts = {}, [], {}

    return change


def requeued(folder: Folder) -> None:
    folder.jobs += [folder.job("NODE_FAIL"), folder.job("PENDING", reason="BeginTime", restarts=1)]
    folder.logs["n0.err"] = "RuntimeError: Connection closed by peer\n"


def starting(folder: Folder) -> None:
    folder.hosts, folder.records, folder.samples = {}, [], {}
    folder.jobs = [folder.job("RUNNING", at=NOW - 20)]


def created_and_running(folder: Folder) -> None:
    starting(folder)
    folder.manifest["state"] = "created"


def another_command(folder: Folder) -> None:
    created_and_running(folder)
    folder.manifest["command"] = ["eval", "ppl", "runs/my"]


def compiling(folder: Folder) -> None:
    folder.records = []
    folder.jobs = [folder.job("RUNNING", at=NOW - 700)]
    for host in folder.hosts.values():
        host["clock"] = NOW - 600


def resuming(folder: Folder) -> None:
    """Requeued ten minutes ago, and compiling again: its last record is old."""
    for record in folder.records:
        record["time"] -= 1800
    folder.jobs.append(folder.job("RUNNING", at=NOW - 610, restarts=1))
    for host in folder.hosts.values():
        host["clock"] = NOW - 600


def older(folder: Folder, seconds: float) -> None:
    for record in folder.records:
        record["time"] -= seconds


def wedged(folder: Folder) -> None:
    older(folder, 300)


def saving(folder: Folder) -> None:
    """At step 500 a checkpoint is due."""
    folder.records = [folder.record(step, time=NOW - 110 - (500 - step)) for step in range(400, 501, 10)]


def validating_slowly(folder: Folder) -> None:
    """Every hundredth step a validation takes two minutes; it is in the third one for three."""
    times, at = [], NOW - 2000
    for step in range(10, 301, 10):
        at += 10
        times.append((step, at))
        at += 120 if step % 100 == 0 else 0
    folder.records = [folder.record(step, time=t - times[-1][1] + NOW - 180) for step, t in times]


def wedged_after_a_nap(folder: Folder) -> None:
    """Once, long ago, nothing happened for an hour."""
    older(folder, 600)
    for record in folder.records[:5]:
        record["time"] -= 3600
    for host in folder.hosts.values():
        host["clock"] -= 3600
    folder.jobs = [folder.job("RUNNING", at=NOW - 9000)]


def warnings_on_stderr(folder: Folder) -> None:
    folder.logs["n0.err"] = (Path(__file__).parent / "harmless.txt").read_text()


def error_on_stderr(folder: Folder) -> None:
    folder.logs["n0.err"] = "RuntimeError: [rank1] Connection closed by peer\n"
    folder.logs["n1.err"] = (
        "UserWarning: x\nTraceback (most recent call last):\n  File\nValueError: the cause\nerror: b\n"
    )


def not_finite(folder: Folder) -> None:
    folder.records.append(folder.record(310, loss=None, grad_norm=None))


def skipped(folder: Folder) -> None:
    folder.records[-3]["nonfinite"] = folder.records[-2]["nonfinite"] = folder.records[-1]["nonfinite"] = 2


def spike(folder: Folder) -> None:
    folder.records[-1]["loss"] = folder.records[-2]["loss"] = 19.0


def spike_that_passed(folder: Folder) -> None:
    folder.records[-2]["loss"] = 19.0


def falling_fast(folder: Folder) -> None:
    folder.records = [folder.record(step, loss=10.0 * 0.9 ** (step / 10)) for step in range(10, 301, 10)]


def nobody(folder: Folder) -> None:
    folder.samples["n1"] = [
        folder.sample(each["time"], processes=[], memory_used=500 << 20, utilisation=0) for each in folder.samples["n1"]
    ]


def hidden_by_a_container(folder: Folder) -> None:
    folder.samples["n1"] = [folder.sample(each["time"], processes=[]) for each in folder.samples["n1"]]


def one_gpu_unused(folder: Folder) -> None:
    for sample in folder.samples["n1"]:
        sample["devices"][1] |= {"processes": [], "memory_used": 0}


def nobody_yet(folder: Folder) -> None:
    starting(folder)
    folder.samples = {"n0": [folder.sample(NOW - ago, processes=[], memory_used=0) for ago in range(60, -1, -5)]}


def powered_off(folder: Folder) -> None:
    folder.samples["n1"] = [folder.sample(NOW - 120 - 5 * ago) for ago in range(10, -1, -1)]
    older(folder, 40)


def lost_node(folder: Folder) -> None:
    folder.beats = {"n0": NOW - 1, "n1": NOW - 11}
    folder.logs["n0.err"] = "error: rank 0: lost another rank: Connection closed by peer\n"
    older(folder, 5)


def too_few_for_elastic(folder: Folder) -> None:
    lost_node(folder)
    folder.attempts = [{"attempt": 1, "time": NOW - 100}, {"waiting": "needs 2 nodes, 1 is alive", "time": NOW - 5}]


def smaller_attempt(folder: Folder) -> None:
    folder.attempts = [{"attempt": 2, "time": NOW - 3550, "ranks": folder.launch["ranks"]}]
    folder.launch |= {"ranks": 2 * folder.launch["ranks"]}


def next_attempt(folder: Folder) -> None:
    older(folder, 5)
    folder.attempts = [{"attempt": 1, "time": NOW - 100}, {"attempt": 2, "time": NOW - 2, "unused": {"n1": "is down"}}]


def validated_first(folder: Folder) -> None:
    folder.records = [{"step": 0, "valid_loss": 8.0, "time": NOW - 5}]


def late_heartbeat(folder: Folder) -> None:
    """A record, which needs all ranks, is younger than the heartbeat."""
    folder.beats = {"n0": NOW - 1, "n1": NOW - 25}


def ended_in_order(folder: Folder) -> None:
    """The agent of n1 has removed its file."""
    folder.beats = {"n0": NOW - 1}


def too_few_nodes(folder: Folder) -> None:
    waiting("Resources")(folder)
    folder.launch |= {"partitions": ["a10", "gpu"], "placement": ["a10:1", "a100:2"]}
    folder.jobs[0]["missing"] = {"partition": "gpu", "needed": 2, "alive": 1, "down": ["n1 is down"]}


def slow_steps(folder: Folder) -> None:
    """For 20 minutes steps took 1 s, and since a minute 6 s."""
    folder.records = [folder.record(step, time=NOW - 1270 + 10 * (step / 10)) for step in range(10, 1210, 10)]
    for ago, record in enumerate(reversed(folder.records)):
        record |= {"time": NOW - 10 * (ago + 1), "seconds": 6.0 if ago < 7 else 1.0}


def shared_machine(folder: Folder) -> None:
    """All ranks take six times as long: they wait for cores that other processes use."""
    slow_steps(folder)
    for record in folder.records:
        waited = 5.2 if record["seconds"] == 6.0 else 0.1
        record["rank_seconds"] = {"slowest": 0, "seconds": 1.0, "median": 1.0, "core_wait": waited}


def uneven_steps(folder: Folder) -> None:
    """A shared machine: every third minute takes as long as the last one."""
    slow_steps(folder)
    for number, record in enumerate(folder.records):
        record["seconds"] = 6.0 if number // 6 % 3 == 0 or number > 112 else 1.0


def briefly_slow_steps(folder: Folder) -> None:
    slow_steps(folder)
    for record in folder.records[:-2]:
        record["seconds"] = 1.0


def larger_batch(folder: Folder) -> None:
    slow_steps(folder)
    for record in folder.records:
        record["global_batch"] = 24 if record["seconds"] == 6.0 else 4


def other_layout(folder: Folder) -> None:
    folder.hosts["n1"]["layout"] |= {"partition": "2-0", "global_batch": 8}


def fewer_ranks(folder: Folder) -> None:
    for host in folder.hosts.values():
        host["layout"] |= {"world": 2, "data": 1}
    folder.hosts["n0"]["ranks"], folder.hosts["n1"]["ranks"] = [0], [1]


def slow(folder: Folder) -> None:
    for record in folder.records[-8:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 1.4, "median": 0.9}


def slow_in_turns(folder: Folder) -> None:
    for number, record in enumerate(folder.records[-4:]):
        record["rank_seconds"] = {"slowest": number, "seconds": 1.4, "median": 0.9}


def slow_for_a_moment(folder: Folder) -> None:
    """Steps of milliseconds, each with a record."""
    folder.records += [folder.record(300 + number, time=NOW - 10 + number / 10) for number in range(20)]
    for record in folder.records[-20:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 1.4, "median": 0.9}


def slow_by_chance(folder: Folder) -> None:
    for record in folder.records[-3:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 1.4, "median": 0.9}


def much_slower(folder: Folder) -> None:
    for record in folder.records[-3:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 5.4, "median": 0.9}


def slow_host(folder: Folder) -> None:
    for number, record in enumerate(folder.records[-8:]):
        record["rank_seconds"] = {"slowest": 2 + number % 2, "seconds": 1.4, "median": 0.9}


def full_disk(folder: Folder) -> None:
    folder.samples["n1"][-1]["disk"] = {"free": 1000, "total": 1 << 40}


def filling_disk(folder: Folder) -> None:
    folder.samples["n1"][-1]["disk"] = {"free": 20 << 30, "total": 1 << 40}


def other_torch(folder: Folder) -> None:
    folder.hosts["n1"]["versions"] = {"torch": "2.12.0"}


def other_clock(folder: Folder) -> None:
    folder.hosts["n1"]["clock"] -= 30


def hot(folder: Folder) -> None:
    folder.samples["n0"][-1]["devices"][1]["temperature"] = 94


def frozen(folder: Folder) -> None:
    """A process that holds two GPUs, and an entry that is none."""
    for device in folder.samples["n1"][-1]["devices"]:
        device["processes"] = [{"pid": 2, "name": "python", "stopped": True}, {"pid": 1}, "?", None]


def wedged_at_a_restart(folder: Folder) -> None:
    """Pre-empted an hour ago, started again half an hour ago, and the ranks have not met since."""
    folder.manifest |= {"state": "interrupted", "ended": iso(NOW - 3600)}
    for record in folder.records:
        record["time"] -= 3600
    folder.jobs.append(folder.job("RUNNING", at=NOW - 1800, restarts=1))
    for host in folder.hosts.values():
        host["clock"] -= 7200


def restarted_and_importing(folder: Folder) -> None:
    wedged_at_a_restart(folder)
    folder.jobs[-1]["time"] = iso(NOW - 60)
    for samples in folder.samples.values():
        for sample in samples:
            for device in sample["devices"]:
                device |= {"processes": [], "memory_used": 0}


def written_as_nan(folder: Folder) -> None:
    folder.records[-1]["loss"] = float("nan")


def overflowed(folder: Folder) -> None:
    folder.records[-1] |= {"grad_norm": None, "skipped": 3}
    folder.records[-2] |= {"skipped": 2}


CASES = {
    "completed": (finished, {"completed": "ok"}, 0),
    "completed, before the scheduler says so": (finished_before_the_scheduler_says_so, {"completed": "ok"}, 0),
    "failed in an earlier attempt": (failed_in_an_earlier_attempt, {"healthy": "ok"}, 0),
    "done, and then failed": (finished_and_failed, {"failed-after-end": "warning"}, 4),
    "failed": (ended("FAILED", exit_code=3), {"failed": "wrong"}, 1),
    "cancelled": (ended("CANCELLED by 1000"), {"cancelled": "wrong"}, 1),
    "timed out": (ended("TIMEOUT"), {"timed-out": "wrong"}, 1),
    "node failed": (ended("NODE_FAIL"), {"node-failed": "wrong"}, 1),
    "out of memory": (ended("OUT_OF_MEMORY"), {"out-of-memory": "wrong"}, 1),
    "preempted": (ended("PREEMPTED"), {"preempted": "wrong"}, 1),
    "failed without a scheduler": (alone("failed", error="no"), {"failed": "wrong"}, 1),
    "interrupted": (alone("interrupted"), {"interrupted": "wrong"}, 1),
    "stopped by the clock": (alone("stopped"), {"stopped": "ok"}, 0),
    "killed": (alone("running"), {"killed": "wrong"}, 1),
    "created": (alone("created"), {"not-started": "waiting"}, 3),
    "queued": (waiting("(Priority)"), {"queued": "waiting"}, 3),
    "queued, with a limit": (waiting("QOSMaxCpuPerUserLimit"), {"queued": "waiting"}, 3),
    "held": (waiting("JobHeldUser"), {"held": "wrong"}, 1),
    "never to start": (waiting("PartitionTimeLimit"), {"held": "wrong"}, 1),
    "put back and held": (ended("REQUEUE_HOLD", reason="job_requeued_in_held_state"), {"held": "wrong"}, 1),
    "more than one job may have": (waiting("QOSMaxNodePerJobLimit"), {"held": "wrong"}, 1),
    "requeued": (requeued, {"requeued": "waiting"}, 3),
    "starting": (starting, {"starting": "waiting"}, 3),
    "starting, before the ranks have met": (created_and_running, {"starting": "waiting"}, 3),
    "another command than train": (another_command, {"healthy": "ok"}, 0),
    "starting, no process yet": (nobody_yet, {"starting": "waiting"}, 3),
    "compiling the first step": (compiling, {"starting": "waiting"}, 3),
    "compiling again after a restart": (resuming, {"starting": "waiting"}, 3),
    "wedged": (wedged, {"no-progress": "wrong"}, 1),
    "wedged, after a nap": (wedged_after_a_nap, {"no-progress": "wrong"}, 1),
    "wedged while it starts again": (wedged_at_a_restart, {"no-progress": "wrong", "starting": "waiting"}, 1),
    "started again, no process yet": (restarted_and_importing, {"starting": "waiting"}, 3),
    "saving a checkpoint": (saving, {"healthy": "ok"}, 0),
    "in a long validation, like those before": (validating_slowly, {"healthy": "ok"}, 0),
    "warnings on stderr": (warnings_on_stderr, {"healthy": "ok"}, 0),
    "an error on stderr": (error_on_stderr, {"errors": "wrong"}, 1),
    "loss not finite": (not_finite, {"not-finite": "wrong"}, 1),
    "loss written as NaN": (written_as_nan, {"not-finite": "wrong"}, 1),
    "the scale of fp16 finds its place": (overflowed, {"healthy": "ok"}, 0),
    "steps skipped": (skipped, {"not-finite": "warning"}, 4),
    "loss spike": (spike, {"loss-spike": "warning"}, 4),
    "a spike that passed": (spike_that_passed, {"healthy": "ok"}, 0),
    "a loss that falls fast": (falling_fast, {"healthy": "ok"}, 0),
    "nobody on a GPU": (nobody, {"no-process": "wrong"}, 1),
    "processes hidden by a container": (hidden_by_a_container, {"healthy": "ok"}, 0),
    "a GPU nobody uses": (one_gpu_unused, {"idle-gpus": "warning"}, 4),
    "a host powered off": (powered_off, {"lost-node": "wrong"}, 1),
    "validated before the first step": (validated_first, {"healthy": "ok"}, 0),
    "a node without power": (lost_node, {"lost-node": "wrong"}, 1),
    "an elastic run with too few nodes": (too_few_for_elastic, {"waits-for-nodes": "waiting"}, 3),
    "an elastic run with fewer ranks": (smaller_attempt, {"healthy": "ok"}, 0),
    "an elastic run that starts again": (next_attempt, {"starting": "waiting"}, 3),
    "a node whose heartbeat is late": (late_heartbeat, {"healthy": "ok"}, 0),
    "a node that ended in order": (ended_in_order, {"healthy": "ok"}, 0),
    "too few nodes are alive": (too_few_nodes, {"cannot-start": "wrong"}, 1),
    "steps became slow": (slow_steps, {"slow-steps": "warning"}, 4),
    "steps were always uneven": (uneven_steps, {"healthy": "ok"}, 0),
    "slow for less than a minute": (briefly_slow_steps, {"healthy": "ok"}, 0),
    "a larger batch": (larger_batch, {"healthy": "ok"}, 0),
    "other layout": (other_layout, {"other-configuration": "wrong"}, 1),
    "fewer ranks": (fewer_ranks, {"other-configuration": "wrong"}, 1),
    "a slow rank": (slow, {"slow-rank": "warning"}, 4),
    "ranks slow in turns": (slow_in_turns, {"healthy": "ok"}, 0),
    "a rank slow for a moment": (slow_for_a_moment, {"healthy": "ok"}, 0),
    "a rank slow for half a minute": (slow_by_chance, {"healthy": "ok"}, 0),
    "a rank much slower for half a minute": (much_slower, {"slow-rank": "warning"}, 4),
    "all ranks slow on a shared machine": (shared_machine, {"healthy": "ok"}, 0),
    "a slow host": (slow_host, {"slow-rank": "warning"}, 4),
    "a full disk": (full_disk, {"disk-full": "wrong"}, 1),
    "a disk nearly full": (filling_disk, {"disk-full": "warning"}, 4),
    "versions differ": (other_torch, {"versions-differ": "warning"}, 4),
    "clocks differ": (other_clock, {"clocks-differ": "warning"}, 4),
    "a stopped process": (frozen, {"frozen": "wrong"}, 1),
    "a hot GPU": (hot, {"hot-gpu": "warning"}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is(folder: Folder, case: str):
    change, expected, code = CASES[case]
    change(folder)
    assert verdicts(folder) == expected
    judged = judge(folder.state())
    assert exit_code(judged) == code
    assert all(verdict.what_to_do and verdict.message for verdict in judged)


def test_every_rule_has_a_case_and_every_kind_a_line_in_the_documentation(folder: Folder):
    kinds = {kind for _, expected, _ in CASES.values() for kind in expected}
    page = (Path(__file__).parents[2] / "docs" / "watch.md").read_text()
    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in page] == []
    assert len(RULES) <= len(kinds)


def test_a_stopped_process_is_named_by_its_rank_and_how_to_let_it_go_on(folder: Folder):
    frozen(folder)
    (verdict,) = judge(folder.state())
    assert verdict.message == "stopped by a signal (SIGSTOP): rank 3, process 2, on n1"
    assert verdict.what_to_do == "resume it: kill -CONT 2 on n1"
    folder.samples["n1"].append(folder.sample(NOW))
    assert verdicts(folder) == {"healthy": "ok"}


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
    Asking(folder.path).ask(state)
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
    for host in folder.hosts.values():  # Whoever took over has ended too.
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
