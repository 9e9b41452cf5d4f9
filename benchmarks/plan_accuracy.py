"""Errors of the planner's predictions for measured training steps, compared with published simulators.

    python benchmarks/plan_accuracy.py FOLDER [--cases]     FOLDER holds the measurements, one csv file per source

Files that are read if they exist: vtrain_ground_truth_single.csv and _multi.csv (A100), amp_real_trials.csv (T4,
V100+T4), sailor_validation_measured.csv (GH200, mixed RTX), korthikanti2022_table5_a100.csv, torchtitan_benchmarks.csv
(H100). `measured_steps.py` describes them and FASOP's example job. Per set: mean absolute percentage error, rank
correlation (Spearman, over the whole set), and regret (within groups of the same model and batch: how much slower the
chosen plan is than the best). Then memory, for every case that has it.
The measurements are not part of the package; docs/plan.md lists what was calibrated on which of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from case_groups import regret, spearman
from measured_case import Case
from measured_steps import cases, fasops_cluster

from steelyard.planning import memory_fit
from steelyard.planning.predict import Predictor

BARS = {
    "vtrain single": 8.4,
    "vtrain multi": 14.7,
    "sailor rtx": 10.3,
    "amp v100+t4": 49.0,
    "korthikanti": 3.65,
    "FASOP example": 9.8,
}


def memory(found: list[Case], details: bool) -> None:
    """Print predicted and measured memory of the fullest rank, by set; for FASOP's example job, of logged ranks."""
    print("\nmemory            cases    MAPE    bias   rank")
    sets: dict[str, list[tuple[float, float, str]]] = {}
    for case in found:
        if case.peak_bytes is not None:
            sets.setdefault(case.set, []).append((case.peak(), case.peak_bytes, case.name))
    job = next(fasops_cluster())
    held = memory_fit.memories_of(Predictor(job.recipe, job.cluster, job.software), job.layout, range(8))
    between_steps = [each.weights + each.gradients + each.optimizer for each in held]
    sets["FASOP example"] = [(each, mib * 2**20, name) for each, mib, name in (
        (between_steps[0], 1570.8, "rank 0"), (between_steps[6], 3035.1, "rank 24"),
        (held[6].total, 3869.3, "rank 24 at its peak"),
    )]  # fmt: skip
    for name, pairs in sets.items():
        predicted, measured = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
        error = 100 * (predicted / measured - 1)
        print(f"{name:16} {len(pairs):5} {np.abs(error).mean():6.2f}% {error.mean():+6.1f}% "
              f"{spearman(predicted, measured):6.3f}")  # fmt: skip
        for (ours, theirs, what), off in zip(pairs, error, strict=True) if details else ():
            print(f"    {ours / 2**20:9.0f} MiB for {theirs / 2**20:9.0f} MiB  {off:+6.1f}%  {what}")


def main() -> None:
    """Print the table."""
    folder, details = Path(sys.argv[1]), "--cases" in sys.argv
    sets: dict[str, list[tuple[Case, float]]] = {}
    every = cases(folder)
    for case in every:
        sets.setdefault(case.set, []).append((case, case.predicted()))
    print(f"{'set':16} {'cases':>5} {'MAPE':>7} {'published':>9} {'bias':>7} {'rank':>6} {'regret':>7}")
    for name, found in sets.items():
        measured = np.array([case.measured for case, _ in found])
        predicted = np.array([seconds for _, seconds in found])
        error = 100 * np.abs(predicted / measured - 1).mean()
        lost = regret([case.group for case, _ in found], predicted, measured)
        print(f"{name:16} {len(found):5} {error:6.2f}% {BARS.get(name, float('nan')):8.2f}% "
              f"{100 * (predicted / measured - 1).mean():+6.1f}% {spearman(predicted, measured):6.3f} "
              f"{100 * lost:6.2f}%")  # fmt: skip
        for case, seconds in found if details else ():
            print(
                f"    {seconds:9.4f} s for {case.measured:9.4f} s  {100 * (seconds / case.measured - 1):+6.1f}%  "
                f"{case.name}"
            )
    memory(every, details)


if __name__ == "__main__":
    main()
