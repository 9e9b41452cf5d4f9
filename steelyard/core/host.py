"""What the operating system offers this process, on Linux and macOS.

Calls that only Linux has are made here, each beside what replaces it elsewhere. What has no replacement (launching
ranks, Slurm, containers, the checks of the doctor) calls `require_linux` before it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from steelyard.core.errors import UserError

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 1.0
NAMES = {"darwin": "macOS", "win32": "Windows"}


def require_linux(what: str, hint: str) -> None:
    """Refuse what works only on Linux."""
    if sys.platform != "linux":
        raise UserError(f"{what} needs Linux; this is {NAMES.get(sys.platform, sys.platform)}", hint=hint)


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on; where the system has no CPU affinity (macOS), all of them."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def resident_bytes() -> int:
    """Memory of this process that is resident now; where only the peak is known (macOS), the peak."""
    return _status("VmRSS") or _peak_of_lifetime()


def peak_resident_bytes() -> int:
    """The largest resident set of this process since `reset_peak`; on macOS, of its whole life."""
    return _status("VmHWM") or _peak_of_lifetime()


def reset_peak() -> None:
    """Set the peak to what is resident now, where the system can: some containers forbid it, macOS has no such call."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in STATUS.read_text(encoding="utf-8").splitlines():
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
    return None


def _peak_of_lifetime() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # macOS counts bytes, Linux KiB.


def die_with_parent(parent: int | None = None) -> Callable[[], None] | None:
    """A `preexec_fn` that has the kernel kill the new process when its parent dies; None where it cannot (macOS).

    The parent is this process, unless another is named.
    """
    prctl, expected = _prctl(), parent or os.getpid()
    if prctl is None:
        return None

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != expected:  # It died before we could ask.
            os._exit(1)

    return ask


def end_with_parent(parent: int) -> None:
    """End this process when its parent dies: by the kernel, or by a thread that looks every second."""
    ask = die_with_parent(parent)
    if ask is not None:
        ask()
    else:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def _prctl() -> Callable[[int, int], object] | None:
    """The system call by which a Linux process asks for a signal at its parent's death."""
    with contextlib.suppress(OSError, AttributeError):
        found: Callable[[int, int], object] = ctypes.CDLL(None).prctl
        return found
    return None
