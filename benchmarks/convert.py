"""Time of a checkpoint conversion compared with a plain copy of the same bytes, and its peak memory.

    python benchmarks/convert.py [--layers 2] [--folder DIR] [--repeats 3]

Weights of the Llama 3.1 70B config at reduced depth are written once as a Hugging Face folder. Then, alternating, the
folder is copied (in blocks of 16 MiB, synced like ours) and converted to Megatron with TP8 x PP2, each in a separate
process whose peak memory is read from the system. The largest tensor does not grow with depth, so neither does the
peak. The ratios of the medians and of the fastest runs are printed, since other processes on the machine slow both.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

COPY = """
import os, sys
from pathlib import Path
source, target = map(Path, sys.argv[1:])
target.mkdir()
for file in source.iterdir():
    with open(file, "rb", buffering=0) as reading, open(target / file.name, "wb", buffering=0) as writing:
        while block := reading.read(1 << 24):
            writing.write(block)
        os.fsync(writing.fileno())
"""
CONVERT = """
import sys
from pathlib import Path
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
import time
started = time.perf_counter()
convert(open_source(sys.argv[1]), Path(sys.argv[2]), Target("megatron", MegatronLayout(8, 2)))
print("seconds", time.perf_counter() - started)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("bench-convert"))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    source = options.folder / f"llama-70b-{options.layers}-layers"
    if not source.exists():
        generate(source, options.layers)
    size = sum(file.stat().st_size for file in source.iterdir())
    times: dict[str, list[float]] = {"copy": [], "convert": []}
    memory = 0.0
    for _ in range(options.repeats):
        for name, program in (("copy", COPY), ("convert", CONVERT)):
            target = options.folder / name
            shutil.rmtree(target, ignore_errors=True)
            seconds, peak = measured(program, source, target)
            times[name].append(seconds)
            if name == "convert":
                memory = max(memory, peak)
            shutil.rmtree(target)
    median = {name: statistics.median(values) for name, values in times.items()}
    result = {
        "bytes": size,
        "seconds": times,
        "ratio": median["convert"] / median["copy"],
        "ratio_of_fastest": min(times["convert"]) / min(times["copy"]),
        "peak_GiB": memory,
    }
    print(json.dumps(result, indent=2))


def generate(folder: Path, layers: int) -> None:
    """Write random bf16 weights, tensor by tensor."""
    import torch

    from steelyard.checkpoint.formats import hf_config, safetensors
    from steelyard.checkpoint.formats.key_mapping import hugging_face, theirs_size
    from steelyard.checkpoint.formats.source import expected_sizes
    from steelyard.core.recipe import load_recipe

    shape = load_recipe("llama3.1-70b").model.model_copy(update={"layers": layers})
    sizes = {entry.name: theirs_size(entry, expected_sizes(shape)) for entry in hugging_face(shape)}
    folder.mkdir(parents=True)
    noise = torch.randn(1 << 22).to(torch.bfloat16)
    tensors = (noise.repeat(-(-math.prod(size) // len(noise)))[: math.prod(size)].view(size) for size in sizes.values())
    sum(safetensors.write(folder / "model.safetensors", sizes, torch.bfloat16, tensors))
    (folder / "config.json").write_text(json.dumps(hf_config.config_to_hf(shape, torch.bfloat16, {})))


def measured(program: str, source: Path, target: Path) -> tuple[float, float]:
    """Seconds without imports, if the program prints them, and peak memory in GiB."""
    started = time.perf_counter()
    wrapped = program + "\nimport resource\nprint('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)"
    done = subprocess.run([sys.executable, "-c", wrapped, str(source), str(target)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    seconds = time.perf_counter() - started
    printed = dict(line.split() for line in done.stdout.splitlines())
    return float(printed.get("seconds", seconds)), float(printed["peak"])


if __name__ == "__main__":
    main()
