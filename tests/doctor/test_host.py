from dataclasses import replace
from pathlib import Path

import pytest

from steelyard.doctor.checks import host_limits, topology
from steelyard.doctor.python_info import PythonInfo
from tests.doctor.conftest import named

LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max file size             unlimited            unlimited            bytes
Max processes             96360                96360                processes
Max open files            {files}                 524288               files
Max locked memory         {locked}              unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""
PORT = "/sys/class/infiniband/mlx5_0/ports/1/"
TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \t{01}\tNV12\tNV12\tPXB\t0-31
GPU1\t{01}\t X \tNV12\tNV12\tPXB\t0-31
GPU2\tNV12\tNV12\t X \tNV12\tSYS\t32-63
GPU3\tNV12\tNV12\tNV12\t X \tSYS\t32-63

Legend:
  SYS  = Connection traversing PCIe
"""


def found(bench, name, check=host_limits, **environment):
    return named(check.check(bench.machine(**environment), PythonInfo()), name)


def infiniband(bench, state="4: ACTIVE"):
    for name, text in {"state": state, "rate": "200 Gb/sec (4X HDR)", "link_layer": "InfiniBand"}.items():
        bench.file(PORT + name, text + "\n")


def test_shared_memory_that_is_small_or_missing_is_named(bench, small_disk):
    assert "no /dev/shm" in found(bench, "shared memory").words
    (bench.root / "dev").mkdir(parents=True)
    (bench.root / "dev" / "shm").symlink_to(small_disk)
    finding = found(bench, "shared memory")
    assert finding.verdict == "warn"
    assert "2.00 MiB" in finding.words
    assert "--shm-size" in finding.hint


@pytest.mark.parametrize(
    ("files", "locked", "card", "verdict", "words"),
    [
        ("1024", "unlimited", False, "warn", "only 1024 open files"),
        ("65536", "65536", False, "ok", "65536 open files"),
        ("65536", "65536", True, "fail", "only 64.0 KiB of locked memory"),
        ("65536", "unlimited", True, "ok", "locked memory unlimited"),
    ],
)
def test_limits_are_judged_by_what_the_machine_has(bench, files, locked, card, verdict, words):
    bench.file("/proc/self/limits", LIMITS.format(files=files, locked=locked))
    if card:
        infiniband(bench)
    finding = found(bench, "limits")
    assert finding.verdict == verdict
    assert words in finding.words


def test_a_disk_that_is_small_or_full_or_read_only_is_named(bench, small_disk):
    machine = bench.machine()
    there = type(machine)(machine.environment, root=bench.root, folder=small_disk)
    assert named(host_limits.check(there, PythonInfo()), "disk").verdict == "warn"
    with open(small_disk / "full", "wb") as file, pytest.raises(OSError, match="No space"):
        file.write(bytes(3 << 20))
    full = named(host_limits.check(there, PythonInfo()), "disk")
    assert full.verdict == "fail"
    assert "No space left" in full.words
    gone = type(machine)(machine.environment, root=bench.root, folder=bench.path / "nowhere")
    assert named(host_limits.check(gone, PythonInfo()), "disk").verdict == "fail"


def test_a_temporary_folder_that_is_not_there_is_named(bench):
    finding = found(bench, "caches", TMPDIR="/nowhere/at/all")
    assert finding.verdict == "fail"
    assert "TMPDIR is /nowhere/at/all" in finding.words


def test_a_clock_that_nobody_keeps_is_named(bench):
    bench.says("timedatectl", "no\n")
    assert found(bench, "clock").verdict == "warn"
    bench.says("timedatectl", "yes\n")
    assert found(bench, "clock").verdict == "ok"


def test_infiniband_is_judged_port_by_port(bench):
    def card(**environment):
        return found(bench, "InfiniBand", topology, **environment)

    assert card().verdict == "absent"
    infiniband(bench, "1: DOWN")
    assert card().verdict == "fail"
    assert "mlx5_0:1 is DOWN" in card().words
    infiniband(bench)
    assert "/dev/infiniband does not exist" in card().words
    (bench.root / "dev/infiniband").mkdir(parents=True)
    assert card().words == "mlx5_0:1 200 Gbit/s InfiniBand"
    assert card(NCCL_IB_DISABLE="1").verdict == "warn"
    bench.file(PORT.replace("mlx5_0", "mlx5_1") + "state", "1: DOWN\n")
    assert "not active: mlx5_1:1" in card().words


def test_a_pair_of_gpus_that_does_not_use_its_nvlink_is_named(bench):
    def between():
        return found(bench, "between GPUs", topology)

    assert between().verdict == "absent"
    bench.gpus(count=4, topology=TOPOLOGY.replace("{01}", "NV12"))
    assert between().words == "6 pairs over NVLink"
    bench.gpus(count=4, topology=TOPOLOGY.replace("{01}", "SYS"))
    assert between().verdict == "warn"
    assert "only 5 of 6 pairs" in between().words
    bench.gpus(count=4, topology=TOPOLOGY.replace("{01}", "NV12"), links="GPU 0:\n\t Link 3: <inactive>\n")
    assert "1 NVLinks are inactive" in between().words
    bench.gpus(name="NVIDIA A10", count=4, topology=TOPOLOGY.replace("{01}", "SYS").replace("NV12", "SYS"))
    assert between().verdict == "ok"  # A card that has none.


@pytest.mark.parametrize(
    ("folder", "verdict"),
    [("/mnt/c/Users/me/runs", "warn"), ("/mnt/d", "warn"), ("/mnt/data/runs", "ok"), ("/home/me", "ok")],
)
def test_under_wsl_a_folder_on_a_windows_drive_is_warned_of(bench, folder, verdict):
    bench.file("/proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@439a258ad544)")
    findings = host_limits._windows_drive(replace(bench.machine(), folder=Path(folder)))
    assert [finding.verdict for finding in findings] == [verdict]


def test_elsewhere_than_under_wsl_drives_are_not_spoken_of(bench):
    bench.file("/proc/version", "Linux version 6.1.0-37-amd64 (debian-kernel@lists.debian.org)")
    assert not list(host_limits._windows_drive(replace(bench.machine(), folder=Path("/mnt/c"))))


def test_programs_of_wsls_driver_are_found_off_the_path(bench):
    program = bench.file("/usr/lib/wsl/lib/nvidia-smi", "#!/bin/sh\n")
    program.chmod(0o755)
    assert bench.machine().which("nvidia-smi") == str(program)
