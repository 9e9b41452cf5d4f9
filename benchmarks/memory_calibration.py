"""Fit the constants of other programs' memory, and predict the memory of groups of runs that a fit did not see.

    python benchmarks/memory_calibration.py FOLDER

What PyTorch's allocator reserves beside tensors is a share of them (`FRAGMENTATION`), from the runs of TorchTitan. What
the driver counts beside that is a number of bytes for each kind of link inside a node (`OUTSIDE_GIB`), from those of
Sailor. Each is the median over the runs in the fit. If none of them is left, there are no gaps, and nodes with and
without NVLink get each other's bytes. A run that took less memory than its tensors determines nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from case_groups import GROUPS, error
from measured_case import Case
from measured_steps import cases

from steelyard.planning import memory_fit, torchtitan_memory
from steelyard.sizes.gpu_catalogue import GIB

GAPS = "gaps"
OTHER = {"nvlink": "pcie", "pcie": "nvlink"}
SHIPPED = {GAPS: torchtitan_memory.FRAGMENTATION, **{link: memory_fit.OUTSIDE_GIB[link] for link in OTHER}}

Values = dict[str, float]
Run = tuple[Case, float, float]
"""A run, the predicted bytes of its tensors, and its measured bytes."""


def constant(case: Case) -> str:
    """The constant that only such runs determine."""
    return case.cluster.inside(case.cluster.nodes[0]).transport if case.device else GAPS


def runs(every: list[Case]) -> list[Run]:
    """The cases with a measured memory, predicted without gaps and without what is outside PyTorch."""
    shipped = torchtitan_memory.FRAGMENTATION, memory_fit.OUTSIDE_GIB
    torchtitan_memory.FRAGMENTATION, memory_fit.OUTSIDE_GIB = 0.0, dict.fromkeys(shipped[1], 0.0)
    found = [(case, case.peak(), case.peak_bytes) for case in every if case.peak_bytes is not None]
    torchtitan_memory.FRAGMENTATION, memory_fit.OUTSIDE_GIB = shipped
    return found


def fitted(found: list[Run]) -> Values:
    """Each constant from the runs that determine it."""
    gaps = [bytes_ / tensors - 1 for case, tensors, bytes_ in found if not case.device]
    values = {GAPS: float(np.median(gaps)) if gaps else 0.0}
    for link in OTHER:
        outside = [
            (bytes_ - tensors * (1 + values[GAPS])) / GIB
            for case, tensors, bytes_ in found
            if constant(case) == link and bytes_ > tensors
        ]
        if outside:
            values[link] = float(np.median(outside))
    return {link: values.get(other, 0.0) for link, other in OTHER.items()} | values


def predicted(run: Run, values: Values) -> float:
    """Predicted memory of a run."""
    case, tensors, _ = run
    return tensors * (1 + values[GAPS]) + (values[constant(case)] * GIB if case.device else 0.0)


def report(every: list[Case]) -> None:
    """Print the constants, and errors of each set with the shipped ones and without the group of a run."""
    found = runs(every)
    values = fitted(found)
    print("\nmemory: constants, shipped and fitted")
    for name, shipped in SHIPPED.items():
        print(f"{name:28} {shipped:10.4g} {values[name]:10.4g}")
    print("errors of memory, and without the group of a run in the fit")
    columns = {"shipped": [predicted(run, SHIPPED) for run in found]}
    for way, group_of in GROUPS.items():
        left_out = {
            group: fitted([run for run in found if group_of(run[0]) != group])
            for group in dict.fromkeys(group_of(case) for case, _, _ in found)
        }
        columns[way] = [predicted(run, left_out[group_of(run[0])]) for run in found]
    for name in dict.fromkeys(case.set for case, _, _ in found):
        rows = [row for row, run in enumerate(found) if run[0].set == name]
        possible = [row for row in rows if found[row][2] > found[row][1]]
        for label, chosen in [(name, rows), ("  that are possible", possible)][: 1 + (possible != rows)]:
            measured = [found[row][2] for row in chosen]
            each = (f"| {way} {error([column[row] for row in chosen], measured)}" for way, column in columns.items())
            print(f"{label:20} {len(chosen):3}", *each)


if __name__ == "__main__":
    report(cases(Path(sys.argv[1])))
