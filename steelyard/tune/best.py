"""The result of a study: the best trial, or the Pareto front of several objectives, and their settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import files, secrets
from steelyard.tune import candidate, outcome, storage, study_folder, trial_history
from steelyard.tune.spec import Tune

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

MOST = 20  # recipes of a frontier that are written
MOST_NAMED = 8  # tied trials that are listed


def front(tune: Tune, trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The Pareto front of the finished trials, ordered by the first objective, best first.

    Of trials with equal values, only the first is included (the others: `ties`).
    """
    done = [trial for trial in trials if trial_history.result_of(trial) == outcome.FINISHED]
    first = {tuple(trial.values): trial for trial in reversed(done)}.values()
    unbeaten = [trial for trial in first if not any(_beats(tune, other, trial) for other in first)]
    sign = -1 if tune.objectives[0].direction == "maximize" else 1
    return sorted(unbeaten, key=lambda trial: (sign * trial.values[0], trial.number))


def ties(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> list[int]:
    """The numbers of other finished trials with the same values."""
    done = [
        other for other in trials if trial_history.result_of(other) == outcome.FINISHED and other.number != trial.number
    ]
    return [other.number for other in done if list(other.values) == list(trial.values)]


def _beats(tune: Tune, one: FrozenTrial, other: FrozenTrial) -> bool:
    pairs = list(zip(tune.objectives, one.values, other.values, strict=True))
    never_worse = not any(objective.better(theirs, ours) for objective, ours, theirs in pairs)
    return never_worse and any(objective.better(ours, theirs) for objective, ours, theirs in pairs)


def write_best(tune: Tune, trials: Sequence[FrozenTrial], folder: Path) -> dict[str, Any]:
    """Write the best settings as a recipe (or a command), and return a summary."""
    best = front(tune, trials)
    if len(tune.objectives) == 1:
        best = best[:1]
    name = "best.toml" if tune.recipe is not None else "best.txt"
    if best:
        _write(folder / name, tune, best[0])
    frontier = {f"trial-{each.number:05d}{Path(name).suffix}": each for each in best[:MOST] if len(best) > 1}
    for file, trial in frontier.items():
        _write(folder / "best" / file, tune, trial)
    for old in (folder / "best").glob(f"trial-*{Path(name).suffix}"):
        if old.name not in frontier:  # No longer on the front.
            old.unlink(missing_ok=True)
    outcomes = Counter(trial_history.result_of(trial) for trial in trials)
    return {
        "study": str(folder),
        "trials": len(trial_history.ran(trials)),
        "outcomes": dict(sorted(outcomes.items())),
        "best": [
            {
                "trial": trial.number,
                "settings": trial.params,
                "values": dict(zip((each.label for each in tune.objectives), trial.values, strict=True)),
                "ties": ties(trial, trials),
            }
            for trial in best
        ],
        "written": str(folder / name) if best else None,
    }


def of_folder(folder: Path, url: str | None = None) -> dict[str, Any]:
    """Write the best settings of a study's folder, and return a summary."""
    tune, study = study_folder.opened(folder, url)
    with storage.database_errors():
        return write_best(tune, study.get_trials(deepcopy=False), folder)


def _write(path: Path, tune: Tune, trial: FrozenTrial) -> None:
    named = zip(tune.objectives, trial.values, strict=True)
    values = ", ".join(f"{objective.label} {value:.6g}" for objective, value in named)
    remark = f"# steelyard tune: trial {trial.number} of the study {tune.name}, {values}".replace("\n", " ")
    text = f"{remark}\n{secrets.scrub(candidate.written(tune, trial.params))}"
    if not path.is_file() or path.read_bytes() != text.encode():
        files.write_text(path, text)


def tied(numbers: Sequence[int]) -> str:
    """The number of tied trials, and their numbers."""
    named = ", ".join(map(str, numbers[:MOST_NAMED])) + (", ..." if len(numbers) > MOST_NAMED else "")
    return f"{len(numbers)} more tied: trial{'s' if len(numbers) > 1 else ''} {named}"


def as_text(summary: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [f"study  {summary['study']}: {trial_history.counted(summary['trials'])}"]
    lines += [f"       {count} {name.replace('_', ' ')}" for name, count in summary["outcomes"].items()]
    for each in summary["best"]:
        values = "  ".join(f"{name} {value:.6g}" for name, value in each["values"].items())
        settings = "  ".join(f"{name}={value}" for name, value in each["settings"].items())
        lines.append(f"best   trial {each['trial']}: {values}\n       {settings}")
        if each["ties"]:
            lines.append(f"       {tied(each['ties'])}")
    if not summary["best"]:
        lines.append("best   none: no trial has finished")
    if summary["written"]:
        lines.append(f"wrote  {summary['written']}")
    return "\n".join(lines)
