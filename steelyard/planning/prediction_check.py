"""Compare a finished run with its prediction (`steelyard plan --check RUN`).

The measured step time is the median of `metrics.jsonl` without the first record, which includes compilation and cache
warm-up. If the run recorded a timeline (`log.timeline`), its phases are compared with the predicted ones
(`phase_check`), and the factors between them are a calibration of the site (`site_calibration`). Memory is compared for
the rank with the highest peak: predicted kinds, and the total that the run recorded. On a GPU the measurement is that
of its tensors. On a CPU it is the resident set of the process minus what was resident before the model was built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import SteelyardError, UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run
from steelyard.planning import phase_check, site_calibration
from steelyard.planning.cluster import Cluster
from steelyard.planning.evidence import OWN
from steelyard.planning.layout import Layout, of_recipe
from steelyard.planning.measured_layers import Profile
from steelyard.planning.phase_check import Phase
from steelyard.planning.plan_report import shown, table
from steelyard.planning.predict import Predictor
from steelyard.planning.results import plan_of
from steelyard.planning.site_calibration import CalibratedRun
from steelyard.planning.uncertainty import Range
from steelyard.sizes.memory import memory_of


@dataclass(frozen=True)
class Compared:
    """Predicted and measured seconds by phase, None without a timeline; and peak bytes of the fullest rank.

    `measured_bytes` excludes `before`, the resident set of a CPU process before the model was built.
    """

    run: str
    layout: str
    predicted: float
    measured: float
    range: Range
    """The 80% range of the predicted step."""
    parts: dict[str, Phase]
    calibration: CalibratedRun | None
    """The factors of this run, with the error of the step before and after a calibration with all runs."""
    alone: float | None
    """The error after a calibration with this run alone."""
    others: int
    """Stored runs that such a calibration combines with this one."""
    predicted_bytes: int
    kinds: dict[str, int]
    measured_bytes: int | None
    before: int
    device: str

    @property
    def error(self) -> float:
        """The relative error of the predicted step."""
        return self.predicted / self.measured - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measured step is inside the range of the prediction."""
        return self.range.contains(self.measured)


def compare(
    path: Path, cluster: Cluster, profiles: Sequence[Profile] = (), stored: Sequence[CalibratedRun] = ()
) -> Compared:
    """Predict the recipe of a run on a cluster, with `profiles` if given, and read what the run measured.

    `stored` are the runs of the site's calibration. The prediction does not use them; `calibration` tells what it would
    be with them and this run.
    """
    run, recipe, layout, measured = _opened(path, cluster)
    predictor = Predictor.of_layout(recipe, cluster, layout, profiles=profiles)
    phases = phase_check.compare(predictor.step(layout), layout.partition, recipe, path / "timeline")
    predicted = sum(phase.predicted for phase in phases.values())
    peaks = [int(record["peak_memory"]) for record in run.metrics() if record.get("peak_memory")]
    fullest = max(memory_of(recipe, layout.world), key=lambda memory: memory.total)
    before = int(run.manifest().get("memory_before") or 0)
    calibration, alone, others = None, None, [run for run in stored if run.software == OWN]
    if phases["forward"].measured is not None:
        own = site_calibration.of_run(path, cluster, layout, phases, predicted / measured - 1)
        runs = site_calibration.with_run(others, own)
        others = runs[:-1]

        def error(runs: Sequence[CalibratedRun]) -> float:
            machines = site_calibration.calibrated(cluster, runs)
            return Predictor.of_layout(recipe, machines, layout, profiles=profiles).parts(layout).total / measured - 1

        alone, calibration = error([own]), own.model_copy(update={"error_after": error(runs)})
    return Compared(
        run=str(path),
        layout=shown(layout),
        predicted=predicted,
        measured=measured,
        range=plan_of(predictor, layout).range,
        parts=phases,
        calibration=calibration,
        alone=alone,
        others=len(others),
        predicted_bytes=fullest.total,
        kinds=fullest.by_kind(),
        measured_bytes=max(peaks) - before if peaks else None,
        before=before,
        device=str(run.manifest().get("device", "cpu")),
    )


def _opened(path: Path, cluster: Cluster) -> tuple[Run, Recipe, Layout, float]:
    """A run, its recipe and layout on the cluster, and the seconds of its steps."""
    run = Run.open(path)
    recipe, world = run.recipe(), int(run.manifest().get("world_size", 1))
    seconds = [record["seconds"] for record in run.metrics() if record.get("seconds") is not None]
    if not seconds:
        raise UserError(f"{path} has not logged a step yet", hint="train for more steps than log.every")
    if world > cluster.ranks:
        raise UserError(
            f"{path} ran on {world} ranks, but the cluster has {cluster.ranks}", hint="use the cluster file of the run"
        )
    settings = recipe.settings()
    settings["parallel"]["data"] = recipe.parallel.data_for(world)
    recipe = type(recipe).model_validate(settings)
    return run, recipe, of_recipe(recipe, cluster), median(seconds[1:] or seconds)


def store(compared: Compared, cluster: Cluster, path: Path) -> list[CalibratedRun]:
    """Add the calibration of a run to the file beside the cluster file, unless it makes the prediction worse.

    Returns all stored runs with their errors under the combined calibration, which the next plan uses.
    """
    own, alone = compared.calibration, compared.alone
    if own is None or alone is None:
        raise UserError(
            f"{compared.run} has no timeline to calibrate with", hint="train with log.timeline = [first, last]"
        )
    if abs(alone) > abs(own.error_before):
        raise UserError(
            f"a calibration with {compared.run} would make its error {_percent(alone)} instead of "
            f"{_percent(own.error_before)}",
            hint="check the cluster file, or use a run with more steps in log.timeline",
        )
    file = site_calibration.path_beside(path)
    stored = site_calibration.load(file)
    runs = site_calibration.with_run(stored.runs if stored is not None else (), own)
    machines = site_calibration.calibrated(cluster, [run for run in runs if run.software == OWN])
    runs = [_with_errors(run, cluster, machines) if run.software == OWN else run for run in runs]
    site_calibration.write(file, runs)
    console.say(f"wrote {file}: plans with {path} use {len(runs)} run{'s' if len(runs) > 1 else ''}")
    for run in runs:
        after = "not known: its folder is gone" if run.error_after is None else _percent(run.error_after)
        console.say(f"  {run.run}: error before {_percent(run.error_before)}, after {after}")
    return runs


def _with_errors(run: CalibratedRun, cluster: Cluster, calibrated: Cluster) -> CalibratedRun:
    """A stored run with its errors on the cluster before and after the calibration."""
    try:
        _, recipe, layout, measured = _opened(Path(run.run), cluster)
    except SteelyardError:
        return run.model_copy(update={"error_after": None})
    steps = [Predictor.of_layout(recipe, each, layout).parts(layout).total for each in (cluster, calibrated)]
    return run.model_copy(update={"error_before": steps[0] / measured - 1, "error_after": steps[1] / measured - 1})


def as_result(compared: Compared) -> dict[str, Any]:
    """The comparison as a JSON object."""
    return {
        "run": compared.run,
        "layout": compared.layout,
        "predicted_seconds": compared.predicted,
        "measured_seconds": compared.measured,
        "error": compared.error,
        "seconds_low": compared.range.low,
        "seconds_high": compared.range.high,
        "evidence": compared.range.evidence,
        "inside_range": compared.is_inside,
        "parts": {
            name: {"predicted": phase.predicted, "measured": phase.measured} for name, phase in compared.parts.items()
        },
        "worst": phase_check.worst(compared.parts),
        "calibration": None if compared.calibration is None else compared.calibration.model_dump(),
        "predicted_bytes": compared.predicted_bytes,
        "predicted_bytes_by_kind": compared.kinds,
        "measured_bytes": compared.measured_bytes,
        "bytes_before": compared.before,
        "measured_on": compared.device,
    }


def as_text(compared: Compared) -> str:
    """The comparison as a table, and the term that is off."""
    rows = [["phase of a step", "predicted", "measured", "error"]]
    for name, phase in compared.parts.items():
        measured = phase.measured
        error = "" if not measured else _percent(phase.predicted / measured - 1)
        rows.append([name, f"{phase.predicted:.4f}", "" if measured is None else f"{measured:.4f}", error])
    rows.append(["total", f"{compared.predicted:.4f}", f"{compared.measured:.4f}", _percent(compared.error)])
    where = "inside" if compared.is_inside else "outside"
    range_ = f"the measured step is {where} the 80% range of the prediction, {compared.range} s"
    head = f"{compared.run}: {compared.layout}"
    return "\n\n".join([head, table(rows), range_, _term(compared), _memory(compared)])


def _term(compared: Compared) -> str:
    """Which term is off, and what a calibration with this run would change."""
    name, calibration = phase_check.worst(compared.parts), compared.calibration
    if name is None or calibration is None:
        return "the run has no timeline; set log.timeline = [first, last] to measure the phases"
    phase = compared.parts[name]
    how = "short" if phase.difference > 0 else "long"
    share, after = abs(phase.difference) / compared.measured, calibration.error_after
    stored = f" and {compared.others} stored" if compared.others else ""
    return (
        f"the term that is off most is {name}: predicted {abs(phase.difference):.4f} s too {how}, "
        f"{100 * share:.1f}% of the step\n"
        f"calibrated with this run{stored} (--store), the error of the step is "
        f"{_percent(compared.error if after is None else after)} instead of {_percent(calibration.error_before)}"
    )


def _percent(error: float) -> str:
    return f"{100 * error:+.1f}%"


def _memory(compared: Compared) -> str:
    rows = [["memory of the fullest rank", "predicted", "measured", "error"]]
    rows += [[kind.replace("_", " "), units.size(size), "", ""] for kind, size in compared.kinds.items() if size]
    measured = compared.measured_bytes
    error = "" if not measured else f"{100 * (compared.predicted_bytes / measured - 1):+.1f}%"
    rows.append(
        ["total", units.size(compared.predicted_bytes), "" if measured is None else units.size(measured), error]
    )
    return f"{table(rows)}\n\n{_memory_note(compared)}"


def _memory_note(compared: Compared) -> str:
    """What the measured memory includes."""
    if compared.measured_bytes is None:
        return "the run recorded no memory (peak_memory in metrics.jsonl)"
    if not compared.device.startswith("cpu"):
        return "measured is the peak memory of tensors on the GPU"
    return (
        f"measured is the peak resident set of the process minus the {units.size(compared.before)} that were resident "
        "before the model was built (Python, torch's libraries). It includes pages of token files, libraries that are "
        "loaded later, compiled code and the allocator's cache, so it is not meaningful for a small model"
    )
