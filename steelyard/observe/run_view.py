"""The view of a run: one JSON object, the same for the terminal, `--json` and the browser.

Terminal control sequences and secrets are removed from all texts here, once for all readers.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

from steelyard.core import secrets
from steelyard.observe.attempts import attempts, markers
from steelyard.observe.error_scan import clean
from steelyard.observe.host_logs import is_number
from steelyard.observe.rules import Verdict
from steelyard.observe.rules.machine_rules import requested
from steelyard.observe.run_curves import RunCurves
from steelyard.observe.run_files import listed, size_of
from steelyard.observe.run_state import RunState
from steelyard.observe.verdict import exit_code, has_ended, judge, seconds_left

SHOWN_LINES, SHOWN_POINTS, LONGEST_LINE, SHOWN_MESSAGE = 6, 200, 2000, 16
SPEED = (
    "loss", "grad_norm", "learning_rate", "tokens_per_second", "seconds", "tflops", "mfu", "peak_memory", "tokens",
    "expert_load", "experts_dropped", "router_entropy",
)  # fmt: skip


def summary(state: RunState) -> dict[str, Any]:
    """One line of a list of runs."""
    verdicts = judge(state)
    shown = {
        "name": _text(state.path.resolve().name),
        "state": _text(_state(state)),
        "verdict": verdict_view(verdicts[0], state),
        "progress": _progress(state),
        "loss": _plain(state.trained[-1].get("loss")) if state.trained else None,
    }
    return _scrubbed(shown)


def view(state: RunState) -> dict[str, Any]:
    """The full view of a run."""
    verdicts = judge(state)
    last = state.trained[-1] if state.trained else {}
    shown = {
        "name": _text(state.path.resolve().name),
        "path": _text(str(state.path)),
        "time": state.now,
        "state": _text(_state(state)),
        "ended": has_ended(state),
        "exit_code": exit_code(verdicts),
        "verdicts": [verdict_view(verdict, state) for verdict in verdicts],
        "scheduler": [_plain(record) for record in state.jobs.values()],
        "backend": _text(str(state.launch.get("backend") or state.manifest.get("launcher") or "")),
        "configuration": _configuration(state),
        "progress": _progress(state),
        "now": {key: last[key] if is_number(last[key]) else None for key in SPEED if key in last},
        "slowest": _plain(last["rank_seconds"]) if isinstance(last.get("rank_seconds"), dict) else None,
        "curve": _curve(state),
        "attempts": attempts_view(state),
        "timeline": size_of(listed(state.path / "timeline", ".jsonl")),
        "hosts": [_host(state, name) for name in _names(state)],
        "disk": {"free": state.disk[0], "total": state.disk[1]} if state.disk else None,
    }
    return _scrubbed(shown)


def curves_view(state: RunState, curves: RunCurves, verdicts: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The curves of a run with markers: its restarts, checkpoints, and verdicts.

    `verdicts` are the changes that a server saw; without one, the worst verdict is marked at the end of the curves.
    """
    tuned = state.recipe.finetune if state.recipe is not None else None
    data = curves.refresh().data(predicts_tokens=tuned is None or tuned.dpo is None)
    if verdicts is None:
        worst, step = judge(state)[0], state.metrics[-1]["step"] if state.metrics else None
        verdicts = [] if worst.level == "ok" else [verdict_view(worst, state) | {"step": step, "time": None}]
    found = markers(state, attempts_view(state), verdicts)
    for marker in found:
        marker["time"] = curves.seconds(marker["time"]) if marker["time"] is not None else None
    return data | {"markers": _scrubbed({"markers": [_plain(marker) for marker in found]})["markers"]}


def attempts_view(state: RunState) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first (`observe/attempts.py`)."""
    return [_plain(attempt) for attempt in attempts(state, _state(state))]


def _state(state: RunState) -> str:
    known = str(state.manifest.get("state") or "")
    if state.job_states and (known != "finished"):
        return ", ".join(sorted(state.job_states)).lower()
    if known == "running" and not state.is_held:
        return "killed"
    return known or "submitted"


def verdict_view(verdict: Verdict, state: RunState) -> dict[str, str]:
    """The verdict with `RUN` replaced by the run's path, quoted for a shell, so that commands can be copied."""
    shown = {key: "\n".join(map(_text, value.split("\n")[:SHOWN_MESSAGE])) for key, value in asdict(verdict).items()}
    return shown | {"what_to_do": shown["what_to_do"].replace(" RUN", f" {shlex.quote(_text(str(state.path)))}")}


def _progress(state: RunState) -> dict[str, Any]:
    step = state.metrics[-1].get("step", 0) if state.metrics else 0
    left = seconds_left(state) if state.is_live else None
    return {"step": step, "steps": state.recipe.train.steps if state.recipe else None, "seconds_left": left}


def _configuration(state: RunState) -> dict[str, dict[str, Any]]:
    """The requested layout, and the layout that the ranks of each host report, key by key."""
    wanted = requested(state)
    reported: dict[str, Any] = {}
    for host, shown in state.hosts.items():
        layout = shown.get("layout")
        for key, value in layout.items() if isinstance(layout, dict) else ():
            if key in reported and reported[key] != value:
                value = f"{reported[key]}, but {value} on {host}"
            reported[key] = value
    return {"requested": _plain(wanted), "reported": _plain(reported)}


def _curve(state: RunState) -> dict[str, list[Any]]:
    """The loss by step; a loss that is not finite is None, which is a gap."""
    points = state.trained[:: max(1, len(state.trained) // SHOWN_POINTS)]
    losses = [record["loss"] if is_number(record["loss"]) else None for record in points]
    return {"step": [record["step"] for record in points], "loss": losses}


def _names(state: RunState) -> list[str]:
    """The names of the hosts. A launcher without output is not a host."""
    logged = {name for logs in (state.out, state.err) for name, log in logs.items() if log.raw}
    return sorted({*state.hosts, *state.devices, *logged})


def _host(state: RunState, name: str) -> dict[str, Any]:
    sample = state.devices[name].last if name in state.devices else {}
    shown = state.hosts.get(name, {})
    fields = ("index", "name", "temperature", "utilisation", "memory_used", "memory_total", "power")
    devices = [each for each in sample.get("devices") or [] if isinstance(each, dict)]
    return {
        "host": _text(name),
        "ranks": _plain(shown.get("ranks") or []),
        "device": _text(str(shown.get("device") or "")),
        "age": round(state.now - state.devices[name].heard, 1) if sample else None,
        "devices": [
            {key: _plain(device[key]) for key in fields if key in device}
            | {"processes": len(device.get("processes") or [])}
            for device in devices
        ],
        "out": _lines(state, name, "out"),
        "err": _lines(state, name, "err"),
        "unread": state.unread(name),
    }


def _lines(state: RunState, name: str, stream: str) -> list[str]:
    log = (state.out if stream == "out" else state.err).get(name)
    return [] if log is None else [line[:LONGEST_LINE] for line in log.last(SHOWN_LINES)]


def _text(text: str) -> str:
    return clean(text.replace("\n", " ")[: 2 * LONGEST_LINE])[:LONGEST_LINE]


def _scrubbed(value: dict[str, Any]) -> dict[str, Any]:
    """The value without secrets. All texts are scrubbed in one call, because one call per text is slow."""
    texts: list[str] = []

    def take(each: Any) -> Any:
        if isinstance(each, str):
            texts.append(each)
        for part in each.values() if isinstance(each, dict) else each if isinstance(each, list) else ():
            take(part)

    def put(each: Any) -> Any:
        if isinstance(each, str):
            return next(scrubbed).strip("\n")
        if isinstance(each, dict):
            return {key: put(part) for key, part in each.items()}
        return [put(part) for part in each] if isinstance(each, list) else each

    take(value)
    scrubbed = iter(secrets.scrub("\n\x1e\n".join(texts)).split("\x1e"))
    whole: dict[str, Any] = put(value)
    return whole


def _plain(value: Any) -> Any:
    """A value from an untrusted JSON file, with all texts cleaned and its size limited."""
    if isinstance(value, dict):
        return {_text(str(key)): _plain(each) for key, each in list(value.items())[:100]}
    if isinstance(value, list):
        return [_plain(each) for each in value[:1000]]
    if isinstance(value, float) and not is_number(value):
        return None
    return _text(value) if isinstance(value, str) else value
