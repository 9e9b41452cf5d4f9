"""Operating-system calls that differ between Linux and macOS.

Every call that only Linux has is made here, with its replacement for other systems. Features without a replacement
(launching ranks, Slurm, containers, the checks of the doctor) call `require_linux` first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from steelyard.core.errors import UserError

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MEMINFO = Path("/proc/meminfo")
PR_SET_PDEATHSIG = 1
POLL_SECONDS = 1.0
NAMES = {"darwin": "macOS", "win32": "Windows"}


def require_linux(what: str, hint: str) -> None:
    """Raise if this is not Linux."""
    if sys.platform != "linux":
        raise UserError(f"{what} needs Linux; this is {NAMES.get(sys.platform, sys.platform)}", hint=hint)


def output_of(command: Sequence[str], seconds: float = 30.0) -> str | None:
    """The standard output of a program; None if it is missing, fails, or does not end within `seconds`."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else done.stdout


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on; all of them if the system has no CPU affinity (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def resident_bytes() -> int:
    """Resident memory of this process; on macOS, where only the peak is known, the peak."""
    return _status("VmRSS") or _peak_of_lifetime()


def peak_resident_bytes() -> int:
    """The peak resident memory of this process since `reset_peak`; on macOS, since its start."""
    return _status("VmHWM") or _peak_of_lifetime()


def available_bytes() -> int | None:
    """Memory of this host that new processes can use without swapping; None if the system does not say (macOS)."""
    return _kibibytes(MEMINFO, "MemAvailable")


def reset_peak() -> None:
    """Reset the peak to the current value, if the system can: some containers forbid it, macOS has no such call."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def _status(name: str) -> int | None:
    return _kibibytes(STATUS, name)


def _kibibytes(path: Path, name: str) -> int | None:
    """An entry of a file of /proc, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
    return None


def _peak_of_lifetime() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB.


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """A `preexec_fn` with which the kernel kills the new process when its parent dies; None if unsupported (macOS).

    The parent is this process by default.
    """
    prctl, expected = _prctl(), parent or os.getpid()
    if prctl is None:
        return None

    def set_death_signal() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != expected:  # It died before the call.
            os._exit(1)

    return set_death_signal


def end_with_parent(parent: int) -> None:
    """End this process when its parent dies: by the kernel, or by a thread that polls every second."""
    set_death_signal = die_with_parent(parent)
    if set_death_signal is not None:
        set_death_signal()
    else:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _prctl() -> Callable[[int, int], object] | None:
    """The Linux system call that requests a signal at the parent's death."""
    with contextlib.suppress(OSError, AttributeError):
        prctl: Callable[[int, int], object] = ctypes.CDLL(None).prctl
        return prctl
    return None
