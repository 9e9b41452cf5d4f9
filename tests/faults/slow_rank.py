"""Slows one of two ranks of a local run, and prints when `watch` names it and how.

    python -m tests.faults.slow_rank bursts     # stopped for 1 s, running for 0.15 s, in turns
    python -m tests.faults.slow_rank nice       # nice 19, beside as many busy processes as there are cores

Where the kernel schedules sessions as groups (sched_autogroup_enabled), nice 19 has no effect beside processes of other
sessions. So the ranks and the busy processes are put into one cgroup, which needs root (cgroup v2: and the controller
`cpu` in cgroup.subtree_control).

The run is healthy for WARM seconds first, which are its own past. Verdicts before the disturbance are printed too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.conftest import TINY, write_tokens

WARM, DISTURBED, BETWEEN = 150.0, 300.0, 4.0
GROUP = next(filter(Path.is_dir, map(Path, ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")))) / "steelyard-slow-rank"
WORDS = (
    "tiny.toml", "train.steps=1000000", "checkpoint.every=0", "eval.every=0", "log.every=1", "parallel.data=2",
    "model.hidden=256", "train.global_batch=8", "train.micro_batch=4",
)  # fmt: skip


def until_empty(group: Path) -> None:
    """Remove a cgroup when its last process has ended."""
    while (group / "cgroup.procs").read_text():
        time.sleep(0.2)
    group.rmdir()


def main(kind: str) -> None:
    """Run the measurement."""
    with tempfile.TemporaryDirectory(prefix="steelyard-slow-") as folder:
        write_tokens(Path(folder, "tokens_text_document"))
        Path(folder, "tiny.toml").write_text(TINY)
        submitted = steelyard(
            folder, "submit", *WORDS, "--on", "local", "--ranks-per-node", "2", "--name", "slow", "--json"
        )
        run = json.loads(submitted.stdout)["run"]
        busy: list[subprocess.Popen[bytes]] = []
        try:
            until_steps(folder, run)
            begun = time.monotonic()
            while time.monotonic() < begun + WARM:
                look(folder, run, time.monotonic() - begun, "undisturbed")
                time.sleep(BETWEEN)
            rank = ranks(run)[1]
            if kind == "nice":
                os.setpriority(os.PRIO_PROCESS, rank, 19)
                busy = [
                    subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
                ]
                GROUP.mkdir(exist_ok=True)
                for process in [*ranks(run), *(each.pid for each in busy)]:
                    (GROUP / "cgroup.procs").write_text(str(process))
            begun = looked = time.monotonic()
            while time.monotonic() < begun + DISTURBED:
                if kind == "bursts":
                    os.kill(rank, signal.SIGSTOP)
                    time.sleep(1.0)
                    os.kill(rank, signal.SIGCONT)
                    time.sleep(0.15)
                else:
                    time.sleep(1.0)
                if time.monotonic() > looked + BETWEEN:
                    look(folder, run, time.monotonic() - begun, kind)
                    looked = time.monotonic()
        finally:
            for process in busy:
                process.kill()
                process.wait()
            steelyard(folder, "cancel", run)
            if GROUP.exists():
                until_empty(GROUP)


def steelyard(folder: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "steelyard", *words], cwd=folder, capture_output=True, text=True, check=False
    )


def until_steps(folder: str, run: str) -> None:
    """Wait for the first steps."""
    metrics = Path(folder, run, "metrics.jsonl")
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        time.sleep(1.0)


def ranks(run: str) -> list[int]:
    """The processes of the ranks, in order."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (path / "cmdline").read_bytes(), (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        number = next((each for each in variables if each.startswith(b"RANK=")), None)
        is_rank = b"steelyard\0train" in words and b"node_agent" not in words and str(run).encode() in words
        if number is not None and is_rank:
            found[int(number[5:])] = int(path.name)
    return [found[number] for number in sorted(found)]


def look(folder: str, run: str, seconds: float, what: str) -> None:
    """Print the verdicts that are not good."""
    seen = json.loads(steelyard(folder, "watch", run, "--once", "--json").stdout)
    wrong = [each["message"] for each in seen["verdicts"] if each["level"] != "ok"]
    if wrong:
        print(f"{what}, after {seconds:.0f} s: {'; '.join(wrong)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
