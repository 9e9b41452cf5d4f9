"""A real all-reduce between processes, and its bandwidth against what the catalogue says of the GPUs' links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import steelyard
from steelyard.core import units
from steelyard.core.errors import UserError
from steelyard.doctor import known_errors
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Answer, Machine
from steelyard.doctor.python_info import PythonInfo
from steelyard.parallel.world import World, detect
from steelyard.planning.communication import LINK_SHARE
from steelyard.sizes.gpu_catalogue import by_device_name

TOPIC = "all-reduce"
SECONDS = 240
LOW = 0.5  # Below this share of what is expected, something else than noise is at work.


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Between the ranks of the job, or between ranks that are started here."""
    if seen.torch is None:
        yield Finding(TOPIC, TOPIC, "absent", "torch was not seen, so no rank can be started")
        return
    try:
        world = detect(machine.environment)
    except UserError as half_set:
        yield Finding(TOPIC, TOPIC, "fail", half_set.message, half_set.hint or "")
        return
    answer, device = exchange(machine, seen, world)
    measured = _measured(answer)
    if measured is None:
        lines = (answer.err if answer else "").strip().splitlines()
        meaning = next((found for found in map(known_errors.explain_line, lines) if found and not found.harmless), None)
        error = next((line for line in lines if "error" in line.lower()), answer.gist if answer else "no Python")
        hint = meaning.hint if meaning else "NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL tells more"
        yield Finding(TOPIC, TOPIC, "fail", f"ranks on {device} did not manage one: {error[:300]}", hint)
        return
    yield judge(measured, seen.gpus)


def exchange(machine: Machine, seen: PythonInfo, world: World) -> tuple[Answer | None, str]:
    """Run it: as one rank of the launcher's, or with a rank for each GPU, or with two on processors."""
    many = len(seen.gpus) > 1 or (world.size > 1 and bool(seen.gpus))
    device = "cuda" if many and seen.answers.get("available") else "cpu"
    count = [] if world.size > 1 else [str(len(seen.gpus) if device == "cuda" else 2)]
    root = str(Path(steelyard.__file__).parents[1])
    paths = ":".join(filter(None, [root, machine.environment.get("PYTHONPATH", "")]))
    command = [machine.python, "-m", "steelyard.doctor.all_reduce_rank", device, *count]
    return machine.run(command, seconds=SECONDS, extra={"PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}), device


def _measured(answer: Answer | None) -> dict[str, Any] | None:
    if answer is None or not answer.is_good:
        return None
    try:
        found: dict[str, Any] = json.loads(answer.out.strip().splitlines()[-1])
        return found
    except (ValueError, IndexError):
        return None


def judge(measured: dict[str, Any], gpus: list[str]) -> Finding:
    """A verdict on what was measured."""
    who = f"{measured['ranks']} ranks" + (f" on {measured['hosts']} machines" if measured["hosts"] > 1 else "")
    speed = f"{measured['bandwidth'] / 1e9:.3g} GB/s"
    words = f"{who}, {units.size(measured['bytes'])} in {1e3 * measured['seconds']:.3g} ms, {speed} a rank"
    if not measured["right"]:
        return Finding(
            TOPIC,
            TOPIC,
            "fail",
            f"{who}: the sum is wrong",
            "a link or a GPU is broken: run nvidia-smi -q and dcgmi diag, and try pairs of GPUs alone",
            measured,
        )
    gpu = by_device_name(gpus[0]) if measured["device"] == "cuda" and gpus else None
    if gpu is None or gpu.link_gb is None or measured["hosts"] > 1:
        return Finding(TOPIC, TOPIC, "ok", words, facts=measured)
    expected = gpu.link_gb * 1e9 * LINK_SHARE
    facts = measured | {"expected": expected}
    if measured["bandwidth"] < LOW * expected:
        hint = (
            "look at the topology above; NCCL_DEBUG=INFO names the way taken (SHM and NET/Socket are slow ones); "
            "NCCL_P2P_DISABLE must not be set"
        )
        return Finding(
            TOPIC, TOPIC, "warn", f"{words}; the links of {gpu.name} give about {expected / 1e9:.3g} GB/s", hint, facts
        )
    return Finding(
        TOPIC,
        TOPIC,
        "ok",
        f"{words}, of about {expected / 1e9:.3g} GB/s that the links of {gpu.name} give",
        facts=facts,
    )
