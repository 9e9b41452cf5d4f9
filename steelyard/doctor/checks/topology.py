"""InfiniBand and NVLink: what should carry the gradients, and whether it does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from steelyard.doctor.checks.torch import driver
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.python_info import PythonInfo
from steelyard.sizes.gpu_catalogue import by_device_name

TOPIC = "topology"
NVLINK_GB = 100.0  # The slowest NVLink board of the catalogue sends more, the fastest slot less.
KINDS = {
    "NV": "NVLink",
    "PIX": "one PCIe switch",
    "PXB": "PCIe switches",
    "PHB": "the host bridge",
    "NODE": "one processor",
    "SYS": "the link between processors",
}


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Between machines, and inside this one."""
    yield _infiniband(machine)
    yield _nvlink(machine)


def _infiniband(machine: Machine) -> Finding:
    name = "InfiniBand"
    ports = sorted(machine.at("/sys/class/infiniband").glob("*/ports/*"))
    if not ports:
        return Finding(TOPIC, name, "absent", "no card: machines talk over Ethernet sockets")
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
            "check the cable and the subnet manager; NCCL_IB_DISABLE=1 goes on over sockets, slowly",
            facts,
        )
    if machine.environment.get("NCCL_IB_DISABLE") == "1":
        words = f"{', '.join(up)}, but NCCL_IB_DISABLE=1 keeps NCCL off it"
        return Finding(TOPIC, name, "warn", words, "unset NCCL_IB_DISABLE", facts)
    if not machine.at("/dev/infiniband").is_dir():
        words = f"{', '.join(up)}, but /dev/infiniband is not here"
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
        return Finding(TOPIC, name, "warn", words, "NCCL_IB_HCA can name the ports to use; ibstat tells more", facts)
    return Finding(TOPIC, name, "ok", ", ".join(up), facts=facts)


def _port(port: Path) -> tuple[str, str, str]:
    """State, rate and link layer of a port, as the kernel writes them."""

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
            f"nvidia-smi topo does not say{f': {answer.gist}' if answer else ''}",
            "the all-reduce below tells the speed",
        )
    kinds = [re.sub(r"\d+", "", kind) for kind in pairs.values()]
    counted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    words = ", ".join(f"{count} pairs over {KINDS.get(kind, kind)}" for kind, count in counted.items())
    facts = {"pairs": pairs}
    gpu = by_device_name(kernel.gpus[0])
    expects = gpu is not None and (gpu.link_gb or 0) >= NVLINK_GB
    if expects and counted.get("NV", 0) < len(kinds):
        hint = "does nvidia-fabricmanager run, are links up (nvidia-smi nvlink -s)? PCIe cards of this name have none"
        return Finding(
            TOPIC,
            name,
            "warn",
            f"{kernel.gpus[0]} has NVLink, and only {counted.get('NV', 0)} of {len(kinds)} pairs use it: {words}",
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
            "nvidia-smi nvlink -s and -e tell which, and their errors",
            facts,
        )
    return Finding(TOPIC, name, "ok", words, facts=facts)


def _pairs(text: str) -> dict[str, str]:
    """How each pair of GPUs is joined, from the table of nvidia-smi topo -m."""
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
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
