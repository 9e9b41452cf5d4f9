"""All-reduce bandwidth and latency between two ranks of this machine, for `steelyard plan profile`.

Two processes, on two GPUs or on the CPU, time a large and a small all-reduce. A ring of two sends its bytes once each
way, so the large one gives the bandwidth and the small one the latency of the link.
"""

from __future__ import annotations

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from steelyard.core.console import console

ROUNDS = 10
SMALL = 8


def can_measure(device: torch.device) -> bool:
    """Whether this machine has two ranks: two GPUs, or a CPU."""
    return device.type != "cuda" or torch.cuda.device_count() > 1


def measure(device: torch.device, seconds: float) -> dict[str, float] | None:
    """Gigabytes per second and microseconds; None if the processes take longer than that, and are ended."""
    end = time.monotonic() + seconds
    if seconds <= 0:
        return None
    with tempfile.TemporaryDirectory() as folder, console.progress("measuring the link", seconds, "s") as progress:
        ranks = torch.multiprocessing.spawn(_rank, (device.type, folder), nprocs=2, join=False)
        seen = time.monotonic()
        while not ranks.join(timeout=min(0.5, max(0.0, end - time.monotonic()))):
            progress.advance(-seen + (seen := time.monotonic()))
            if seen >= end:
                for process in ranks.processes:
                    process.kill()
                    process.join()
                return None
        rates: dict[str, float] = json.loads((Path(folder) / "rates.json").read_text(encoding="utf-8"))
    return rates


def _rank(rank: int, kind: str, folder: str) -> None:
    """The main function of each of the two processes."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(minutes=2)
    )
    large = 1 << (28 if kind == "cuda" else 23)
    short, long = (_seconds(bytes_, device) for bytes_ in (SMALL, large))
    if rank == 0:
        rates = {"link_gbps": large / max(long - short, 1e-9) / 1e9, "link_latency_us": 1e6 * short / 2}
        (Path(folder) / "rates.json").write_text(json.dumps(rates), encoding="utf-8")
    dist.destroy_process_group()


def _seconds(bytes_: int, device: torch.device) -> float:
    """The median duration of `ROUNDS` all-reduces."""
    tensor = torch.zeros(bytes_ // 4, device=device)
    times = []
    for _ in range(3 + ROUNDS):
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times[3:])[ROUNDS // 2]
