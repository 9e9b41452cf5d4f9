"""What sharing a step among eight ranks costs on a CPU, in processor time of all ranks together.

    python benchmarks/layouts.py

Each layout trains the same small Llama for a few and for more steps; the difference, which start-up does not enter, is
compared with one rank's. With fewer cores than ranks wall time says little: ranks wait for each other's turns.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from steelyard.tokens.assemble import write_index
from steelyard.tokens.indexed import bin_path, token_dtype

VOCAB, LENGTH = 4096, 128
RECIPE = f"""
[model]
family = "llama"
layers = 8
hidden = 256
heads = 8
vocab = {VOCAB}
[data]
train = "tokens"
split = "100"
sequence_length = {LENGTH}
[train]
global_batch = 16
micro_batch = 1
device = "cpu"
[checkpoint]
every = 0
background = false
"""
LAYOUTS = {
    "one rank": (1, ""),
    "data 8, zero 0": (8, "parallel.zero=0"),
    "data 8, zero 1": (8, "parallel.zero=1"),
    "data 8, zero 3": (8, "parallel.zero=3"),
    "tensor 8": (8, "parallel.tensor=8"),
    "tensor 8, sequence parallel": (8, "parallel.tensor=8 parallel.sequence_parallel=true"),
    "pipeline 8, 1f1b": (8, "parallel.pipeline=8"),
    "pipeline 8, zero bubble": (8, "parallel.pipeline=8 parallel.schedule=zero-bubble"),
    "context 8": (8, "parallel.context=8"),
    "data 2 x tensor 2 x pipeline 2, zero 1": (8, "parallel.tensor=2 parallel.pipeline=2 parallel.zero=1"),
}
FEW, MORE = 3, 13


def main() -> None:
    """Measure all layouts and print a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        alone = None
        print("| layout | CPU seconds per step | of one rank's |\n|---|---|---|")
        for what, (ranks, overrides) in LAYOUTS.items():
            seconds = per_step(folder, ranks, overrides.split())
            alone = alone or seconds
            print(f"| {what} | {seconds:.3f} | {seconds / alone:.2f} |", flush=True)


def prepare(folder: Path) -> None:
    """Token files and a recipe."""
    tokens = np.random.RandomState(0).randint(0, VOCAB, 200 * LENGTH).astype(token_dtype(VOCAB))
    bin_path(folder / "tokens").write_bytes(tokens.tobytes())
    lengths = np.full(100, 2 * LENGTH, dtype=np.int32)
    write_index(str(folder / "tokens"), lambda: iter([lengths]), token_dtype(VOCAB))
    (folder / "bench.toml").write_text(RECIPE)


def per_step(folder: Path, ranks: int, overrides: list[str]) -> float:
    """Processor seconds of a step, all ranks together."""
    few, more = (cost(folder, ranks, overrides, steps) for steps in (FEW, MORE))
    return (more - few) / (MORE - FEW)


def cost(folder: Path, ranks: int, overrides: list[str], steps: int) -> float:
    """Processor seconds of a whole run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "steelyard", "train", "bench.toml", f"train.steps={steps}", *overrides]
    command += ["--run", f"runs/{ranks}-{steps}-{len(overrides)}-{abs(hash(tuple(overrides)))}", "--quiet"]
    command += ["--nproc", str(ranks)] if ranks > 1 else []
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
