"""The cost of `steelyard watch`: with fast-growing logs of 64 ranks, and with logs of 1 GiB.

    PYTHONPATH=. python benchmarks/watch.py [--seconds 20] [--rate 50000]

A second process writes the output of 64 hosts, the metrics and the GPU samples. `steelyard watch --follow` runs on the
folder as a separate process, and its CPU time is measured with and without its start. Targets: under 5% of one core,
and under a second from the start to the page with a log of 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from steelyard.core import files
from steelyard.core.run import session

HOSTS = 64
FORK = multiprocessing.get_context("fork")  # the helper processes import nothing again
RECIPE = """
[model]
family = "gpt"
layers = 2
hidden = 64
heads = 4
vocab = 1000

[data]
train = "x"
sequence_length = 64

[train]
steps = 1000000
global_batch = 64
"""


def make(folder: Path) -> None:
    """Write a run folder that looks like an active run."""
    (folder / "logs").mkdir(parents=True)
    (folder / "hosts").mkdir()
    (folder / "recipe.toml").write_text(RECIPE)
    manifest = session(HOSTS) | {"state": "running", "name": "bench", "started": "2026-01-01T00:00:00+00:00"}
    (folder / "run.json").write_text(json.dumps(manifest))
    for number in range(HOSTS):
        reported = {"host": f"n{number}", "ranks": [number], "clock": time.time(), "layout": {"world": HOSTS}}
        (folder / "hosts" / f"n{number}.json").write_text(json.dumps(reported))


def write(folder: Path, rate: int, stop: float) -> None:
    """Append `rate` bytes per second to each of the 128 logs, and a record and 64 samples per second."""
    line = b"[rank0] step 12345/1000000  loss 4.1234  grad_norm 1.234  some Warning: the usual talk of a library\n"
    device = {"index": 0, "name": "H200", "utilisation": 99, "memory_used": 1, "memory_total": 2, "processes": [{}]}
    step = 0
    with files.locked(folder / "run.lock"):
        while time.time() < stop:
            began, step = time.time(), step + 1
            for number in range(HOSTS):
                for kind in ("out", "err"):
                    with open(folder / "logs" / f"n{number}.{kind}", "ab") as file:
                        file.write(line * (rate // len(line)))
                sample = {"time": time.time(), "kind": "gpu", "devices": [{**device, "index": i} for i in range(8)]}
                with open(folder / "logs" / f"n{number}.gpu", "ab") as file:
                    file.write(json.dumps(sample).encode() + b"\n")
            record = {"step": step, "loss": 4.0, "grad_norm": 1.0, "seconds": 1.0, "time": time.time(), "tokens": step}
            with open(folder / "metrics.jsonl", "ab") as file:
                file.write(json.dumps(record).encode() + b"\n")
            time.sleep(max(0.0, 1.0 - (time.time() - began)))


def cpu_seconds(process: int) -> float:
    """CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def following(folder: Path, seconds: float, rate: int) -> None:
    """Measure the CPU time of watching while the logs grow."""
    writer = FORK.Process(target=write, args=(folder, rate, time.time() + seconds + 8), daemon=True)
    writer.start()
    time.sleep(2)
    for mode in ("--follow", "terminal"):
        watcher = start(folder, mode)
        time.sleep(2)
        before, began = cpu_seconds(watcher.pid), time.time()
        time.sleep(seconds / 2)
        used, passed = cpu_seconds(watcher.pid) - before, time.time() - began
        print(f"{mode:10} {100 * used / passed:.2f}% of one core, {cpu_seconds(watcher.pid):.2f} s including start")
        watcher.kill()
        watcher.wait()
    writer.join()
    grown = sum(path.stat().st_size for path in (folder / "logs").iterdir())
    print(f"{HOSTS} hosts, {2 * HOSTS * rate / 1e6:.1f} MB/s written, {grown / 1e6:.0f} MB in total")


def start(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    """Start a watching process, with a pseudo-terminal in terminal mode."""
    command = [sys.executable, "-m", "steelyard", "watch", str(folder)]
    if mode == "--follow":
        return subprocess.Popen([*command, mode], stdout=subprocess.DEVNULL)
    ours, theirs = os.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    FORK.Process(target=drain, args=(ours,), daemon=True).start()
    return process


def drain(descriptor: int) -> None:
    """Read and discard the output of a terminal."""
    try:
        while os.read(descriptor, 1 << 16):
            pass
    except OSError:
        pass


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def starting(folder: Path) -> None:
    """Measure the time to the page with logs of 1 GiB that are not in the page cache."""
    line = b"step 12345/1000000  loss 4.1234  grad_norm 1.234  some Warning: the usual talk of a library\n"
    chunk = line * ((64 << 20) // len(line))
    logs = [folder / "logs" / f"{socket.gethostname()}.{kind}" for kind in ("out", "err")]
    for path in logs:
        with open(path, "wb") as file:
            file.write(b"KeyError: the first line\n")
            for _ in range(16):
                file.write(chunk)
            file.write(b"ValueError: the last line\n")
    for _ in range(3):
        for path in logs:
            forget(path)
        began, before = time.perf_counter(), _children()
        command = [sys.executable, "-m", "steelyard", "watch", "--once", str(folder)]
        reported = subprocess.run(command, capture_output=True, text=True)
        assert ": KeyError: the first line (and 1 more)" in reported.stdout, reported
        passed, used = time.perf_counter() - began, _children() - before
        print(f"two logs of 1 GiB: the page after {passed:.2f} s, {used:.2f} s of CPU")
    print(f"largest process so far {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MiB")


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rate", type=int, default=50_000, help="bytes per second into each of 128 logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as base:
        for name, measure in (
            ("starting", starting),
            ("following", lambda f: following(f, options.seconds, options.rate)),
        ):
            folder = Path(base) / name
            make(folder)
            measure(folder)


if __name__ == "__main__":
    main()
