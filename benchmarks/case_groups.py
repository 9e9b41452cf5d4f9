"""Groups of measured cases that share a data set, a GPU, a tensor degree or a cluster size, and scores of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from measured_case import Case


def gpus(case: Case) -> str:
    """The GPUs of a case."""
    names = {case.cluster.gpu_by_type[type_].name.split("-")[0] for type_, _ in case.layout.placement}
    return "rtx" if "rtx" in "".join(names) else "+".join(sorted(names))


def size(case: Case) -> str:
    """The number of GPUs of a case, roughly."""
    sizes = (1, 4, 8, 32, 64, 256)
    return next((f"up to {most}" for most in sizes if case.layout.world <= most), "more than 256")


GROUPS: dict[str, Callable[[Case], str]] = {
    "data set": lambda case: case.set,
    "GPU": gpus,
    "tensor": lambda case: f"tensor {case.layout.tensor}",
    "cluster size": size,
}


def error(predicted: Sequence[float], measured: Sequence[float]) -> str:
    """The mean absolute and the mean error, in percent."""
    off = np.array(predicted) / np.array(measured) - 1
    return f"{100 * np.abs(off).mean():6.2f}%  bias {100 * off.mean():+6.1f}%"


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of ranks; not a number for fewer than three cases."""
    ranks = [np.argsort(np.argsort(each)) for each in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(one) > 2 else float("nan")


def regret(alternatives: Sequence[str], predicted: Sequence[float], measured: Sequence[float]) -> float:
    """By how much the chosen one of each set of alternatives is slower than its best, on average; 0 without a choice.

    `alternatives` names the set of each case.
    """
    members: dict[str, list[int]] = {}
    for number, name in enumerate(alternatives):
        members.setdefault(name, []).append(number)
    lost = [
        measured[min(each, key=lambda number: predicted[number])] / min(measured[number] for number in each) - 1
        for each in members.values()
        if len(each) > 1
    ]
    return float(np.mean(lost)) if lost else 0.0
