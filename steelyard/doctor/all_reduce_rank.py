"""A timed all-reduce between real ranks: `python -m steelyard.doctor.all_reduce_rank cpu|cuda [RANKS]`.

With a number it starts that many ranks here. Without, it is one rank of the launcher that started it, so that
`steelyard submit -- doctor` measures the network that a job would use. Rank 0 prints one JSON object.
"""

from __future__ import annotations

import json
import socket
import sys
import time

BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
WARM_UP, ROUNDS = 2, 5
MINUTES = 2.0


def main() -> int:
    """Start the ranks, or run as one of them."""
    device, count = sys.argv[1], sys.argv[2:]
    if count:
        from steelyard.launch import spawn

        return spawn.run([sys.executable, "-m", "steelyard.doctor.all_reduce_rank", device], int(count[0]))
    measured = measure(device)
    if measured is not None:
        sys.stdout.write("\n" + json.dumps(measured) + "\n")
    return 0


def measure(device: str) -> dict[str, object] | None:
    """The time of one all-reduce, whose result is checked; None on all ranks except rank 0."""
    import torch
    import torch.distributed as dist

    from steelyard.parallel.world import init_distributed

    with init_distributed(device, MINUTES) as world:
        here = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        data = torch.full((BYTES[device] // 4,), float(world.rank + 1), device=here)
        dist.all_reduce(data)
        is_right = bool((data == world.size * (world.size + 1) / 2).all())
        seconds = []
        for _ in range(WARM_UP + ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(data)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        hosts: list[str | None] = [None] * world.size
        dist.all_gather_object(hosts, socket.gethostname())
    if not world.is_rank0:
        return None
    taken = sorted(seconds[WARM_UP:])[ROUNDS // 2]
    sent = 2 * (world.size - 1) / world.size * BYTES[device]  # by each rank, in a ring
    return {"ranks": world.size, "hosts": len(set(hosts)), "device": device, "bytes": BYTES[device],
            "seconds": taken, "bandwidth": sent / taken, "right": is_right}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
