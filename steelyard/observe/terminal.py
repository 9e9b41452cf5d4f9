"""`steelyard watch`: the view of a run on a terminal or as plain text.

On a terminal the page is updated until the run ends. Other outputs get the page once or, with `follow`, one line per
change until the run ends. The exit code is that of the verdict (`observe/verdict.py`).
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.core import units
from steelyard.observe.notify import Notifier
from steelyard.observe.run_state import PATIENCE, RunState, span_of
from steelyard.observe.run_view import view
from steelyard.observe.scheduler_poll import SchedulerPoll

COLOURS = {"ok": "green", "waiting": "cyan", "warning": "yellow", "wrong": "bold red"}
SECONDS_BETWEEN_LINES = 30.0
SECONDS_FRESH = 30.0
MOST_HOSTS = 16
INDENT = 9  # of a verdict's message, after its level


@dataclass(frozen=True)
class WatchOptions:
    """What to watch, and how."""

    path: Path
    seconds: float = 2.0
    patience: float = PATIENCE
    notifies: bool = False
    """Whether to call `log.on_verdict`."""


def once(options: WatchOptions) -> dict[str, Any]:
    """Poll the scheduler, and return the view of a run."""
    return next(views(options))


def views(options: WatchOptions) -> Iterator[dict[str, Any]]:
    """Yield the view of a run every few seconds until it has ended."""
    path, seconds = options.path, options.seconds
    state, poll, notifier = RunState(path, options.patience), SchedulerPoll(path), Notifier(path)
    while True:
        poll.update(state)
        seen = view(state.refresh())
        if options.notifies:
            notifier.notify(state.recipe or state.submitted, seen)
        yield seen
        if seen["ended"]:
            return
        time.sleep(seconds)


def live(options: WatchOptions) -> int:
    """Show the page on a terminal until the run has ended. Returns the exit code."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    seen: dict[str, Any] = {}
    with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stderr=False) as page:
        for seen in views(options):
            room = max(10, console.height - 1)
            shown = fitted(rendered(seen), console.width)
            lines = [Text(line, style=style, no_wrap=True, overflow="ellipsis") for line, style in shown]
            page.update(Group(*lines[:room]), refresh=True)
    return int(seen["exit_code"])


def follow(options: WatchOptions) -> int:
    """Print a line when the verdict changes, and the progress regularly, until the run has ended."""
    shown: list[dict[str, str]] = []
    last_line = -SECONDS_BETWEEN_LINES
    seen: dict[str, Any] = {}
    for seen in views(options):
        kinds = [verdict for verdict in seen["verdicts"] if (verdict["kind"], verdict["level"]) not in _kinds(shown)]
        now = time.monotonic()
        if kinds or now - last_line >= SECONDS_BETWEEN_LINES:
            last_line = now
            print_line(f"{time.strftime('%H:%M:%S')}  {progress_line(seen)}")
        for verdict in kinds:
            print_line(textwrap.indent(f"{verdict['level']}: {verdict['message']}\n  {verdict['what_to_do']}", "  "))
        shown = seen["verdicts"]
    return int(seen["exit_code"])


def _kinds(shown: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(verdict["kind"], verdict["level"]) for verdict in shown}


def print_line(line: str) -> None:
    """Print and flush, so that a reader of a pipe sees the line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def plain(seen: dict[str, Any]) -> str:
    """The page as plain text."""
    return "\n".join(line for line, _ in rendered(seen))


def rendered(seen: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the page with their styles, most important first: a small terminal shows only the top."""
    lines = [(f"{seen['name']}  {seen['state']}  {seen['path']}", "bold")]
    for verdict in seen["verdicts"]:
        first, *more = verdict["message"].split("\n")
        lines.append((f"{verdict['level'].upper():{INDENT - 1}} {first}", COLOURS[verdict["level"]]))
        lines += [(f"{'':{INDENT}}{line}", COLOURS[verdict["level"]]) for line in more]
        if verdict["what_to_do"] != "nothing":
            lines.append((f"{'':{INDENT}}{verdict['what_to_do']}", "dim"))
    lines.append(("", ""))
    if seen["progress"]["steps"] or seen["progress"]["step"]:
        lines.append((progress_line(seen), ""))
    lines += [(_job(record), "") for record in seen["scheduler"]]
    lines += _configuration(seen["configuration"])
    for host in seen["hosts"][:MOST_HOSTS]:
        lines += _host(host, few=len(seen["hosts"]) > 4, ended=seen["ended"])
    if len(seen["hosts"]) > MOST_HOSTS:
        lines.append((f"and {len(seen['hosts']) - MOST_HOSTS} more hosts", "dim"))
    return lines


def fitted(lines: list[tuple[str, str]], width: int) -> list[tuple[str, str]]:
    """The page for a terminal of this width: verdicts and hints are wrapped, other lines are cut."""
    verdicts = lines.index(("", "")) if ("", "") in lines else 0
    shown: list[tuple[str, str]] = []
    for line, style in lines[1:verdicts]:
        parts = textwrap.wrap(line, max(40, width), subsequent_indent=" " * INDENT, break_on_hyphens=False)
        shown += [(part, style) for part in parts]
    return [*lines[:1], *shown, *lines[max(1, verdicts) :]]


def progress_line(seen: dict[str, Any]) -> str:
    """Progress, speed and loss in one line."""
    progress, now = seen["progress"], seen["now"]
    fields = [f"step {progress['step']}" + (f" of {progress['steps']}" if progress["steps"] else "")]
    if progress["steps"]:
        fields[0] += f" ({100 * progress['step'] / progress['steps']:.0f}%)"
    if progress["seconds_left"] is not None:
        fields.append(f"{units.duration(progress['seconds_left'])} left")
    if "loss" in now:
        fields.append("loss none" if now["loss"] is None else f"loss {now['loss']:.4f}")
    if now.get("seconds") is not None:
        fields.append(f"{1000 * now['seconds']:.1f} ms/step")
    if now.get("tokens_per_second") is not None:
        fields.append(f"{units.count(now['tokens_per_second'])} tokens/s")
    if now.get("mfu") is not None:
        fields.append(f"MFU {now['mfu']:.3f}")
    if now.get("expert_load") is not None:
        fields.append(f"expert_load {now['expert_load']:.2f}")
    if now.get("peak_memory") is not None:
        fields.append(f"peak memory {units.size(now['peak_memory'])}")
    if slowest := seen["slowest"]:
        fields.append(f"slowest rank {slowest.get('slowest')}")
    return "  ".join(fields)


def _job(record: dict[str, Any]) -> str:
    fields = [f"job {record.get('job')}", str(record.get("state"))]
    if record.get("nodes"):
        fields.append(f"on {record['nodes']}")
    if limit := span_of(record.get("time_limit")):
        fields.append(f"limit {units.duration(limit)}")
    if record.get("restarts"):
        fields.append(f"restarted {record['restarts']} times")
    if record.get("reason") not in (None, "", "None"):
        fields.append(f"({record['reason']})")
    return "  ".join(fields)


def _configuration(shown: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    wanted, reported = shown["requested"], shown["reported"]
    keys = [key for key in wanted if wanted[key] not in (1, False, 0) or reported.get(key, wanted[key]) != wanted[key]]
    if not keys:
        return []
    if reported and all(reported.get(key) == wanted[key] for key in keys):
        return [("requested and reported  " + "  ".join(f"{key} {wanted[key]}" for key in keys), "")]
    lines = [("requested  " + "  ".join(f"{key} {wanted[key]}" for key in keys), "")]
    if reported:
        lines.append(("reported   " + "  ".join(f"{key} {reported.get(key, '?')}" for key in keys), ""))
    return lines


def _host(host: dict[str, Any], few: bool, ended: bool) -> list[tuple[str, str]]:
    ranks = host["ranks"]
    which = f"ranks {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else ""
    title = "  ".join(filter(None, [host["host"], which, host["device"]]))
    lines = [("", ""), (title, "bold")]
    old = f"  ({units.duration(host['age'])} ago)" if (host["age"] or 0.0) > SECONDS_FRESH else ""
    if not ended:  # After the end, the last samples no longer describe the GPUs.
        lines += [(f"  {_device(device)}{old}", "dim" if old else "") for device in host["devices"]]
    for stream, style in (("out", "dim"), ("err", "magenta")):
        shown = host[stream][-1:] if few else host[stream]
        lines += [(f"  {stream}| {line}", style) for line in shown]
    if host["unread"] > 0:
        lines.append((f"  err: {units.size(host['unread'])} before that are not scanned yet", "dim"))
    return lines


def _device(device: dict[str, Any]) -> str:
    fields = [f"{device.get('index', '')} {device.get('name', '')}".strip()]
    if device.get("utilisation") is not None:
        fields.append(f"{device['utilisation']:3.0f}%")
    if device.get("memory_used") is not None and device.get("memory_total"):
        fields.append(f"{units.size(device['memory_used'])} of {units.size(device['memory_total'])}")
    if device.get("temperature") is not None:
        fields.append(f"{device['temperature']:.0f} C")
    if device.get("power") is not None:
        fields.append(f"{device['power']:.0f} W")
    fields.append(f"{device['processes']} process{'' if device['processes'] == 1 else 'es'}")
    return "  ".join(fields)
