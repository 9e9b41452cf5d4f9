"""Whether every layout learns what one device learns: the same steps on one, and shared by several.

    python benchmarks/layouts_alike.py              # over NCCL, on as many GPUs as there are
    python benchmarks/layouts_alike.py --tiny       # two processes on a CPU

Prints one line of JSON for each layout: the largest difference of a step's loss from one device's, relative to it, and
tokens a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from steelyard.core.run import Run
from steelyard.tokens.assemble import bin_path, write_index

RECIPE = """
[model]
family = "llama"
layers = {layers}
hidden = {hidden}
heads = 8
vocab = 1000
[data]
train = "tokens"
split = "100,0,0"
sequence_length = {length}
[train]
steps = {steps}
global_batch = 16
micro_batch = 1
precision = "{precision}"
[optim]
learning_rate = 1e-3
[log]
every = 1
[checkpoint]
every = 0
"""


def main() -> None:
    """Train on one device, then on all by each layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--precision", default="fp32")
    options = parser.parse_args()
    ranks = 2 if options.tiny else torch.cuda.device_count()
    if ranks < 2:
        parser.error("there are not two GPUs here; --tiny runs on a CPU")
    sizes = {"layers": 2, "hidden": 32, "length": 32, "steps": 2} if options.tiny else {
        "layers": 8, "hidden": 1024, "length": 1024, "steps": 20
    }  # fmt: skip
    layouts = [f"parallel.tensor={ranks}", "parallel.zero=1"]
    if not options.tiny:
        layouts += ["parallel.zero=0", "parallel.zero=2", "parallel.zero=3", f"parallel.pipeline={ranks}",
                    f"parallel.context={ranks}"]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="steelyard-layouts-") as name:
        folder = Path(name)
        (folder / "alike.toml").write_text(RECIPE.format(precision=options.precision, **sizes))
        random = np.random.RandomState(0)
        lengths = np.full(200, 4 * sizes["length"], dtype=np.int32)
        bin_path(folder / "tokens").write_bytes(random.randint(0, 1000, lengths.sum()).astype(np.uint16).tobytes())
        write_index(str(folder / "tokens"), lambda: iter([lengths]), np.dtype(np.uint16))
        device = "cpu" if options.tiny else "cuda"
        alone, _ = trained(folder, "one device", 1, device)
        for layout in layouts:
            losses, speed = trained(folder, layout, ranks, device, layout)
            apart = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
            print(json.dumps({"what": layout, "ranks": ranks, "difference": apart, "tokens_per_second": speed}))


def trained(folder: Path, name: str, ranks: int, device: str, *words: str) -> tuple[list[float], float]:
    """Losses by step, and the last record's tokens a second."""
    path = folder / name.replace(" ", "-").replace("=", "-")
    command = [sys.executable, "-m", "steelyard", "train", "alike.toml", f"train.device={device}", *words]
    subprocess.run([*command, "--run", str(path), "--nproc", str(ranks)], cwd=folder, check=True, stdout=sys.stderr)
    records = [record for record in Run.open(path).metrics() if "loss" in record]
    return [record["loss"] for record in records], records[-1]["tokens_per_second"]


if __name__ == "__main__":
    main()
