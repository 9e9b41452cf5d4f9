"""Fit the planner's calibrated constants to measured steps, and predict groups of steps that a fit did not see.

    python benchmarks/plan_calibration.py FOLDER [--out ERRORS.json]

Prints each shipped constant beside its fit to all steps, and then errors with and without the group of a step in the
fit: one fit for each data set, GPU, tensor degree and cluster size that is left out. Without a data set or a GPU, the
errors are also printed for hosts whose launch times are known. `--out` writes all predictions.
The constants are those of docs/plan.md that are marked as calibrated. Nothing here changes what a user gets:
`plan_accuracy.py` scores the shipped constants.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from measured_steps import Case, cases
from scipy.optimize import least_squares

from steelyard.planning import cluster, communication, compute
from steelyard.planning.cost_table import Parts
from steelyard.planning.predict import Predictor
from steelyard.planning.software import ASYNC_TP, DEEPSPEED, MEGATRON, STEELYARD, TORCHTITAN, Software
from steelyard.planning.uncertainty import HOST, range_of

# Shares of the fit. Cases of a set divide the set's share, so that large sets do not decide alone. Sailor's RTX nodes
# have none: their links are not published, and shares of links that the planner assumes would be fitted to them.
SHARES = {"vtrain single": 12, "vtrain multi": 4, "amp t4": 1.5, "amp v100+t4": 2.5, "sailor gh200": 1,
          "korthikanti": 0.5, "FASOP example": 0.4, "torchtitan": 10, "own engine": 3}  # fmt: skip
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


def fitted(found: list[Case], knobs: list[Knob], start: Values) -> Values:
    """Values that fit the cases best, starting at `start`."""
    found = [case for case in found if case.set in SHARES]
    names = [case.set for case in found]
    weights = np.array([SHARES[name] / names.count(name) for name in names])
    measured = np.array([case.measured for case in found])

    def residuals(logs: np.ndarray) -> np.ndarray:
        values = start | {knob.name: float(np.exp(log)) for knob, log in zip(knobs, logs, strict=True)}
        error = np.log(predicted(values, found) / measured)
        misfit = np.sign(error) * np.sqrt(weights * 2 * (np.sqrt(1 + (error / OUTLIER) ** 2) - 1))
        hosts = np.log(values[LAUNCHES[0]] / values[LAUNCHES[1]]) / HOST["default"]
        return np.concatenate([misfit, HOLD * (logs - first), [hosts]])

    low, high = (np.log([getattr(knob, end) for knob in knobs]) for end in ("least", "most"))
    first = np.clip(np.log([start[knob.name] for knob in knobs]), low + 1e-6, high - 1e-6)
    best = least_squares(residuals, first, bounds=(low, high), diff_step=0.02, max_nfev=STEPS)
    return start | {knob.name: float(np.exp(log)) for knob, log in zip(knobs, best.x, strict=True)}


def fit(found: list[Case], start: Values, known: Container[str] = ()) -> Values:
    """Fit the constants of eager and of compiled programs, each to its own cases; `known` ones keep their values."""
    eager, compiled = ([case for case in found if case.software.scores is scores] for scores in (True, False))
    values = fitted(eager, [knob for knob in EAGER_KNOBS if knob.name not in known], start) if eager else start
    return fitted(compiled, COMPILED_KNOBS, values) if compiled else values


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
                {"way": way, "group": group, "set": case.set, "case": case.name, "tensor": case.layout.tensor,
                 "measured": case.measured, "predicted": seconds, "spread": spread(case, values)}
                for case, seconds in zip(out, predicted(values, out), strict=True)
            ]  # fmt: skip
            print(f"  {way:12} {group:16} {len(out):4} {_error(rows[-len(out) :])}", flush=True)
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


def _error(rows: list[dict[str, object]]) -> str:
    error = np.array([float(row["predicted"]) / float(row["measured"]) - 1 for row in rows])
    return f"{100 * np.abs(error).mean():6.2f}%  bias {100 * error.mean():+6.1f}%"


def main() -> None:
    """Print the fit of all cases, and errors out of group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = cases(options.folder)
    values = fit(found, SHIPPED)
    print(f"{'constant':28} {'shipped':>10} {'fitted':>10}")
    for knob in KNOBS:
        print(f"{knob.name:28} {knob.shipped:10.4g} {values[knob.name]:10.4g}")
    print("\nerrors of cases whose group is not in the fit")
    rows = held_out(found, SHIPPED)
    print("the same with launch times as shipped")
    launches_known = held_out(found, SHIPPED, ("data set", "GPU"), LAUNCHES)
    for kind, each in (("launch times fitted", rows), ("as shipped", launches_known)):
        two = [row for row in each if row["tensor"] == 2]
        ways = dict.fromkeys(str(row["way"]) for row in two)
        print("tensor degree 2,", kind, *(f"| {way} {_error([r for r in two if r['way'] == way])}" for way in ways))
    print("\nby data set, for each way to leave groups out, and with all cases in the fit")
    for name in dict.fromkeys(case.set for case in found):
        every = predicted(SHIPPED, inside := [case for case in found if case.set == name])
        shipped = [{"predicted": each, "measured": case.measured} for each, case in zip(every, inside, strict=True)]
        print(f"{name:16} shipped {_error(shipped)}", *(
            f"| {way} {_error([row for row in rows if row['set'] == name and row['way'] == way])}" for way in GROUPS
        ))  # fmt: skip
    print("\nout-of-group coverage of the 80% range")
    for way in GROUPS:
        print(f"{way:16} {coverage([row for row in rows if row['way'] == way])}")
    for name in dict.fromkeys(case.set for case in found):
        if len(named := [row for row in rows if row["set"] == name]) >= 4 * 20:  # Each case counts in four ways.
            print(f"{name:16} {coverage(named)}")
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
