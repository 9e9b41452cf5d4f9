"""What a node can do: its Python, torch, and whether every GPU computes. Run by the test job of `site init`."""

from __future__ import annotations

import platform
import socket
from typing import Any

import torch

from steelyard.core.run import versions


def check_node(gpus: int | None = None) -> dict[str, Any]:
    """Facts about this node, a verdict, and a hint if it fails; `gpus` is the number of GPUs that must compute."""
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "host": socket.gethostname(), "python": platform.python_version(), "versions": versions(), "gpus": names,
        "cuda": torch.version.cuda, "works": False,
    }  # fmt: skip
    software = f"Python {facts['python']}, torch {torch.__version__}"
    if gpus is not None and len(names) < gpus:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built for CPUs only"
        return facts | {
            "verdict": f"fails: Slurm granted {gpus} GPU, but torch, which {built}, sees {len(names)} ({software})",
            "hint": "steelyard doctor on that node names the cause: the driver, torch's build, or the container",
        }
    try:
        for index in range(len(names)):
            torch.ones(64, 64, device=f"cuda:{index}").mm(torch.ones(64, 64, device=f"cuda:{index}")).sum().item()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return facts | {"verdict": f"fails: a GPU does not compute: {reason}", "hint": "run steelyard doctor there"}
    devices = ", ".join(names) if names else "no GPU"
    return facts | {"works": True, "verdict": f"works: {software}, {devices}"}
