"""A real all-reduce between processes, and its bandwidth compared with the catalogue's value for the GPUs' links."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import steelyard
from steelyard.core import units
from steelyard.core.errors import UserError
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Answer, Machine
from steelyard.doctor.python_info import PythonInfo
from steelyard.observe import known_errors
from steelyard.parallel.world import World, detect
from steelyard.planning.communication import REACHED
from steelyard.sizes.gpu_catalogue import by_device_name

TOPIC = "all-reduce"
SECONDS = 240
LOW = 0.5  # Warn below this fraction of the expected bandwidth.


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """An all-reduce between the ranks of the job, or between ranks started here."""
    if seen.torch is None:
        yield Finding(TOPIC, TOPIC, "absent", "torch cannot be imported, so no rank can be started")
        return
    try:
        world = detect(machine.environment)
    except UserError as incomplete_launcher_env:
        yield Finding(TOPIC, TOPIC, "fail", incomplete_launcher_env.message, incomplete_launcher_env.hint or "")
        return
    answer, device = run_all_reduce(machine, seen, world)
    measured = _measured(answer)
    if measured is None:
        lines = (answer.err if answer else "").strip().splitlines()
        meaning = next((found for found in map(known_errors.explain_line, lines) if found and not found.harmless), None)
        error = next((line for line in lines if "error" in line.lower()), answer.gist if answer else "no Python")
        hint = meaning.hint if meaning else "NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL shows more"
        yield Finding(TOPIC, TOPIC, "fail", f"the all-reduce on {device} failed: {error[:300]}", hint)
        return
    yield judge(measured, seen.gpus)


def run_all_reduce(machine: Machine, seen: PythonInfo, world: World) -> tuple[Answer | None, str]:
    """Run the all-reduce: as one rank of the launcher, with one rank per GPU, or with two ranks on CPUs."""
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
    """The verdict on a measurement."""
    who = f"{measured['ranks']} ranks" + (f" on {measured['hosts']} machines" if measured["hosts"] > 1 else "")
    speed = f"{measured['bandwidth'] / 1e9:.3g} GB/s"
    words = f"{who}, {units.size(measured['bytes'])} in {1e3 * measured['seconds']:.3g} ms, {speed} per rank"
    if not measured["right"]:
        return Finding(
            TOPIC,
            TOPIC,
            "fail",
            f"{who}: the sum is wrong",
            "a link or a GPU may be defective: run nvidia-smi -q and dcgmi diag, and test pairs of GPUs separately",
            measured,
        )
    gpu = by_device_name(gpus[0]) if measured["device"] == "cuda" and gpus else None
    if gpu is None or gpu.link_gb is None or measured["hosts"] > 1:
        return Finding(TOPIC, TOPIC, "ok", words, facts=measured)
    expected = gpu.link_gb * 1e9 * REACHED[gpu.link_transport]
    facts = measured | {"expected": expected}
    if measured["bandwidth"] < LOW * expected:
        hint = (
            "check the topology above; NCCL_DEBUG=INFO shows the transport (SHM and NET/Socket are slow); "
            "NCCL_P2P_DISABLE must not be set"
        )
        return Finding(
            TOPIC, TOPIC, "warn", f"{words}; the links of {gpu.name} reach about {expected / 1e9:.3g} GB/s", hint, facts
        )
    return Finding(
        TOPIC,
        TOPIC,
        "ok",
        f"{words}, of about {expected / 1e9:.3g} GB/s that the links of {gpu.name} reach",
        facts=facts,
    )
