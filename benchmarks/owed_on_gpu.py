"""Runs the GPU measurements that are still missing (docs/roadmap.md), most important first, each with a time limit.

    THERE/python benchmarks/owed_on_gpu.py --out owed.json --kit THERE    # THERE: what `gpu_kit.py` collected
    python benchmarks/owed_on_gpu.py --out tiny.json --tiny               # its programs on a CPU, in about two minutes

Each measurement is a program in this folder, or a command of Steelyard. Its output is written to --out after every
line, by rename, so that an interruption (the end of a lease, a kill) loses nothing. The same command continues with the
measurements that --out does not have, and makes files that a new machine lacks again. --minutes is a time limit:
measurements that would exceed it are not started. A measurement that fails or times out is recorded, and the next one
starts.

--out is JSON: {"device", "versions", "steps": [{"name", "command", "page", "bar", "begun", "seconds", "state",
"reached", "lines", "tail"}]}. `state` is running, done, failed, out of time or left out (and why); `lines` are the
objects that the program printed; `reached` says whether they reach the bar, if the bar is a number.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

from slices import Record, device, versions  # noqa: E402

PAGE = "docs/benchmarks.md"  # where results are written
# The best settings so far, for 8 x 1,024 tokens per step.
SETTINGS = (
    "train.global_batch=8 train.cuda_graph=true optim.eps=1e-8 optim.weight_decay=0 optim.warmup_share=0.05 "
    "optim.min_learning_rate=0"
)
LEARNED = (
    f"{SETTINGS} optim.learning_rate=1e-3 sparsity.learning_rate_multiplier=1.0 sparsity.distill=3.0 "
    "sparsity.weight_reg=[0.0,0.0]"
)
JOINT = f"{SETTINGS} optim.learning_rate=1.6e-3 sparsity.distill=1.0"

Lines = list[dict[str, Any]]
TAIL = 4000
PACKAGES = ("torch", "triton", "transformers", "trl", "liger_kernel", "flash_attn")


@dataclass(frozen=True)
class Step:
    """One measurement."""

    name: str
    command: list[str]
    page: str
    bar: str
    limit: int
    """Seconds."""
    reached: Callable[[Lines], bool | None]
    lacks: str | None = None
    """A missing requirement."""
    makes: Path | None = None
    """A file that later steps read. The step is run where it is missing."""


def main() -> None:
    """Run the remaining steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kit", type=Path, help="the unpacked folder of benchmarks/gpu_kit.py")
    parser.add_argument("--only", nargs="*", help="names of steps")
    parser.add_argument("--again", action="store_true", help="also run steps again that failed or timed out")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    steps = tiny() if options.tiny else whole(options)
    if options.only:
        unknown = set(options.only) - {step.name for step in steps}
        if unknown:
            parser.error(f"unknown step {', '.join(sorted(unknown))}; known: {', '.join(step.name for step in steps)}")
        steps = [step for step in steps if step.name in options.only]
    end = time.monotonic() + 60 * options.minutes
    record = Record(options.out, "steps", device=device(), versions=versions(*PACKAGES))
    for step in steps:
        if not is_due(step, record, options.again):
            continue
        if step.lacks is not None:
            put(record, step, state=f"left out: {step.lacks}")
        elif time.monotonic() + step.limit > end:
            print(f"{step.name} may take {step.limit} s, more than the time left: not started", flush=True)
        else:
            take(step, record)
    print(table(record), flush=True)


def is_due(step: Step, record: Record, again: bool) -> bool:
    """Whether a step is run: what it makes is missing, or else as the record says."""
    return record.is_due(step.name, again) if step.makes is None else not step.makes.exists()


def whole(options: argparse.Namespace) -> list[Step]:
    """The missing measurements, most important first."""
    kit = options.kit
    lacks = None if kit else "no --kit"
    names = "smollm2.gguf", "smollm2", "prior.mask", "corpus", "train_text_document"
    gguf, model, prior, corpus, train = (str(Path(kit or "kit", name)) for name in names)
    masks = ["mask_quality.py", model, "--corpus", corpus, "--part", "validation", "--prior", prior, "--steps", "1000",
             "--micro-batch", "8", "--tokens", train]  # fmt: skip
    calibration = ["--calibration", corpus + "/train.jsonl.zst", "--samples", "128", "--sequence-length", "1024"]
    return [
        Step("plan-measure", ["plan_measure.py", "--profile", "--limit", "300"], PAGE,
             "12 of 12 within 3% of memory, 5% of compute", 420,
             lambda lines: lines[-1]["memory_within_bar"] == lines[-1]["compute_within_bar"] == 12),
        Step("model", ["steelyard", "checkpoint", "convert", gguf, model, "--to", "hf", "--json"], PAGE, "", 60,
             lambda lines: None, lacks, Path(model)),
        Step("prior", ["steelyard", "prune", model, prior, "--method", "sparsegpt", "--save", "mask", *calibration,
             "--json"], PAGE, "", 180, lambda lines: None, lacks, Path(prior)),
        Step("masks", [*masks, "--try", LEARNED], PAGE, "1.06 x dense on the test part", 180,
             lambda lines: worst(lines, "learned") <= 1.06, lacks),
        Step("joint", [*masks, "--method", "joint", "--try", JOINT], PAGE, "1.04 x dense on the test part", 240,
             lambda lines: worst(lines, "joint") <= 1.04, lacks),
        Step("train-llama", ["train_speed.py", "llama", "train.tune_kernels=true", "--precision", "bf16", "fp8",
             "--floor"], PAGE, "0.87 of the floor; fp8 80,000 tokens/s", 300,
             lambda lines: value(lines, "steelyard fp8", "tokens_per_second") >= 80_000),
        Step("train-gpt2", ["train_speed.py", "gpt2", "train.tune_kernels=true", "--floor"], PAGE,
             "580,000 tokens/s", 240, lambda lines: value(lines, "steelyard bf16", "tokens_per_second") >= 580_000),
        Step("memory-checkpoint", ["memory_checkpoint.py", "--rounds", "5"], PAGE, "1% of the step time", 240,
             lambda lines: None),
        Step("mask-quality", ["mask_quality.py", model, "--corpus", corpus, "--tokens", train], PAGE,
             "learned masks within 1.2 x dense", 540, quality, lacks),
        Step("sft-135m", ["sft.py", "--shape", "smollm2-135m"], PAGE, "1.3 x TRL", 240,
             lambda lines: ratio(lines, "steelyard", "trl") >= 1.3),
    ]  # fmt: skip


def tiny() -> list[Step]:
    """The programs at small size, as a smoke test."""
    commands = {
        "plan-measure": ["plan_measure.py", "--tiny", "--only", "0,9,11", "--profile"],
        "mask-quality": ["mask_quality.py", "--tiny", "--try", "optim.eps=1e-8"],
        "sft-135m": ["sft.py", "--tiny", "--steps", "10", "--length", "128", "--micro-batch", "2"],
        "train": ["train_speed.py", "tiny", "--precision", "fp32", "--steps", "1"],
        "memory-checkpoint": ["memory_checkpoint.py", "--tiny"],
    }
    return [Step(name, command, "", "it runs", 240, lambda lines: None) for name, command in commands.items()]


def take(step: Step, record: Record) -> None:
    """Run a measurement. Its lines are recorded at once, and it is killed with its children at the time limit."""
    program, *rest = step.command
    words = [sys.executable, *(("-m", program) if program == "steelyard" else (str(HERE / program),)), *rest]
    print(f"--- {step.name}: {' '.join(words[1:])}", flush=True)
    begun, lines, tail = time.monotonic(), [], ""
    reported: dict[str, Any] = {"begun": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    put(record, step, state="running", **reported)
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(step.limit, stop)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            tail = (tail + line)[-TAIL:]
            if (found := parsed(line)) is not None:
                lines.append(found)
                put(record, step, state="running", lines=lines, seconds=round(time.monotonic() - begun, 1), **reported)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    state = "out of time" if is_late.is_set() else "done" if code == 0 else f"failed: {code}"
    reported |= {"seconds": round(time.monotonic() - begun, 1), "lines": lines, "tail": tail}
    put(record, step, state=state, reached=verdict(step, lines), **reported)


def put(record: Record, step: Step, **reported: Any) -> None:
    """Record the current state of a step."""
    record.put({"name": step.name, "command": step.command, "page": step.page, "bar": step.bar, **reported})


def table(record: Record) -> str:
    """All steps as a text table."""
    rows = [f"{'step':16} {'state':28} {'seconds':>8}  reached  bar"]
    for each in record.known["steps"]:
        reached = {True: "yes", False: "no", None: "-"}[each.get("reached")]
        rows.append(f"{each['name']:16} {each['state']:28} {each.get('seconds', 0):8.1f}  {reached:7}  {each['bar']}")
    return "\n".join(rows)


def parsed(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def verdict(step: Step, lines: Lines) -> bool | None:
    """Whether the bar was reached; None if a number is missing."""
    try:
        return step.reached(lines)
    except (LookupError, StopIteration, TypeError, ValueError, ZeroDivisionError):
        return None


def value(lines: Lines, what: str, key: str) -> float:
    """A number from the line with this `what`."""
    return float(next(line[key] for line in lines if line.get("what") == what))


def ratio(lines: Lines, ours: str, theirs: str) -> float:
    """Our tokens per second divided by theirs."""
    return value(lines, ours, "tokens_per_second") / value(lines, theirs, "tokens_per_second")


def worst(lines: Lines, method: str) -> float:
    """The largest perplexity of a method's rows, relative to the dense model."""
    return max(float(line["times_dense"]) for line in lines if line["what"].startswith(method))


def quality(lines: Lines) -> bool:
    """The best learned mask counts, and must be better than SparseGPT with weight updates."""
    best = min(line["perplexity"] for line in lines if line["what"].startswith("learned"))
    return best <= 1.2 * value(lines, "dense", "perplexity") and best < value(lines, "sparsegpt", "perplexity")


if __name__ == "__main__":
    main()
