"""The overhead of parallelizing a step over eight ranks on a CPU, in total CPU time of all ranks.

    python benchmarks/layouts.py [WORD ...]     all layouts, or those with one of the words in their name

Each layout runs the same steps of a small Llama. With fewer cores than ranks, wall time is not meaningful, since ranks
wait for a core. So the CPU time of all ranks in a step is compared with that of a single rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import torch

from steelyard.core.recipe import Recipe
from steelyard.parallel import mesh as meshes
from steelyard.parallel.world import init_distributed
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

LENGTH, BATCH, WARM_UP, STEPS = 128, 16, 2, 5
SHAPE = {"family": "llama", "layers": 8, "hidden": 256, "heads": 8, "vocab": 4096}
LAYOUTS = {
    "one rank": {},
    "data 8, zero 0": {"data": 8, "zero": 0},
    "data 8, zero 1": {"data": 8, "zero": 1},
    "data 8, zero 3": {"data": 8, "zero": 3},
    "tensor 8": {"tensor": 8},
    "tensor 8, sequence parallel": {"tensor": 8, "sequence_parallel": True},
    "pipeline 8, 1f1b": {"pipeline": 8},
    "context 8": {"context": 8},
    "data 2 x tensor 2 x pipeline 2, zero 1": {"data": 2, "tensor": 2, "pipeline": 2, "zero": 1},
}


def main() -> None:
    """Measure the selected layouts and print a table; as a rank of a layout, run its steps."""
    if "LAYOUT" in os.environ:
        rank(os.environ["LAYOUT"])
        return
    words = sys.argv[1:]
    alone = 0.0
    print("| layout | CPU seconds per step, all ranks | relative to one rank |\n|---|---|---|")
    for what, parallel in LAYOUTS.items():
        if not words or what == "one rank" or any(word in what for word in words):
            seconds = measured(what, 8 if parallel else 1)
            alone = alone or seconds
            print(f"| {what} | {seconds:.3f} | {seconds / alone:.2f} |", flush=True)


def measured(what: str, ranks: int) -> float:
    """CPU seconds of a step, summed over all ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--master-port=29571",
        __file__,
    ]
    environment = os.environ | {"LAYOUT": what, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(answer.stdout)


def rank(what: str) -> None:
    """Run the steps of one rank."""
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(
        {
            "name": "layouts",
            "model": SHAPE,
            "data": {"sequence_length": LENGTH},
            "train": {"global_batch": BATCH, "device": "cpu"},
            "parallel": LAYOUTS[what],
        }
    )
    with init_distributed("cpu", 10.0) as world:
        mesh = meshes.make(recipe.parallel, "cpu")
        engine = Engine(recipe, mesh, torch.device("cpu"), Extension(), None)
        engine.initialise()
        rows = np.random.RandomState(0).randint(0, SHAPE["vocab"], (BATCH, LENGTH + 1))
        rows = np.split(rows, mesh.data.size)[mesh.data.index]
        for step in range(WARM_UP + STEPS):
            if step == WARM_UP:
                before = time.process_time()
            engine.step(columns(rows), 0, 1e-3, BATCH * LENGTH, 1.0)
        spent = torch.tensor((time.process_time() - before) / STEPS, dtype=torch.float64)
        if world.size > 1:
            torch.distributed.all_reduce(spent)
        if world.is_rank0:
            print(spent.item())


if __name__ == "__main__":
    main()
