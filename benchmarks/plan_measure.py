"""Predicted and measured memory and compute of one rank of twelve layouts of three models, on this GPU.

    python benchmarks/plan_measure.py --out plan_measure.json       # one GPU of about 140 GB, under 4 minutes
    python benchmarks/plan_measure.py --tiny                        # a CPU: small models, checks only that it runs

Each case runs `steelyard plan measure` in this process: the rank's stages, shards and batch on fake process groups,
real steps. The bars are 3% of memory and 5% of compute seconds. `--only 3,5` runs some cases, `--limit SECONDS` skips
the cases that would start later. `operation_us` is what the host takes for one small operation, which the prediction
uses: cases that the host limits differ by it between machines.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from steelyard.core.recipe import load_recipe
from steelyard.observe.profile import trace_cache
from steelyard.observe.profile.summary import short
from steelyard.planning import measured_ranks
from steelyard.planning.plan_report import table
from steelyard.training import rank_measure

MEMORY_BAR, COMPUTE_BAR = 0.03, 0.05


class Case(NamedTuple):
    """One rank of a layout."""

    model: str
    world: int
    rank: int
    overrides: tuple[str, ...]


def case(model: str, world: int, rank: int, batch: int, *overrides: str) -> Case:
    """A case with a global batch."""
    return Case(model, world, rank, (f"train.global_batch={batch}", *overrides))


MODELS = {
    "llama3.2-1b": ("train.micro_batch=4",),
    "gpt2-small": ("train.micro_batch=32",),
    "qwen3-30b-a3b": ("train.micro_batch=2", "model.layers=4"),
}
CASES = [
    case("llama3.2-1b", 1, 0, 4),
    case("llama3.2-1b", 1, 0, 4, "train.precision=fp8"),
    case("llama3.2-1b", 8, 0, 32, "parallel.zero=3"),
    case("llama3.2-1b", 512, 7, 4096, "parallel.zero=1"),
    case("llama3.2-1b", 2, 1, 4, "parallel.tensor=2"),
    case("llama3.2-1b", 8, 0, 32, "parallel.zero=3", "train.precision=fp8"),
    case("llama3.2-1b", 4, 0, 16, "parallel.pipeline=4"),
    case("llama3.2-1b", 4, 3, 16, "parallel.pipeline=4"),
    case("gpt2-small", 1, 0, 32),
    case("gpt2-small", 64, 5, 4096, "parallel.zero=2"),
    case("qwen3-30b-a3b", 8, 0, 16, "parallel.zero=3"),
    case("qwen3-30b-a3b", 8, 0, 16, "parallel.zero=1", "parallel.expert=8"),
]
TINY = (
    "model.layers=4", "model.hidden=64", "model.heads=4", "model.ffn=128", "model.vocab=512",
    "data.sequence_length=64", "train.precision=fp32", "train.device=cpu",
)  # fmt: skip
TINY_OF = {
    "llama3.2-1b": ("model.kv_heads=2",),
    "gpt2-small": (),
    "qwen3-30b-a3b": (
        "model.kv_heads=2", "model.head_dim=16", "model.experts=8", "model.experts_per_token=2", "model.expert_ffn=32",
    ),
}  # fmt: skip


def main() -> None:
    """Run the cases, and print each as a line of JSON, then a table and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models on a CPU")
    parser.add_argument("--only", help="numbers of cases, such as 0,3")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no case starts")
    parser.add_argument("--profile", action="store_true", help="also profile one step of each case")
    parser.add_argument("--out", type=Path, help="also write the JSON here, after every case")
    options = parser.parse_args()
    chosen = range(len(CASES)) if options.only is None else [int(each) for each in options.only.split(",")]
    began, rows = time.monotonic(), []
    for number in chosen:
        if time.monotonic() - began > options.limit:
            break
        rows.append(measured(number, CASES[number], options.tiny, options.steps, options.profile))
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps({"cases": rows}, indent=1))
    print(table(as_rows(rows)))
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, **summary(rows)}))


def measured(number: int, each: Case, tiny: bool, steps: int, is_profiled: bool) -> dict[str, Any]:
    """The row of one case."""
    # A CPU has no fp8: tiny cases compute in fp32, and their rows must not claim otherwise.
    own = [key for key in each.overrides if not (tiny and key.startswith("train.precision="))]
    overrides = [*MODELS[each.model], *own, *((*TINY, *TINY_OF[each.model]) if tiny else ())]
    row: dict[str, Any] = {"case": number, "model": each.model, "world": each.world, "rank": each.rank,
                           "overrides": own}  # fmt: skip
    began = time.monotonic()
    try:
        recipe = load_recipe(each.model, overrides)
        with tempfile.TemporaryDirectory() as folder:
            traces = Path(folder) if is_profiled else None
            found = rank_measure.measure(recipe, each.world, [each.rank], steps, traces=traces)
            if traces is not None:
                row["profile"] = profile(traces)
        result = measured_ranks.with_prediction(found, recipe)
    except Exception as error:  # The other cases still run.
        traceback.print_exc()
        return row | {"failed": f"{type(error).__name__}: {error}"[:2000]}
    keys = ("peak_bytes", "predicted_bytes", "memory_error", "compute_seconds", "predicted_compute_seconds",
            "compute_error", "seconds", "predicted_seconds", "step_seconds", "fill_seconds", "reserved_bytes",
            "expert_load", "predicted_bytes_by_kind")  # fmt: skip
    took = round(time.monotonic() - began, 1)
    found = {key: result["ranks"][0][key] for key in keys}
    return row | found | {"device": result["device"], "operation_us": result["host"]["operation_us"], "took": took}


def profile(traces: Path) -> dict[str, Any]:
    """Milliseconds of the profiled step, and those in which the GPU was busy; its kernels."""
    looks, problems = trace_cache.read_all(trace_cache.traces_in(traces))
    if not looks:
        return {"problems": problems}
    [look] = looks
    kernels = [[short(each.name), each.count, round(1e3 * each.amount, 3)] for each in look.kernels]
    times = {"step": look.seconds, "busy": look.busy, **{f"idle in {k}": v for k, v in look.idle_by_part.items()}}
    return {"milliseconds": {name: round(1e3 * seconds, 2) for name, seconds in times.items()}, "kernels": kernels}


def as_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of the table."""
    lines = [["case", "model", "ranks", "layout", "GiB predicted", "measured", "error", "ms predicted", "measured",
              "error", "took"]]  # fmt: skip
    for row in rows:
        head = [str(row["case"]), row["model"], str(row["world"]), " ".join(row["overrides"])]
        if "failed" in row:
            lines.append([*head, f"failed: {row['failed'][:80]}", *[""] * 6])
            continue
        sizes = [f"{row[key] / 2**30:.2f}" for key in ("predicted_bytes", "peak_bytes")]
        times = [f"{1e3 * row[key]:.1f}" for key in ("predicted_compute_seconds", "compute_seconds")]
        errors = [f"{100 * row[key]:+.1f}%" for key in ("memory_error", "compute_error")]
        lines.append([*head, *sizes, errors[0], *times, errors[1], f"{row['took']} s"])
    return lines


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Cases within the bars."""
    good = [row for row in rows if "failed" not in row]
    return {
        "failed": len(rows) - len(good),
        "memory_within_bar": sum(abs(row["memory_error"]) <= MEMORY_BAR for row in good),
        "compute_within_bar": sum(abs(row["compute_error"]) <= COMPUTE_BAR for row in good),
        "worst_memory_error": max((abs(row["memory_error"]) for row in good), default=None),
        "worst_compute_error": max((abs(row["compute_error"]) for row in good), default=None),
    }


if __name__ == "__main__":
    main()
