"""The calibration of a site: measured / predicted seconds of its runs, kept beside the cluster file.

`steelyard plan --check RUN --cluster FILE --store` writes FILE with the suffix `.calibration.toml`. Every plan of the
same program with that cluster file uses it (`applied`). The format is `[[runs]]`:

run, date, layout, placement   the folder of the run, and its nodes as in `parallel.placement`
software, gpus                 the program that ran, and the GPUs to which its factors of compute apply
forward, backward, optimizer   factors of compute; a phase that is negligible has none
communication                  factor of the links that the run used
overhead                       seconds per step more than predicted
error_before, error_after      of the run's step without a calibration, and with that of all stored runs

Factors of several runs are combined by their geometric mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Annotated

from pydantic import Field, PositiveFloat, ValidationError

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.recipe import to_toml
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.section import Section
from steelyard.core.recipe.toml import read
from steelyard.core.run import now
from steelyard.planning.cluster import Cluster
from steelyard.planning.evidence import OWN, Evidence, Factors
from steelyard.planning.layout import Layout
from steelyard.planning.phase_check import Phase
from steelyard.planning.plan_report import shown

NEGLIGIBLE = 0.01  # of a step: a phase below this gives no factor
LEAST, MOST = 0.1, 10.0


class CalibratedRun(Section):
    """One run."""

    run: str
    date: str
    software: str = OWN
    gpus: Annotated[list[str], Field(min_length=1)]
    layout: str
    placement: list[str] = Field(default_factory=list)
    forward: PositiveFloat | None = None
    backward: PositiveFloat | None = None
    optimizer: PositiveFloat | None = None
    communication: PositiveFloat | None = None
    overhead: float
    error_before: float
    error_after: float | None = None
    """Not known if the folder of the run was removed before another run was stored."""

    @property
    def nodes(self) -> dict[str, int]:
        """The number of nodes by type."""
        counts: dict[str, int] = {}
        for type_, _, count in (entry.rpartition(":") for entry in self.placement):
            counts[type_] = counts.get(type_, 0) + int(count)
        return counts


class Calibration(Section):
    """A calibration file."""

    runs: Annotated[list[CalibratedRun], Field(min_length=1)]


def path_beside(cluster: Path) -> Path:
    """The calibration file of a cluster file."""
    return cluster.with_suffix(".calibration.toml")


def load(path: Path) -> Calibration | None:
    """Read and validate a calibration; None if there is none."""
    if not path.exists():
        return None
    values, places = read(path, "a calibration")
    try:
        return Calibration.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, str(path), Calibration) from None


def of_run(run: Path, cluster: Cluster, layout: Layout, phases: dict[str, Phase], before: float) -> CalibratedRun:
    """The factors of one run. `before` is the error of the prediction without them."""
    step = sum(phase.measured or 0.0 for phase in phases.values())

    def factor(name: str) -> float | None:
        predicted, measured = phases[name].predicted, phases[name].measured or 0.0
        if min(predicted, measured) < NEGLIGIBLE * step:
            return None
        return min(MOST, max(LEAST, measured / predicted))

    return CalibratedRun(
        run=str(run.resolve()), date=now(), layout=shown(layout), placement=layout.settings()["placement"],
        gpus=sorted({cluster.gpu_by_type[type_].name for type_, _ in layout.placement}), forward=factor("forward"),
        backward=factor("backward"), optimizer=factor("optimizer"), communication=factor("exposed communication"),
        overhead=phases["data"].difference, error_before=before,
    )  # fmt: skip


def calibrated(cluster: Cluster, runs: Sequence[CalibratedRun]) -> Cluster:
    """The cluster with the factors of these runs: of compute on their GPUs, of links inside and between their nodes."""
    if not runs:
        return cluster
    inside: dict[str, list[CalibratedRun]] = {}
    network: dict[frozenset[str], list[CalibratedRun]] = {}
    gpus: dict[str, list[CalibratedRun]] = {}
    for run in runs:
        for gpu in run.gpus:
            gpus.setdefault(gpu, []).append(run)
        for type_ in run.nodes:
            inside.setdefault(type_, []).append(run)
        for one, other in combinations_with_replacement(run.nodes, 2):
            if one != other or run.nodes[one] > 1:
                network.setdefault(frozenset((one, other)), []).append(run)
    return cluster.with_evidence(
        Evidence(
            site={gpu: _combined(own) for gpu, own in gpus.items()},
            overhead=mean(run.overhead for run in runs),
            inside={type_: _mean(run.communication for run in own) for type_, own in inside.items()},
            network={pair: _mean(run.communication for run in own) for pair, own in network.items()},
            software=runs[0].software,
        )
    )


def _combined(runs: list[CalibratedRun]) -> Factors:
    return Factors(
        _mean(run.forward for run in runs),
        _mean(run.backward for run in runs),
        _mean(run.optimizer for run in runs),
    )


def _mean(factors: Iterable[float | None]) -> float:
    """The geometric mean of the factors that are known."""
    known = [factor for factor in factors if factor is not None]
    return geometric_mean(known) if known else 1.0


def chosen(cluster: Path, software: str = OWN) -> tuple[list[CalibratedRun], str]:
    """The stored runs of a program beside a cluster file, and a line that says which are used; it is also printed."""
    path = path_beside(cluster)
    stored = load(path)
    if stored is None:
        return [], ""
    runs = [run for run in stored.runs if run.software == software]
    others = sorted({run.software for run in stored.runs} - {software})
    lines = [f"calibrated with {_runs(len(runs))}: {path}"] if runs else []
    if others:
        left = f"{_runs(len(stored.runs) - len(runs))} of {' and '.join(others)}"
        lines.append(f"not calibrated with {left} in {path}: this plan is for {software}")
    note = "; ".join(lines)
    console.say(note)
    return runs, note


def applied(cluster: Cluster, path: Path, software: str = OWN) -> Cluster:
    """The cluster with the calibration that is stored beside its file for a program."""
    runs, note = chosen(path, software)
    return calibrated(cluster, runs).with_evidence(Evidence(software=software, calibration=note)) if note else cluster


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def with_run(stored: Sequence[CalibratedRun], run: CalibratedRun) -> list[CalibratedRun]:
    """The stored runs and another one, which replaces an earlier entry of the same run."""
    return [*(each for each in stored if each.run != run.run), run]


def write(path: Path, runs: Sequence[CalibratedRun]) -> None:
    """Write a calibration file."""
    files.write_text(path, to_toml(Calibration(runs=list(runs)).model_dump(exclude_none=True)))
