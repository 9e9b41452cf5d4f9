"""InfiniBand and NVLink: whether the links that should carry the gradients are used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from steelyard.core.printable import without_control
from steelyard.doctor.checks.torch import driver
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.python_info import PythonInfo
from steelyard.sizes.gpu_catalogue import by_device_name

TOPIC = "topology"
NVLINK_GB = 100.0  # The slowest NVLink in the catalogue has more, the fastest PCIe slot less.
KINDS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "the host bridge",
    "NODE": "one CPU",
    "SYS": "the link between CPUs",
}


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """The links between machines, and inside this one."""
    yield _infiniband(machine)
    yield _nvlink(machine)


def _infiniband(machine: Machine) -> Finding:
    name = "InfiniBand"
    ports = sorted(machine.at("/sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        return Finding(TOPIC, name, "absent", "no InfiniBand card: machines communicate over Ethernet sockets")
    reported = {f"{port.parent.parent.name}:{port.name}": _port(port) for port in ports}
    down = [port for port, (state, _, _) in reported.items() if state != "ACTIVE"]
    up = [f"{port} {rate} {kind}" for port, (state, rate, kind) in reported.items() if state == "ACTIVE"]
    facts = {port: list(values) for port, values in reported.items()}
    if not up:
        words = f"no port is active: {', '.join(f'{port} is {reported[port][0]}' for port in down)}"
        return Finding(
            TOPIC,
            name,
            "fail",
            words,
            "check the cable and the subnet manager; with NCCL_IB_DISABLE=1 NCCL uses sockets, which are slow",
            facts,
        )
    if machine.environment.get("NCCL_IB_DISABLE") == "1":
        words = f"{', '.join(up)}, but NCCL_IB_DISABLE=1 disables it for NCCL"
        return Finding(TOPIC, name, "warn", words, "unset NCCL_IB_DISABLE", facts)
    if not machine.at("/dev/infiniband").is_dir():
        words = f"{', '.join(up)}, but /dev/infiniband does not exist"
        return Finding(
            TOPIC,
            name,
            "fail",
            words,
            "in a container bind it: docker --device=/dev/infiniband --ulimit memlock=-1; apptainer binds /dev itself",
            facts,
        )
    if down:
        words = f"{', '.join(up)}; not active: {', '.join(down)}"
        return Finding(TOPIC, name, "warn", words, "NCCL_IB_HCA selects the ports to use; ibstat shows more", facts)
    return Finding(TOPIC, name, "ok", ", ".join(up), facts=facts)


def _port(port: Path) -> tuple[str, str, str]:
    """State, rate and link layer of a port, from /sys."""

    def line(name: str) -> str:
        try:
            return (port / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    rate = re.match(r"[\d.]+ Gb/sec", line("rate"))
    return line("state").split(":")[-1].strip(), rate[0].replace("Gb/sec", "Gbit/s") if rate else "", line("link_layer")


def _nvlink(machine: Machine) -> Finding:
    name = "between GPUs"
    kernel = driver(machine)
    if kernel is None or len(kernel.gpus) < 2:
        return Finding(TOPIC, name, "absent", "fewer than two GPUs")
    answer = machine.run(["nvidia-smi", "topo", "-m"])
    pairs = _pairs(answer.out) if answer and answer.is_good else {}
    if not pairs:
        return Finding(
            TOPIC,
            name,
            "warn",
            f"nvidia-smi topo shows no links{f': {answer.gist}' if answer else ''}",
            "the all-reduce below measures the speed",
        )
    kinds = [re.sub(r"\d+", "", kind) for kind in pairs.values()]
    counted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    words = ", ".join(f"{count} pairs over {KINDS.get(kind, kind)}" for kind, count in counted.items())
    facts = {"pairs": pairs}
    gpu = by_device_name(kernel.gpus[0])
    expects = gpu is not None and (gpu.link_gb or 0) >= NVLINK_GB
    if expects and counted.get("NV", 0) < len(kinds):
        hint = (
            "check that nvidia-fabricmanager runs and links are up (nvidia-smi nvlink -s); PCIe models have no NVLink"
        )
        return Finding(
            TOPIC,
            name,
            "warn",
            f"{kernel.gpus[0]} has NVLink, but only {counted.get('NV', 0)} of {len(kinds)} pairs use it: {words}",
            hint,
            facts,
        )
    links = machine.run(["nvidia-smi", "nvlink", "-s"])
    dead = re.findall(r"Link (\d+): <inactive>", links.out) if links and links.is_good else []
    if expects and dead:
        return Finding(
            TOPIC,
            name,
            "warn",
            f"{words}; {len(dead)} NVLinks are inactive",
            "nvidia-smi nvlink -s and -e show which, and their errors",
            facts,
        )
    return Finding(TOPIC, name, "ok", words, facts=facts)


def _pairs(text: str) -> dict[str, str]:
    """The link of each pair of GPUs, from the table of nvidia-smi topo -m."""
    text = without_control(text)
    header = next((line.split() for line in text.splitlines() if "GPU0" in line.split()), [])
    columns = [word for word in header if re.fullmatch(r"GPU\d+", word)]
    pairs: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not words or words == header or words[0] not in columns or len(words) <= len(columns):
            continue
        for column, kind in zip(columns, words[1:], strict=False):
            if columns.index(column) > columns.index(words[0]) and kind != "X":
                pairs[f"{words[0]}-{column}"] = kind
    return pairs
