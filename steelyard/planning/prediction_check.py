"""Compare a finished run with its prediction (`steelyard plan --check RUN`).

The measured step time is the median of `metrics.jsonl` without the first record, which includes compilation and cache
warm-up. If the run recorded a timeline (`log.timeline`), the spans of the rank that waits least, the slowest one, are
compared with the predicted parts. Memory is compared for the rank with the highest peak: predicted kinds, and the total
that the run recorded. On a GPU the measurement is that of its tensors. On a CPU it is the resident set of the process
minus what was resident before the model was built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from steelyard.core import units
from steelyard.core.errors import UserError
from steelyard.core.run import Run
from steelyard.core.safe_parse import loads
from steelyard.planning.cluster import Cluster
from steelyard.planning.layout import of_recipe
from steelyard.planning.measured_layers import Profile
from steelyard.planning.plan_report import shown, table
from steelyard.planning.predict import Predictor
from steelyard.sizes.memory import memory_of

# The spans of the timeline, and the predicted parts that they measure.
SPANS = {
    "compute and tensor": (("forward", "backward", "weights"), ("compute", "tensor", "expert")),
    "bubble and pipeline": (("receive", "send", "wait"), ("bubble", "pipeline")),
    "gradient": (("reduce", "gradients"), ("gradient",)),
    "optimizer": (("optimizer", "update"), ("optimizer",)),
    "overhead": (("data",), ("overhead",)),
}


@dataclass(frozen=True)
class Compared:
    """Predicted and measured seconds by part, None without a timeline; and peak bytes of the fullest rank.

    `measured_bytes` excludes `before`, the resident set of a CPU process before the model was built.
    """

    run: str
    layout: str
    predicted: float
    measured: float
    parts: dict[str, tuple[float, float | None]]
    predicted_bytes: int
    kinds: dict[str, int]
    measured_bytes: int | None
    before: int
    device: str


def compare(path: Path, cluster: Cluster, profiles: Sequence[Profile] = ()) -> Compared:
    """Predict the recipe of a run on a cluster, with `profiles` if given, and read what the run measured."""
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
    layout = of_recipe(recipe, cluster)
    predicted = asdict(Predictor.of_layout(recipe, cluster, layout, profiles=profiles).parts(layout))
    spans = _spans(path / "timeline")
    parts = {}
    for name, (measured_by, predicted_by) in SPANS.items():
        measured = sum(spans.get(span, 0.0) for span in measured_by) if spans else None
        parts[name] = (sum(predicted[part] for part in predicted_by), measured)
    peaks = [int(record["peak_memory"]) for record in run.metrics() if record.get("peak_memory")]
    fullest = max(memory_of(recipe, world), key=lambda memory: memory.total)
    before = int(run.manifest().get("memory_before") or 0)
    return Compared(
        run=str(path),
        layout=shown(layout),
        predicted=sum(predicted.values()),
        measured=median(seconds[1:] or seconds),
        parts=parts,
        predicted_bytes=fullest.total,
        kinds=fullest.by_kind(),
        measured_bytes=max(peaks) - before if peaks else None,
        before=before,
        device=str(run.manifest().get("device", "cpu")),
    )


def _spans(folder: Path) -> dict[str, float]:
    """Seconds per step of each span, on the rank that waits least for its neighbours."""
    ranks = [_summed(path) for path in sorted(folder.glob("rank-*.jsonl"))]
    return min(ranks, key=lambda spans: spans.get("receive", 0.0), default={})


def _summed(path: Path) -> dict[str, float]:
    spans: dict[str, float] = {}
    steps = set()
    for entry in _entries(path):
        steps.add(entry["step"])
        spans[entry["name"]] = spans.get(entry["name"], 0.0) + (entry["end_ns"] - entry["start_ns"]) / 1e9
    return {name: total / len(steps) for name, total in spans.items()}


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield loads(line)
        except ValueError:  # An incomplete last line.
            return


def as_result(compared: Compared) -> dict[str, Any]:
    """The comparison as a JSON object."""
    return {
        "run": compared.run,
        "layout": compared.layout,
        "predicted_seconds": compared.predicted,
        "measured_seconds": compared.measured,
        "error": compared.predicted / compared.measured - 1,
        "parts": {name: {"predicted": one, "measured": other} for name, (one, other) in compared.parts.items()},
        "predicted_bytes": compared.predicted_bytes,
        "predicted_bytes_by_kind": compared.kinds,
        "measured_bytes": compared.measured_bytes,
        "bytes_before": compared.before,
        "measured_on": compared.device,
    }


def as_text(compared: Compared) -> str:
    """The comparison as a table."""
    rows = [["part of a step", "predicted", "measured", "error"]]
    for name, (one, other) in compared.parts.items():
        rows.append([name, f"{one:.4f}", "" if other is None else f"{other:.4f}", ""])
    error = compared.predicted / compared.measured - 1
    rows.append(["total", f"{compared.predicted:.4f}", f"{compared.measured:.4f}", f"{100 * error:+.1f}%"])
    hint = "" if any(other is not None for _, other in compared.parts.values()) else (
        "\n\nthe run has no timeline; set log.timeline = [first, last] to measure the parts"
    )  # fmt: skip
    return f"{compared.run}: {compared.layout}\n\n{table(rows)}{hint}\n\n{_memory(compared)}"


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
        return (
            "measured is the peak memory of tensors on the GPU; predicted is an upper bound, because not all kinds "
            "peak at the same time"
        )
    return (
        f"measured is the peak resident set of the process minus the {units.size(compared.before)} that were resident "
        "before the model was built (Python, torch's libraries). It includes pages of token files, libraries that are "
        "loaded later, compiled code and the allocator's cache, so it is not meaningful for a small model"
    )
