"""Samples the devices of a host every few seconds into `logs/<host>.gpu`: one JSON object per line.

    {"time": 1700000000.0, "host": "a1", "kind": "gpu", "devices": [{"index": 0, "name": "NVIDIA A10",
      "temperature": 49, "utilisation": 97, "memory_used": 9563013120, "memory_total": 23835246592, "power": 148.2,
      "processes": [{"pid": 4711, "name": "python", "memory": 9550430208}]}], "disk": {"free": ..., "total": ...},
      "logged": 1234}

`logged` is the size of `logs/<host>.err` at that time, which tells a reader when an error was written. GPUs are read
through NVML. A run without GPUs has one device, the CPU, read from /proc, in the same format. Values that a device does
not provide are null. A process that was stopped (SIGSTOP) has `"stopped": true`. A full disk stops the samples, never
the run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS_BETWEEN_SAMPLES = 5.0
SECONDS_TO_FIRST_SAMPLE = 1.0
Device = dict[str, Any]


class Sampler:
    """A thread that samples until the block ends."""

    def __init__(self, run: Path, ranks: Callable[[], list[int]], host: str | None = None, every: float | None = None):
        self.run, self.ranks, self.host = run, ranks, host or socket.gethostname()
        self.every = SECONDS_BETWEEN_SAMPLES if every is None else every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)  # A driver that hangs must not block the end of the run.

    def _work(self) -> None:
        devices = _devices()
        path = self.run / "logs" / f"{self.host}.gpu"
        devices(self.ranks())  # CPU utilisation is a difference of two readings; this is the first.
        samples = 0
        while not self._over.wait(self.every if samples else min(self.every, SECONDS_TO_FIRST_SAMPLE)) or not samples:
            samples += 1  # A job that ends before the first sample gets one sample, too.
            with suppress(OSError):
                line = json.dumps(sample(self.run, self.host, devices, self.ranks()))
                with open(path, "a", encoding="utf-8") as file:
                    file.write(line + "\n")


def sample(run: Path, host: str, devices: Callable[[list[int]], tuple[str, list[Device]]], ranks: list[int]) -> Device:
    """One sample."""
    kind, found = devices(ranks)
    disk = shutil.disk_usage(run)
    return {
        "time": time.time(),
        "host": host,
        "kind": kind,
        "devices": found,
        "disk": {"free": disk.free, "total": disk.total},
        "logged": _size(run / "logs" / f"{host}.err"),
    }


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _devices() -> Callable[[list[int]], tuple[str, list[Device]]]:
    """A function that reads this host's devices: the GPUs that the job may use, else the CPU."""
    gpus = _Gpus.open()
    if gpus is not None:
        return lambda ranks: ("gpu", gpus.read())
    processor = _Cpu()
    return lambda ranks: ("cpu", [processor.read(ranks)])


class _Gpus:
    """The GPUs of CUDA_VISIBLE_DEVICES, or all."""

    def __init__(self, nvml: Any, handles: list[tuple[int, Any]]) -> None:
        self.nvml, self.handles = nvml, handles

    @classmethod
    def open(cls) -> _Gpus | None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handles = [
                (index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())
            ]
        except Exception:  # No library, driver, GPU or permission: NVML raises a different error for each.
            return None
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is not None:
            words = [word.strip() for word in wanted.split(",")]
            handles = [pair for pair in handles if str(pair[0]) in words or _identity(pynvml, pair[1]) in words]
        return cls(pynvml, handles) if handles else None

    def read(self) -> list[Device]:
        return [self._one(index, handle) for index, handle in self.handles]

    def _one(self, index: int, handle: Any) -> Device:
        nvml = self.nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        return {
            "index": index,
            "name": _text(self._ask(nvml.nvmlDeviceGetName, handle)),
            "temperature": self._ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "utilisation": None if rates is None else int(rates.gpu),
            "memory_used": None if memory is None else int(memory.used),
            "memory_total": None if memory is None else int(memory.total),
            "power": None if power is None else power / 1000,
            "processes": [
                {"pid": int(each.pid), "name": _name(int(each.pid)), "memory": each.usedGpuMemory}
                | _stopped(int(each.pid))
                for each in processes
            ],
        }

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except self.nvml.NVMLError:  # A virtual or older GPU does not provide every value.
            return None


def _identity(nvml: Any, handle: Any) -> str:
    try:
        return _text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return ""


def _text(value: Any) -> str:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


class _Cpu:
    """The CPU as a device. Its processes are the ranks."""

    def __init__(self) -> None:
        self.name = _processor_name()
        self.busy, self.all = _ticks()

    def read(self, ranks: list[int]) -> Device:
        busy, total = _ticks()
        spent, passed = busy - self.busy, total - self.all
        self.busy, self.all = busy, total
        memory = _memory()
        return {
            "index": 0,
            "name": self.name,
            "temperature": _temperature(),
            "utilisation": round(100 * spent / passed) if passed else 0,
            "memory_used": memory.get("MemTotal", 0) - memory.get("MemAvailable", 0),
            "memory_total": memory.get("MemTotal", 0),
            "power": None,
            "processes": [
                {"pid": pid, "name": _name(pid), "memory": resident} | _stopped(pid)
                for pid in ranks
                if (resident := _resident(pid))
            ],
        }


def _ticks() -> tuple[int, int]:
    """Busy time and total time of the CPU since boot."""
    numbers = [int(field) for field in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    idle = sum(numbers[3:5])
    return sum(numbers) - idle, sum(numbers)


def _memory() -> dict[str, int]:
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 2}


def _resident(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def _name(pid: int) -> str:
    return _read(f"/proc/{pid}/comm").strip()


def _stopped(pid: int) -> dict[str, bool]:
    """`stopped` if the process was stopped with SIGSTOP: it exists, holds its memory and does not run."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # The name may contain spaces and parentheses.
    return {"stopped": True} if state[:1] == ["T"] else {}


def _processor_name() -> str:
    lines = (line.partition(":") for line in _read("/proc/cpuinfo").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() in ("model name", "Processor")), "processor")


def _temperature() -> float | None:
    degrees = [_read(str(path)).strip() for path in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    known = [int(each) / 1000 for each in degrees if each.lstrip("-").isdigit()]
    return max(known) if known else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
