"""Limits of the machine: shared memory, resource limits, disk, clock."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from steelyard.core import units
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.paths import home
from steelyard.doctor.python_info import PythonInfo

TOPIC = "machine"
GIB = 1 << 30
SHARED = GIB  # Data loaders and NCCL use less, except with many ranks; Docker's default is 64 MiB.
OPEN_FILES = 4096
DISK, CACHE_DISK = 20 * GIB, 5 * GIB
FILE_CLOCK_SECONDS = 5.0
WINDOWS_DRIVE = re.compile(r"/mnt/[a-z](/|$)")  # WSL's mount points, unless /etc/wsl.conf changes them.


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Check all limits."""
    yield _shared_memory(machine)
    yield _limits(machine)
    yield _disk(machine)
    yield from _windows_drive(machine)
    yield _temporary(machine)
    yield _clock(machine)


def _shared_memory(machine: Machine) -> Finding:
    place = machine.at("/dev/shm")
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        words = "there is no /dev/shm: ranks on one machine cannot share memory, and NCCL falls back to sockets"
        return Finding(TOPIC, "shared memory", "fail", words, "mount a tmpfs there")
    facts = {"free": usage.free, "total": usage.total}
    if usage.free < SHARED:
        words = f"/dev/shm has {units.size(usage.free)} free of {units.size(usage.total)}: ranks may die with Bus error"
        hint = "docker, podman: --ipc=host or --shm-size=8g; apptainer uses the host's; on the host: remount it larger"
        return Finding(TOPIC, "shared memory", "warn", words, hint, facts)
    return Finding(TOPIC, "shared memory", "ok", f"{units.size(usage.free)} free", facts=facts)


def _limits(machine: Machine) -> Finding:
    text = machine.text("/proc/self/limits") or ""
    soft = {match[1].strip(): match[2] for match in re.finditer(r"^(Max [a-z ]+?) {2,}(\S+)", text, re.MULTILINE)}
    problems: list[str] = []
    hints: list[str] = []
    files = soft.get("Max open files", "unlimited")
    if files != "unlimited" and int(files) < OPEN_FILES:
        problems.append(f"only {files} open files")
        hints.append("ulimit -n 65536")
    locked = soft.get("Max locked memory", "unlimited")
    if locked != "unlimited" and _has_infiniband(machine):
        problems.append(f"only {units.size(int(locked))} of locked memory, which InfiniBand needs without limit")
        hints.append(
            "ulimit -l unlimited (on Slurm: PropagateResourceLimitsExcept=MEMLOCK, or LimitMEMLOCK=infinity for slurmd)"
        )
    processes = soft.get("Max processes", "unlimited")
    if processes != "unlimited" and int(processes) < OPEN_FILES:
        problems.append(f"only {processes} processes and threads")
        hints.append("ulimit -u 65536")
    for name, least in (("Max address space", 64 * GIB), ("Max file size", 100 * GIB)):
        value = soft.get(name, "unlimited")
        if value != "unlimited" and int(value) < least:
            problems.append(f"{name.lower()[4:]} is limited to {units.size(int(value))}")
            hints.append("ulimit -v unlimited" if "address" in name else "ulimit -f unlimited")
    if not soft:
        return Finding(TOPIC, "limits", "absent", "/proc/self/limits cannot be read")
    if problems:
        hint = "; ".join(hints) + ", in the shell or job script that starts the ranks"
        return Finding(
            TOPIC, "limits", "fail" if "locked" in "".join(problems) else "warn", ", ".join(problems), hint, soft
        )
    return Finding(TOPIC, "limits", "ok", f"{files} open files, locked memory {locked}", facts=soft)


def _has_infiniband(machine: Machine) -> bool:
    folder = machine.at("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _disk(machine: Machine) -> Finding:
    """Free space in the folder for runs, and whether it is writable."""
    folder = machine.folder
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-") as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        words = f"{folder} is not writable: {error.strerror or error}"
        return Finding(TOPIC, "disk", "fail", words, "use another folder; images are read-only, so bind one")
    facts = {"free": free, "folder": str(folder)}
    if free < DISK:
        words = f"{units.size(free)} free in {folder}; a checkpoint takes 14 bytes per parameter"
        return Finding(TOPIC, "disk", "warn", words, "free some space, or use another folder with --run", facts)
    return Finding(TOPIC, "disk", "ok", f"{units.size(free)} free in {folder}", facts=facts)


def _windows_drive(machine: Machine) -> Iterator[Finding]:
    """Under WSL, whether runs would be written to a Windows drive, which Linux accesses through a file server."""
    if "microsoft" not in (machine.text("/proc/version") or "").lower():
        return
    drive = WINDOWS_DRIVE.match(str(machine.folder))
    if drive:
        words = f"{machine.folder} is on a Windows drive: slow, and renaming open files and locking may fail there"
        yield Finding(TOPIC, "WSL", "warn", words, "use a folder on the Linux disk, such as your home folder")
    else:
        yield Finding(TOPIC, "WSL", "ok", f"{machine.folder} is on the Linux disk")


def _temporary(machine: Machine) -> Finding:
    """Triton, torch.compile and the hub write caches, and a missing folder fails late."""
    places = {"TMPDIR": Path(machine.environment.get("TMPDIR") or machine.at("/tmp")), "HOME": home(machine)}
    for name in ("TRITON_CACHE_DIR", "HF_HOME"):
        if machine.environment.get(name):
            places[name] = Path(machine.environment[name])
    for name, place in places.items():
        exists = next((one for one in (place, *place.parents) if one.exists()), place)
        if name == "TMPDIR" and not place.is_dir():
            return Finding(
                TOPIC, "caches", "fail", f"TMPDIR is {place}, which does not exist", "create it, or unset TMPDIR"
            )
        if not os.access(exists, os.W_OK):
            hint = f"set {name} to a folder of your own, such as on a scratch disk"
            return Finding(TOPIC, "caches", "fail", f"{place} ({name}) is not writable", hint)
        free = shutil.disk_usage(exists).free
        if free < CACHE_DISK:
            words = f"{units.size(free)} free in {place} ({name}), which holds caches"
            return Finding(TOPIC, "caches", "warn", words, f"set {name} to a folder on a larger disk", {"free": free})
    return Finding(TOPIC, "caches", "ok", ", ".join(f"{name} {place}" for name, place in places.items()))


def _clock(machine: Machine) -> Finding:
    """Compare the clock with the file server's, and check for a time service."""
    try:
        with tempfile.NamedTemporaryFile(dir=machine.folder, prefix=".tmp-") as file:
            file.write(b"0")
            file.flush()
            differs = abs(Path(file.name).stat().st_mtime - time.time())
    except OSError:
        differs = 0.0
    if differs > FILE_CLOCK_SECONDS:
        words = f"timestamps of files in {machine.folder} are {differs:.0f} s off this machine's clock"
        return Finding(
            TOPIC, "clock", "warn", words, "start a time service here and on the file server", {"seconds": differs}
        )
    answer = machine.run(["timedatectl", "show", "--property=NTPSynchronized", "--value"], seconds=5)
    if answer and answer.out.strip() == "no":
        words = "no time service synchronizes this clock"
        return Finding(
            TOPIC,
            "clock",
            "warn",
            words,
            "start chrony or systemd-timesyncd: timelines of several machines need synchronized clocks",
        )
    source = (
        "synchronized by a time service" if answer and answer.out.strip() == "yes" else "agrees with the file system"
    )
    return Finding(TOPIC, "clock", "ok", source)
