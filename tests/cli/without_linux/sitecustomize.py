"""Takes from every Python process what macOS does not have. A folder on PYTHONPATH with this file does it."""

import builtins
import errno
import fcntl
import io
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time

LINUX_PATHS = ("/proc", "/sys", "/dev/shm")
MODULES = (os, signal, socket, select, time, resource, mmap, fcntl)
LINUX_NAMES = """
    sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler sched_getparam sched_setparam
    sched_rr_get_interval copy_file_range posix_fadvise posix_fallocate memfd_create eventfd eventfd_read eventfd_write
    pidfd_open splice setns unshare getrandom fdatasync getresuid getresgid setresuid setresgid
    getxattr setxattr listxattr removexattr waitid waitid_result P_PID P_PGID P_ALL P_PIDFD
    O_DIRECT O_TMPFILE O_PATH O_NOATIME O_LARGEFILE O_RSYNC
    epoll EPOLLIN EPOLLOUT sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL SIGCLD
    AF_NETLINK AF_PACKET AF_VSOCK AF_ALG SO_BINDTODEVICE SO_PEERCRED SO_DOMAIN SO_PROTOCOL SO_MARK
    CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid prlimit RLIMIT_RTPRIO RLIMIT_SIGPENDING RLIMIT_MSGQUEUE RLIMIT_NICE
    MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_DOFORK MADV_MERGEABLE MADV_DONTDUMP MADV_REMOVE MAP_POPULATE
    F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS F_OFD_SETLK F_OFD_SETLKW F_NOTIFY F_SETLEASE
"""

for module in MODULES:
    for name in set(LINUX_NAMES.split()) & set(vars(module)):
        delattr(module, name)

# What asks sys.platform while it is imported and would then look for files that only a Mac has.
import sysconfig  # noqa: E402
import urllib.request  # noqa: E402, F401

sysconfig.get_config_vars()
import ctypes  # noqa: E402

sys.platform = "darwin"
sys.modules["triton"] = None  # It has no wheels for macOS.
library_entry = ctypes.CDLL.__getattr__


def without_prctl(library, name):
    if name == "prctl":
        raise AttributeError(name)
    return library_entry(library, name)


def without_linux_paths(function):
    def call(path=".", *rest, **options):
        if isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(LINUX_PATHS):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return function(path, *rest, **options)

    return call


ctypes.CDLL.__getattr__ = without_prctl
builtins.open = io.open = without_linux_paths(io.open)
for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink"):
    setattr(os, name, without_linux_paths(getattr(os, name)))
