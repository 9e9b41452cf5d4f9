"""The report page: its list of sections, and the sections that are only tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from steelyard.core import files, units
from steelyard.core.errors import UserError
from steelyard.core.pages import charts, page
from steelyard.core.run import Run
from steelyard.core.safe_parse import read_object
from steelyard.observe.host_logs import is_number
from steelyard.observe.report.attempts_section import attempts_section
from steelyard.observe.report.logs_section import last_errors
from steelyard.observe.report.pipeline_section import pipeline_sections
from steelyard.observe.report.profile_section import profile_section
from steelyard.observe.report.recipe_section import recipes
from steelyard.observe.report.timeline_data import MOST_SPANS
from steelyard.observe.report.verdict_section import boxes, judged
from steelyard.observe.run_curves import RunCurves
from steelyard.observe.run_view import curves_view


def write(
    runs: Run | Sequence[Run], path: Path | None = None, cluster: Path | None = None, steps: Iterable[int] = ()
) -> Path:
    """Write the report of one run, finished or not, or of several side by side. Returns its path.

    `cluster` describes the machines for the planner's prediction. The timeline of `steps` is included in full.
    """
    several = [runs] if isinstance(runs, Run) else list(runs)
    path = path or several[0].path / "report.html"
    text = render(several, cluster, steps)
    try:
        files.write_text(path, text)
    except OSError as error:
        message = f"cannot write the report: {path}: {error.strerror or error}"
        raise UserError(message, hint="choose another file: -o FILE") from None
    return path


def render(runs: Run | Sequence[Run], cluster: Path | None = None, steps: Iterable[int] = ()) -> str:
    """The report as HTML. All text from a run is escaped."""
    several = [runs] if isinstance(runs, Run) else list(runs)
    named = dict(zip(names(several), several, strict=True))
    records = {name: run.metrics() for name, run in named.items()}
    states = {name: judged(run) for name, run in named.items()}
    drawn = [{"name": name} | curves_view(state, RunCurves(state.path)) for name, state in states.items()]
    verdicts = [boxes(state, name) for name, state in states.items()]
    sections = {
        "curves": ("Curves", [charts.curves(drawn)]),
        "summary": ("Summary", [*verdicts, _summaries(named, records)]),
    }
    budget = MOST_SPANS // len(several)
    for number, (name, run) in enumerate(named.items()):
        of = f" of {name}" if len(several) > 1 else ""
        sections[f"attempts-{number}"] = ("Attempts" + of, attempts_section(states[name]))
        for anchor, (title, pieces) in pipeline_sections(run, cluster, steps, budget, number).items():
            sections[f"{anchor}-{number}"] = (title + of, pieces)
        pieces = profile_section(run)
        if pieces:
            sections[f"profile-{number}"] = ("Profile" + of, pieces)
        errors = last_errors(run)
        if errors:
            sections[f"errors-{number}"] = ("Last lines on standard error" + of, errors)
    sections["environment"] = ("Environment", [_columns({name: _environment(run) for name, run in named.items()})])
    sections["recipe"] = ("Recipe", recipes(named))
    body = [f"<script>{page.asset('pages/timeline.js', 'steelyard.observe')}</script>"]
    body += [page.contents((anchor, title) for anchor, (title, _) in sections.items())]
    for anchor, (title, pieces) in sections.items():
        body += [page.heading(title, anchor), *pieces]
    return page.page(", ".join(named), body, (*charts.SCRIPTS, "curves.js"))


def names(runs: Sequence[Run]) -> list[str]:
    """A unique name for each run: its folder's name, or as much of its path as needed."""
    paths = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        shown = ["/".join(parts[-length:]) for parts in paths]
        if len(set(shown)) == len(shown):
            return shown
    return [f"{name} ({number})" for number, name in enumerate(shown, start=1)]


def _summaries(runs: dict[str, Run], records: dict[str, list[dict[str, Any]]]) -> str:
    return _columns({name: _summary(run, records[name]) for name, run in runs.items()})


def _columns(columns: dict[str, dict[str, str]]) -> str:
    """The named values of each run, side by side."""
    if len(columns) == 1:
        return page.pairs(next(iter(columns.values())))
    titles = list(dict.fromkeys(title for column in columns.values() for title in column))
    rows = [[title, *(column.get(title, "") for column in columns.values())] for title in titles]
    return page.table(rows, head=["", *columns])


def _summary(run: Run, records: list[dict[str, Any]]) -> dict[str, str]:
    manifest = run.manifest()
    trained = [record for record in records if "loss" in record]
    valid = [record for record in records if "valid_loss" in record]
    summary = {
        "State": run.state,
        "Started": str(manifest.get("started")),
        "Ended": str(manifest.get("ended") or "not yet"),
    }
    if trained:
        last = trained[-1]
        summary["Steps"] = f"{last['step']} of {run.recipe().train.steps}"
        if is_number(last.get("tokens")):
            summary["Tokens"] = units.count(last["tokens"])
        summary["Training loss"] = _loss(last["loss"])
        if is_number(last.get("tokens_per_second")):
            summary["Throughput"] = f"{units.count(last['tokens_per_second'])} tokens/s"
        summary |= _speed(trained)
    if valid:
        first, last_valid = valid[0]["valid_loss"], valid[-1]["valid_loss"]
        summary["Validation loss"] = f"first {_loss(first)}, last {_loss(last_valid)}"
        if is_number(first) and is_number(last_valid) and _predicts_tokens(run):
            summary["Validation perplexity"] = f"first {units.perplexity(first)}, last {units.perplexity(last_valid)}"
    return summary


def _predicts_tokens(run: Run) -> bool:
    """Whether the loss is in nats per token. The DPO loss is not, so it has no perplexity."""
    tuned = run.recipe().finetune
    return tuned is None or tuned.dpo is None


def _loss(value: Any) -> str:
    return f"{value:.4f}" if is_number(value) else "not finite"


def _speed(trained: list[dict[str, Any]]) -> dict[str, str]:
    """Time and memory of a step. The first record is skipped if there are others, since it includes compilation."""
    reported = {}
    settled = trained[1:] or trained
    seconds = sorted(_numbers(settled, "seconds"))
    if seconds:
        reported["Step"] = f"{1e3 * seconds[len(seconds) // 2]:.1f} ms, median of {len(seconds)} records"
    shares = sorted(_numbers(settled, "mfu"))
    if shares:
        reported["MFU"] = f"{100 * shares[len(shares) // 2]:.1f}%"
    peaks = _numbers(trained, "peak_memory")
    if peaks:
        reported["Peak memory"] = f"{units.size(max(peaks))} on the fullest rank"
    return reported


def _numbers(records: list[dict[str, Any]], key: str) -> list[Any]:
    return [record[key] for record in records if is_number(record.get(key)) and record[key] > 0]


def _environment(run: Run) -> dict[str, str]:
    manifest = run.manifest()
    known = manifest.get("versions")
    versions = ", ".join(f"{name} {version}" for name, version in (known if isinstance(known, dict) else {}).items())
    keys = {"host": "Host", "device": "Device", "world_size": "Ranks", "seed": "Seed", "git_commit": "Git commit"}
    shown = {title: str(manifest[key]) for key, title in keys.items() if manifest.get(key) is not None}
    launch = read_object(run.path / "launch.json")
    titles = {"backend": "Started by", "jobs": "Jobs", "nodes": "Nodes", "partitions": "Partitions", "site": "Site"}
    for key, title in titles.items():
        if launch.get(key):
            value = launch[key]
            shown[title] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    hosts = sorted(path.stem for path in (run.path / "hosts").glob("*.json"))
    if len(hosts) > 1:
        shown["Hosts"] = ", ".join(hosts)
    return shown | {"Versions": versions}
