import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.core import host
from steelyard.core.errors import UserError

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""
CHILD = """
import os, time
from steelyard.core import host
if {without_prctl}:
    host._prctl = lambda: None
host.POLL_SECONDS = 0.05
host.end_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_cpus_are_those_of_the_affinity_or_all(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {6, 1, 4}, raising=False)
    assert host.usable_cpus() == [1, 4, 6]
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert host.usable_cpus() == [0, 1, 2]


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_without_proc_memory_is_the_peak_in_the_systems_unit(monkeypatch, tmp_path, platform, unit):
    monkeypatch.setattr(host, "STATUS", tmp_path / "missing")
    monkeypatch.setattr(sys, "platform", platform)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert host.resident_bytes() >= unit * peak
    assert host.peak_resident_bytes() <= unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_a_system_that_cannot_forget_its_peak_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "CLEAR", tmp_path / "missing" / "clear_refs")
    host.reset_peak()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_at_least_what_is_resident():
    assert host.peak_resident_bytes() >= host.resident_bytes() > 1 << 20


@pytest.mark.parametrize("without_prctl", [False, True])
def test_a_worker_ends_when_its_parent_is_killed(without_prctl):
    command = [sys.executable, "-c", PARENT, CHILD.format(without_prctl=without_prctl)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        child = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.communicate(timeout=30)
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process}/stat")  # Where nobody collects orphans, a dead one stays as a zombie.
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_needs_linux_names_the_system_it_met(monkeypatch):
    host.require_linux("this", "elsewhere")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"--nproc 2 needs Linux; this is macOS\n  hint: leave it out"):
        host.require_linux("--nproc 2", "leave it out")
