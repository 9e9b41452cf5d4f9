"""The verdicts on a run: a table of rules over its state (`observe/rules/`), worst verdict first.

A rule returns a verdict or None. A run without any verdict is running and healthy.
"""

from __future__ import annotations

from collections.abc import Callable

from steelyard.core import units
from steelyard.observe.host_logs import is_number
from steelyard.observe.rules import (
    LEVELS,
    Level,
    Verdict,
    exit_rules,
    machine_rules,
    node_rules,
    progress_rules,
    speed_rules,
)
from steelyard.observe.run_state import RunState

Rule = Callable[[RunState], Verdict | None]
# The order of verdicts with the same level: causes before consequences.
RULES: tuple[Rule, ...] = (
    node_rules.lost_node,
    progress_rules.errors,
    machine_rules.disk_nearly_full,
    machine_rules.other_configuration,
    progress_rules.loss_not_finite,
    exit_rules.scheduler_ended,
    exit_rules.run_ended,
    machine_rules.frozen,
    machine_rules.nobody_on_device,
    progress_rules.no_progress,
    progress_rules.loss_spike,
    speed_rules.slow_rank,
    machine_rules.hot_device,
    machine_rules.versions_differ,
    machine_rules.clocks_differ,
    exit_rules.not_started,
)
EXIT_CODES: dict[Level, int] = {"ok": 0, "wrong": 1, "waiting": 3, "warning": 4}


def judge(state: RunState) -> list[Verdict]:
    """All verdicts on a run, worst first; at least one."""
    waits = node_rules.waits_for_nodes(state)
    if waits is not None:  # No rank runs, so nothing else applies.
        return [waits]
    verdicts = [verdict for rule in RULES if (verdict := rule(state)) is not None]
    if not verdicts:
        verdicts = [Verdict("healthy", "ok", f"running well{_remaining(state)}{_attempt(state)}", "nothing")]
    return sorted(verdicts, key=lambda verdict: -LEVELS.index(verdict.level))


def exit_code(verdicts: list[Verdict]) -> int:
    """The exit code for scripts: 0 healthy or completed, 1 something is wrong, 3 not started yet, 4 a warning."""
    return EXIT_CODES[verdicts[0].level]


def has_ended(state: RunState) -> bool:
    """Whether the run has ended and will not start again by itself."""
    if state.is_live or state.is_waiting:
        return False
    return bool(state.job_states) or state.manifest.get("state", "created") != "created"


def seconds_left(state: RunState) -> float | None:
    """Seconds for the remaining steps at the current speed."""
    seconds = state.trained[-1].get("seconds") if state.trained else None
    if state.recipe is None or not is_number(seconds):
        return None
    left = float(seconds) * max(0, state.recipe.train.steps - int(state.trained[-1]["step"]))
    return left if is_number(left) else None


def _remaining(state: RunState) -> str:
    left = seconds_left(state)
    return "" if left is None else f", {units.duration(left)} left"


def _attempt(state: RunState) -> str:
    """The nodes that an elastic run does not use, and why."""
    unused = state.attempts[-1].get("unused") if state.attempts else None
    if not isinstance(unused, dict) or not unused:
        return ""
    reasons = ", ".join(f"{name} {why}" for name, why in sorted(unused.items()))
    return f"; attempt {state.attempts[-1].get('attempt')}, {reasons}"
