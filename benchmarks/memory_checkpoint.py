"""What memory checkpoints cost a step on one GPU: the copies to the host alone, and with the write to tmpfs.

    python benchmarks/memory_checkpoint.py                      # Llama 3.2 1B, checkpoint.memory_every=20
    python benchmarks/memory_checkpoint.py --device-gib 6       # a part of the state is cloned on the device first
    python benchmarks/memory_checkpoint.py --tiny               # a CPU: only whether it runs

Rounds of `--every` steps are timed in turns: without a copy, with the copies to pinned memory, and with all of a memory
checkpoint, whose files a thread writes while the steps run. Every round begins and ends with an idle device; the median
round of each kind counts. The copies are compared with their sources once, not timed. A peer copy sends a rank's file
to another node; the bandwidth is what it needs to end before the next memory checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from train_speed import SHAPES, data

from steelyard.checkpoint.host_staging import HostStaging
from steelyard.checkpoint.memory_save import MemorySaver
from steelyard.core.recipe import load_recipe
from steelyard.parallel import mesh
from steelyard.parallel.world import World
from steelyard.sizes.gpu_catalogue import GIB
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

STATE = {"samples": 0, "tokens": 0, "schedule_steps": 0, "schedule_samples": 0}


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as train.micro_batch=8")
    parser.add_argument("--every", type=int, help="checkpoint.memory_every; by default 20")
    parser.add_argument("--rounds", type=int, help="rounds of each kind; by default 5")
    parser.add_argument("--device-gib", type=float, default=0.0, help="checkpoint.memory_device_gib")
    parser.add_argument("--memory-dir", default="/dev/shm")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.every = options.every or (2 if options.tiny else 20)
    options.rounds = options.rounds or (1 if options.tiny else 5)
    name, overrides = SHAPES["tiny" if options.tiny else "llama"]
    recipe = load_recipe(
        name, [*overrides, f"train.precision={'fp32' if options.tiny else 'bf16'}", *options.overrides]
    )
    device = torch.device("cpu" if options.tiny else "cuda")
    engine = Engine(recipe, mesh.alone(), device, Extension(), None)
    engine.initialise()
    batches, labels = data(recipe), recipe.train.global_batch * recipe.data.sequence_length
    loss = torch.zeros(())

    def steps(number: int) -> None:
        nonlocal loss
        for _ in range(number):
            loss = engine.step(columns(next(batches)), 0, 1e-4, labels, 1.0)[0]

    took = timed(lambda: steps(5), device)
    print(f"first steps: {took:.2f} s", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=options.memory_dir, prefix="steelyard-") as folder:
        saver = MemorySaver(Path(folder) / "run", World(), int(options.device_gib * GIB))
        engine.before_update = saver.staging.before_update
        seconds_of = {"pin": timed(lambda: check(saver.staging, engine), device)}
        seconds_of["d2h"] = statistics.median(timed(lambda: copied(saver.staging, engine), device) for _ in range(3))
        print(f"first copy: {seconds_of['pin']:.2f} s, copy: {seconds_of['d2h']:.2f} s", file=sys.stderr, flush=True)
        rounds: dict[str, list[float]] = {"without": [], "copies": [], "all": []}
        wrote: list[float] = []
        for number in range(options.rounds):
            for kind, times in rounds.items():
                loss.item()
                began = time.perf_counter()
                begin(kind, saver, engine, number)
                steps(options.every)
                synchronize(device)
                ended = time.perf_counter()
                times.append(ended - began)
                print(f"{kind}: {ended - began:.2f} s", file=sys.stderr, flush=True)
                saver.let_end()
                if kind == "all":
                    wrote.append(time.perf_counter() - ended)
        report(options, saver, {kind: statistics.median(times) for kind, times in rounds.items()}, seconds_of, wrote)
        saver.remove()


def begin(kind: str, saver: MemorySaver, engine: Engine, number: int) -> None:
    """What a round of this kind does before its steps."""
    if kind == "copies":
        saver.staging.copy(engine.state_shards(for_saving=True))
    elif kind == "all" and saver.is_ready():
        saver.save(engine.state_shards(for_saving=True), STATE | {"step": number + 1})


def copied(staging: HostStaging, engine: Engine) -> None:
    """Copy the state and wait for it."""
    staging.copy(engine.state_shards(for_saving=True))
    staging.wait()


def check(staging: HostStaging, engine: Engine) -> None:
    """The first copy, which allocates and pins the buffers, compared with its source."""
    shards = engine.state_shards(for_saving=True)
    copies = staging.copy(shards)
    staging.wait()
    assert all(torch.equal(copies[name].tensor, shard.tensor.cpu()) for name, shard in shards.items())


def timed(action: Callable[[], object], device: torch.device) -> float:
    """Seconds of an action, until the device has ended its part."""
    began = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def report(
    options: argparse.Namespace,
    saver: MemorySaver,
    rounds: dict[str, float],
    seconds_of: dict[str, float],
    wrote: list[float],
) -> None:
    """Print the measurement as one line of JSON."""
    size = saver.staging.size
    step = rounds["without"] / options.every
    line = {
        "every": options.every,
        "step_ms": round(1000 * step, 2),
        "state_bytes": size,
        "d2h_ms": round(1000 * seconds_of["d2h"], 1),
        "d2h_GBps": round(size / seconds_of["d2h"] / 1e9, 2),
        "first_copy_s": round(seconds_of["pin"], 2),
        "copies_cost_percent": round(100 * (rounds["copies"] / rounds["without"] - 1), 2),
        "all_cost_percent": round(100 * (rounds["all"] / rounds["without"] - 1), 2),
        "written_after_the_round_s": round(statistics.median(wrote), 2),
        "is_stored": saver.newest is not None,
        "device_gib": options.device_gib,
        "peer_copy_bytes": size,
        "peer_copy_needs_GBps": round(size / rounds["without"] / 1e9, 3),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
