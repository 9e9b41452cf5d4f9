"""Fit the planner's calibrated constants to measured steps, and predict groups of steps that a fit did not see.

    python benchmarks/plan_calibration.py FOLDER [--out ERRORS.json]

Prints each shipped constant beside its fit to all steps, and then errors, rank correlation and regret with and without
the group of a step in the fit: one fit for each data set, GPU, tensor degree and cluster size that is left out. Without
a data set or a GPU, the errors are also printed for hosts whose launch times are known. Then memory, in the same ways
(`memory_calibration.py`). `--out` writes all predictions.
The constants are those of docs/plan.md that are marked as calibrated. Nothing here changes what a user gets:
`plan_accuracy.py` scores the shipped constants.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import memory_calibration
import numpy as np
from case_groups import GROUPS, error, regret, spearman
from measured_case import Case
from measured_steps import cases
from scipy.optimize import least_squares

from steelyard.planning import cluster, communication, compute
from steelyard.planning.cost_table import Parts
from steelyard.planning.predict import Predictor
from steelyard.planning.software import ASYNC_TP, DEEPSPEED, MEGATRON, STEELYARD, TORCHTITAN, Software
from steelyard.planning.uncertainty import HOST, range_of

# Shares of the fit. Cases of a set divide the set's share, so that large sets do not decide alone. Sailor's RTX nodes
# have none: their links are not published, and shares of links that the planner assumes would be fitted to them.
# FASOP's example job has none: its time is in a README, not among the measurements that a calibration may use.
SHARES = {"vtrain single": 12, "vtrain multi": 4, "amp t4": 1.5, "amp v100+t4": 2.5, "sailor gh200": 1,
          "korthikanti": 0.5, "torchtitan": 10, "own engine": 3}  # fmt: skip
OUTLIER = 0.06  # errors beyond this count linearly, not squared
STEPS = 5  # of the fit; it starts at the shipped constants
HOLD = 0.3  # residual of a constant at e times its start: one that no case determines stays, others are free to move

# The same layers are launched by the hosts of both programs, which differ as hosts do: without Megatron's runs on one
# node no other run determines its launch time, and a fit would move it to its limit for the smallest gain elsewhere.
LAUNCHES = ("megatron launch", "deepspeed launch")

Values = dict[str, float]


@dataclass(frozen=True)
class Knob:
    """A calibrated constant: its shipped value and limits."""

    name: str
    shipped: float
    least: float
    most: float


# Constants that only eager programs with unfused attention use, or that their measurements alone determine. Megatron's
# product_share is not among them: fits end at its limit of 1.
EAGER_KNOBS = [
    Knob("megatron launch", MEGATRON.launch, 15e-6, 40e-6),
    Knob("megatron collective_launch", MEGATRON.collective_launch, 1e-6, 200e-6),
    Knob("megatron step_overhead", MEGATRON.step_overhead, 5e-4, 30e-3),
    Knob("megatron split_softmax", MEGATRON.split_softmax, 2, 30),
    Knob("deepspeed launch", DEEPSPEED.launch, 20e-6, 50e-6),
    Knob("RAMP", compute.RAMP, 5, 200),
    Knob("BATCHED_SHARE", compute.BATCHED_SHARE, 0.3, 1.0),
    Knob("OVERLAP", compute.OVERLAP, 1.5, 20),
    Knob("REACHED nvlink", communication.REACHED["nvlink"], 0.3, 0.95),
    Knob("REACHED pcie", communication.REACHED["pcie"], 0.3, 1.0),
    Knob("REACHED rdma", communication.REACHED["rdma"], 0.4, 0.95),
    Knob("REACHED tcp", communication.REACHED["tcp"], 0.2, 0.8),
    Knob("BASE_LATENCY", communication.BASE_LATENCY, 1e-6, 100e-6),
    Knob("LATENCY_US nvlink", cluster.LATENCY_US["nvlink"], 1.0, 60.0),
]
COMPILED_KNOBS = [
    Knob("torchtitan product_share", TORCHTITAN.product_share, 0.4, 1.0),
    Knob("torchtitan ring_share", TORCHTITAN.ring_share, 0.4, 1.0),
    Knob("torchtitan ASYNC_TP", ASYNC_TP, 0.05, 1.0),
    Knob("steelyard product_share", STEELYARD.product_share, 0.7, 1.0),
    Knob("steelyard step_overhead", STEELYARD.step_overhead, 5e-4, 6e-3),
    Knob("cast_share", STEELYARD.cast_share, 0.2, 1.0),
]
KNOBS = [*EAGER_KNOBS, *COMPILED_KNOBS]
SHIPPED: Values = {knob.name: knob.shipped for knob in KNOBS}


def set_constants(values: Values) -> None:
    """Put values into the planner's modules."""
    compute.RAMP, compute.BATCHED_SHARE = values["RAMP"], values["BATCHED_SHARE"]
    compute.OVERLAP, communication.BASE_LATENCY = values["OVERLAP"], values["BASE_LATENCY"]
    for transport in communication.REACHED:
        communication.REACHED[transport] = values[f"REACHED {transport}"]
    cluster.LATENCY_US["nvlink"] = values["LATENCY_US nvlink"]
    for cached in (compute.layer, compute.embedding, compute.head):
        cached.cache_clear()


def with_values(software: Software, values: Values) -> Software:
    """A program with these values."""
    name = "megatron" if software.scores else software.name
    known = {key.split()[1]: value for key, value in values.items() if key.startswith(f"{name} ")}
    if software.name == DEEPSPEED.name:
        known["launch"] = values["deepspeed launch"]
    overlapped = known.pop("ASYNC_TP", 1.0)
    if software.exposed_exchange < 1:
        known["exposed_exchange"] = overlapped
    return replace(software, cast_share=values["cast_share"], **known)


def predicted(values: Values, found: Iterable[Case]) -> np.ndarray:
    """Predicted seconds with these values."""
    set_constants(values)
    for case in found:
        case.cluster.__dict__.pop("insides", None)  # Cached with the latency of another fit.
    return np.array([replace(case, software=with_values(case.software, values)).predicted() for case in found])


def fitted(found: list[Case], knobs: list[Knob], start: Values, hosts_differ: float = HOST["default"]) -> Values:
    """Values that fit the cases best, starting at `start`, if hosts differ as much as this."""
    found = [case for case in found if case.set in SHARES]
    names = [case.set for case in found]
    weights = np.array([SHARES[name] / names.count(name) for name in names])
    measured = np.array([case.measured for case in found])

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = start | {knob.name: float(np.exp(log)) for knob, log in zip(knobs, logs, strict=True)}
        error = np.log(predicted(values, found) / measured)
        misfit = np.sign(error) * np.sqrt(weights * 2 * (np.sqrt(1 + (error / OUTLIER) ** 2) - 1))
        hosts = np.log(values[LAUNCHES[0]] / values[LAUNCHES[1]]) / hosts_differ
        return np.concatenate([misfit, HOLD * (logs - first), [hosts]])

    low, high = (np.log([getattr(knob, end) for knob in knobs]) for end in ("least", "most"))
    first = np.clip(np.log([start[knob.name] for knob in knobs]), low + 1e-6, high - 1e-6)
    best = least_squares(residuals, first, bounds=(low, high), diff_step=0.02, max_nfev=STEPS)
    return start | {knob.name: float(np.exp(log)) for knob, log in zip(knobs, best.x, strict=True)}


def fit(found: list[Case], start: Values, known: Container[str] = (), hosts_differ: float = HOST["default"]) -> Values:
    """Fit the constants of eager and of compiled programs, each to its own cases; `known` ones keep their values."""
    eager, compiled = ([case for case in found if case.software.scores is scores] for scores in (True, False))
    knobs = [knob for knob in EAGER_KNOBS if knob.name not in known]
    values = fitted(eager, knobs, start, hosts_differ) if eager else start
    return fitted(compiled, COMPILED_KNOBS, values) if compiled else values


def held_out(
    found: list[Case], everything: Values, ways: Iterable[str] = tuple(GROUPS), known: Container[str] = ()
) -> list[dict[str, object]]:
    """For each way to group the cases: the prediction of each case by a fit without its group."""
    rows: list[dict[str, object]] = []
    for way in ways:
        group_of = GROUPS[way]
        for group in dict.fromkeys(map(group_of, found)):
            out = [case for case in found if group_of(case) == group]
            kinds = {case.software.scores for case in out}
            rest = [case for case in found if group_of(case) != group and case.software.scores in kinds]
            values = fit(rest, everything, known)
            rows += [
                {"way": way, "group": group, "set": case.set, "case": case.name, "alternatives": case.group,
                 "tensor": case.layout.tensor, "measured": case.measured, "predicted": seconds,
                 "spread": spread(case, values)}
                for case, seconds in zip(out, predicted(values, out), strict=True)
            ]  # fmt: skip
            print(f"  {way:12} {group:16} {len(out):4} {scores(rows[-len(out) :])}", flush=True)
    return rows


def spread(case: Case, values: Values) -> float:
    """The logarithm of the upper end of the 80% range of a prediction, relative to the prediction."""
    parts, host_share = Parts(case.measured, *(0.0,) * 6), 0.0
    if not case.widths:
        step = Predictor(case.recipe, case.cluster, with_values(case.software, values)).step(case.layout)
        parts, host_share = step.parts(case.layout.partition), step.host_share()
    return float(np.log(range_of(case.cluster, {}, case.layout, parts, host_share).high / parts.total))


def coverage(rows: list[dict[str, object]]) -> str:
    """The share of cases inside their range, and the median half width of the ranges."""
    off = [abs(np.log(float(row["predicted"]) / float(row["measured"]))) for row in rows]
    widths = [float(row["spread"]) for row in rows]
    inside = np.mean([each <= width for each, width in zip(off, widths, strict=True)])
    return (
        f"{100 * inside:5.1f}% of {len(rows)} in their range, median width {100 * (np.exp(np.median(widths)) - 1):.1f}%"
    )


def scores(rows: Sequence[Mapping[str, object]]) -> str:
    """Error, rank correlation and regret of some predictions."""
    predicted, measured = ([float(row[key]) for row in rows] for key in ("predicted", "measured"))
    lost = regret([str(row["alternatives"]) for row in rows], predicted, measured)
    return f"{error(predicted, measured)}  rank {spearman(predicted, measured):5.2f}  regret {100 * lost:4.1f}%"


def by_set(found: list[Case], rows: list[dict[str, object]]) -> None:
    """Print the scores of each data set, with the shipped constants and without the group of a case."""
    for name in dict.fromkeys(case.set for case in found):
        inside = [case for case in found if case.set == name]
        every = zip(predicted(SHIPPED, inside), inside, strict=True)
        shipped = [{"predicted": each, "measured": case.measured, "alternatives": case.group} for each, case in every]
        print(f"{name:16} {'shipped':14} {len(inside):4} {scores(shipped)}")
        for way in GROUPS:
            print(f"{'':16} {way:14} {'':4} {scores([row for row in rows if (row['set'], row['way']) == (name, way)])}")


def coverages(rows: list[dict[str, object]]) -> None:
    """Print the coverage of the 80% ranges: by way to leave groups out, of all, and of sets of at least 20 cases."""
    for way in GROUPS:
        print(f"{way:16} {coverage([row for row in rows if row['way'] == way])}")
    print(f"{'all':16} {coverage(rows)}")
    for name in dict.fromkeys(str(row["set"]) for row in rows):
        if len(named := [row for row in rows if row["set"] == name]) >= 4 * 20:  # Each case counts in four ways.
            print(f"{name:16} {coverage(named)}")


def main() -> None:
    """Print the fit of all cases, and errors out of group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = cases(options.folder)
    values = fit(found, SHIPPED, hosts_differ=math.inf)  # Each host has runs of its own.
    print(f"{'constant':28} {'shipped':>10} {'fitted':>10}")
    for knob in KNOBS:
        print(f"{knob.name:28} {knob.shipped:10.4g} {values[knob.name]:10.4g}")
    print("\nerrors of cases whose group is not in the fit")
    rows = held_out(found, SHIPPED)
    print("the same with launch times as shipped")
    launches_known = held_out(found, SHIPPED, ("data set", "GPU"), LAUNCHES)
    for kind, each in (("launch times fitted", rows), ("as shipped", launches_known)):
        two = [row for row in each if row["tensor"] == 2]
        for way in dict.fromkeys(str(row["way"]) for row in two):
            print(f"tensor degree 2, {kind}, {way}: {scores([row for row in two if row['way'] == way])}")
    print("\nby data set, with all cases in the fit, and for each way to leave groups out")
    by_set(found, rows)
    print("\nout-of-group coverage of the 80% range")
    coverages(rows)
    memory_calibration.report(found)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
