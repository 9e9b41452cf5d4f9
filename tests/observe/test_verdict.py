"""Each rule of the verdict, on a run folder made for it: what must be said, and what must not."""

from pathlib import Path

import pytest

from steelyard.observe.verdict import RULES, exit_code, has_ended, judge
from tests.observe.folders import Folder
from tests.observe.troubles import (
    alone,
    another_command,
    briefly_slow_steps,
    compiling,
    created_and_running,
    ended,
    ended_in_order,
    error_on_stderr,
    failed_in_an_earlier_attempt,
    falling_fast,
    fewer_ranks,
    filling_disk,
    finished,
    finished_and_failed,
    finished_before_the_scheduler_says_so,
    frozen,
    full_disk,
    hidden_by_a_container,
    hot,
    larger_batch,
    late_heartbeat,
    lost_node,
    much_slower,
    next_attempt,
    nobody,
    nobody_yet,
    not_finite,
    one_gpu_unused,
    other_clock,
    other_layout,
    other_torch,
    overflowed,
    powered_off,
    requeued,
    restarted_and_importing,
    resuming,
    saving,
    shared_machine,
    skipped,
    slow,
    slow_by_chance,
    slow_for_a_moment,
    slow_host,
    slow_in_turns,
    slow_steps,
    smaller_attempt,
    spike,
    spike_that_passed,
    starting,
    too_few_for_elastic,
    too_few_nodes,
    uneven_steps,
    validated_first,
    validating_slowly,
    verdicts,
    waiting,
    warnings_on_stderr,
    wedged,
    wedged_after_a_nap,
    wedged_at_a_restart,
    written_as_nan,
)


def test_a_healthy_run_is_healthy(folder: Folder):
    assert verdicts(folder) == {"healthy": "ok"}
    state = folder.state()
    (verdict,) = judge(state)
    assert "left" in verdict.message
    assert exit_code([verdict]) == 0
    assert not has_ended(state)


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
