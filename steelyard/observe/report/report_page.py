"""The whole page: which sections it has, and those that are tables alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from steelyard.core import files, secrets, units
from steelyard.core.errors import UserError
from steelyard.core.pages import charts, page
from steelyard.core.recipe import Recipe, to_toml
from steelyard.core.recipe.toml import leaves
from steelyard.core.run import Run
from steelyard.observe.report import curves_section
from steelyard.observe.report.curves_section import is_number
from steelyard.observe.report.devices_section import devices
from steelyard.observe.report.logs_section import last_errors
from steelyard.observe.report.pipeline_section import pipeline_sections
from steelyard.observe.report.profile_section import profile_section
from steelyard.observe.report.timeline_data import MOST_SPANS
from steelyard.observe.report.verdict_section import verdict
from steelyard.observe.run_files import read_object


def write(
    runs: Run | Sequence[Run], path: Path | None = None, cluster: Path | None = None, steps: Iterable[int] = ()
) -> Path:
    """Write the report of a run, finished or not, or of several beside each other; returns where it lies.

    `cluster` describes the machines for the planner's prediction, and `steps` names those whose timeline is wanted
    whole.
    """
    several = [runs] if isinstance(runs, Run) else list(runs)
    path = path or several[0].path / "report.html"
    text = render(several, cluster, steps)
    try:
        files.write_text(path, text)
    except OSError as error:
        message = f"the report cannot be written: {path}: {error.strerror or error}"
        raise UserError(message, hint="name another place: -o FILE") from None
    return path


def render(runs: Run | Sequence[Run], cluster: Path | None = None, steps: Iterable[int] = ()) -> str:
    """The report as HTML. Whatever comes from a run is escaped."""
    several = [runs] if isinstance(runs, Run) else list(runs)
    named = dict(zip(names(several), several, strict=True))
    records = {name: run.metrics() for name, run in named.items()}
    sections = {
        "summary": ("Summary", [_summaries(named, records), *(verdict(run, name) for name, run in named.items())]),
        "curves": ("Curves", [curves_section.draw(records, all(map(_predicts_tokens, several)))]),
    }
    budget = MOST_SPANS // len(several)
    for number, (name, run) in enumerate(named.items()):
        of = f" of {name}" if len(several) > 1 else ""
        for anchor, (title, pieces) in pipeline_sections(run, cluster, steps, budget, number).items():
            sections[f"{anchor}-{number}"] = (title + of, pieces)
        pieces = profile_section(run)
        if pieces:
            sections[f"profile-{number}"] = ("Profile" + of, pieces)
        pieces = devices(run)
        if pieces:
            sections[f"devices-{number}"] = ("Devices" + of, pieces)
        errors = last_errors(run)
        if errors:
            sections[f"errors-{number}"] = ("Last lines on standard error" + of, errors)
    sections["environment"] = ("Environment", [_columns({name: _environment(run) for name, run in named.items()})])
    sections["recipe"] = ("Recipe", _recipes(named))
    body = [f"<script>{page.asset('pages/timeline.js', 'steelyard.observe')}</script>"]
    body += [page.contents((anchor, title) for anchor, (title, _) in sections.items())]
    for anchor, (title, pieces) in sections.items():
        body += [page.heading(title, anchor), *pieces]
    return page.page(", ".join(named), body, charts.SCRIPTS)


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its folder's name, or as much of its path as tells it from the others."""
    paths = [run.path.resolve().parts for run in runs]
    for length in range(1, max(map(len, paths)) + 1):
        shown = ["/".join(parts[-length:]) for parts in paths]
        if len(set(shown)) == len(shown):
            return shown
    return [f"{name} ({number})" for number, name in enumerate(shown, start=1)]


def _summaries(runs: dict[str, Run], records: dict[str, list[dict[str, Any]]]) -> str:
    return _columns({name: _summary(run, records[name]) for name, run in runs.items()})


def _columns(columns: dict[str, dict[str, str]]) -> str:
    """Named values of each run side by side."""
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
        summary["Validation loss"] = f"{_loss(first)} at first, {_loss(last_valid)} at last"
        if is_number(first) and is_number(last_valid) and _predicts_tokens(run):
            summary["Validation perplexity"] = (
                f"{units.perplexity(first)} at first, {units.perplexity(last_valid)} at last"
            )
    return summary


def _predicts_tokens(run: Run) -> bool:
    """Whether the loss is nats per token; that of preferences is none of which a perplexity could be told."""
    tuned = run.recipe().finetune
    return tuned is None or tuned.dpo is None


def _loss(value: Any) -> str:
    return f"{value:.4f}" if is_number(value) else "no number"


def _speed(trained: list[dict[str, Any]]) -> dict[str, str]:
    """What a step takes, with the first record left out where there are others: compiling spoils it."""
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
        reported["Peak memory"] = f"{units.size(max(peaks))}, the fullest rank"
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


def _recipes(runs: dict[str, Run]) -> list[str]:
    recipes = {name: run.recipe() for name, run in runs.items()}
    if len(recipes) == 1:
        return [page.text(_told(next(iter(recipes.values()))))]
    flat = {name: dict(leaves(recipe.settings())) for name, recipe in recipes.items()}
    keys = sorted({key for settings in flat.values() for key in settings})
    rows = [
        [key, *(secrets.scrub(str(settings.get(key, "unset"))) for settings in flat.values())]
        for key in keys
        if len({repr(settings.get(key)) for settings in flat.values()}) > 1
    ]
    what = page.table(rows, head=["differs in", *flat]) if rows else page.paragraph("All have the same recipe.")
    return [what, *(page.folded(f"recipe of {name}", _told(recipe)) for name, recipe in recipes.items())]


def _told(recipe: Recipe) -> str:
    """A recipe's text; an address in it may carry a password."""
    return secrets.scrub(to_toml(recipe.settings()))
