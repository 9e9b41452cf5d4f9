"""The calibration of a site: measured / predicted seconds of its runs, kept beside the cluster file.

`steelyard plan --check RUN --cluster FILE --store` writes FILE with the suffix `.calibration.toml`, and every plan with
that cluster file uses it. The format is `[[runs]]` with run, date, gpus, layout, forward, backward, optimizer and
communication (factors), overhead (seconds per step more than predicted), and the step's error before and after. Factors
of several runs on a GPU are combined by their geometric mean.
"""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean, mean
from typing import Annotated

from pydantic import Field, PositiveFloat, ValidationError

from steelyard.core import files
from steelyard.core.recipe import to_toml
from steelyard.core.recipe.load import explained
from steelyard.core.recipe.section import Section
from steelyard.core.recipe.toml import read
from steelyard.core.run import now
from steelyard.planning.cluster import Cluster
from steelyard.planning.evidence import Evidence, Factors
from steelyard.planning.phase_check import Phase

NEGLIGIBLE = 0.01  # of a step: a phase below this gives no factor
LEAST, MOST = 0.1, 10.0


class CalibratedRun(Section):
    """One run."""

    run: str
    date: str
    gpus: Annotated[list[str], Field(min_length=1)]
    layout: str
    forward: PositiveFloat
    backward: PositiveFloat
    optimizer: PositiveFloat
    communication: PositiveFloat
    overhead: float
    error_before: float
    error_after: float


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


def of_run(run: str, layout: str, gpus: list[str], phases: dict[str, Phase], before: float) -> CalibratedRun:
    """The factors of one run. `before` is the error of the prediction without them."""
    step = sum(phase.measured or 0.0 for phase in phases.values())

    def factor(name: str) -> float:
        predicted, measured = phases[name].predicted, phases[name].measured or 0.0
        if min(predicted, measured) < NEGLIGIBLE * step:
            return 1.0
        return min(MOST, max(LEAST, measured / predicted))

    return CalibratedRun(
        run=run, date=now(), gpus=gpus, layout=layout, forward=factor("forward"), backward=factor("backward"),
        optimizer=factor("optimizer"), communication=factor("exposed communication"),
        overhead=phases["data"].difference, error_before=before, error_after=before,
    )  # fmt: skip


def calibrated(cluster: Cluster, runs: list[CalibratedRun]) -> Cluster:
    """The cluster with the factors of these runs: of compute as evidence, of communication on its links."""
    known = {gpu for run in runs for gpu in run.gpus}
    site = {gpu: _combined([run for run in runs if gpu in run.gpus]) for gpu in known}
    slower = geometric_mean(run.communication for run in runs)
    nodes = [
        each.model_copy(update={"intra_GBps": cluster.inside(each).bandwidth / 1e9 / slower}) for each in cluster.nodes
    ]
    links = [link.model_copy(update={"GBps": link.GBps / slower}) for link in cluster.links]
    made = cluster.with_nodes(nodes, links)
    return made.with_evidence(Evidence(site=site, overhead=mean(run.overhead for run in runs)))


def _combined(runs: list[CalibratedRun]) -> Factors:
    return Factors(
        geometric_mean(run.forward for run in runs),
        geometric_mean(run.backward for run in runs),
        geometric_mean(run.optimizer for run in runs),
    )


def store(path: Path, run: CalibratedRun) -> Calibration:
    """Add a run to the calibration file; an earlier entry of the same run is replaced."""
    old = load(path)
    runs = [each for each in old.runs if each.run != run.run] if old is not None else []
    made = Calibration(runs=[*runs, run])
    files.write_text(path, to_toml(made.model_dump()))
    return made
