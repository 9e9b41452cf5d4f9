"""Run folders as launch and train leave them, made by hand: one healthy run, and whatever a test changes about it."""

import json
import os
import time
from pathlib import Path
from typing import Any

from steelyard.observe.run_state import RunState
from tests.conftest import TINY

NOW = 1_800_000_000.0
LAYOUT = {
    "world": 4, "tensor": 1, "context": 1, "pipeline": 2, "data": 2, "virtual": 1, "zero": 0, "schedule": "1f1b",
    "sequence_parallel": False, "partition": "1-1", "global_batch": 4, "micro_batch": 2, "precision": "fp32",
    "steps": 1000,
}  # fmt: skip
RECIPE = (
    TINY.replace("steps = 20", "steps = 1000")
    .replace("every = 2\n", "every = 10\n")
    .replace("every = 3", "every = 500")
    + "\n[parallel]\npipeline = 2\ndata = 2\n"
)


def iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(at))


class Folder:
    """A run of 1000 steps on two hosts of two ranks each, a job of Slurm's, started an hour ago, at step 300."""

    def __init__(self, path: Path, now: float = NOW) -> None:
        self.path, self.now = path, now
        (path / "logs").mkdir(parents=True)
        (path / "hosts").mkdir()
        (path / "recipe.toml").write_text(RECIPE)
        self.manifest: dict[str, Any] = {"state": "running", "world_size": 4, "host": "n0", "started": iso(now - 3600)}
        self.launch: dict[str, Any] = {"backend": "slurm", "name": path.name, "jobs": ["77"], "ranks": 4, "nodes": 2}
        self.jobs = [self.job("RUNNING", at=now - 3600)]
        self.hosts = {
            f"n{number}": {
                "host": f"n{number}", "ranks": [2 * number, 2 * number + 1], "device": "NVIDIA H200",
                "clock": now - 3500 + number / 10, "versions": {"torch": "2.11.0"}, "layout": dict(LAYOUT),
                "process ids": [1, 2],
            }
            for number in range(2)
        }  # fmt: skip
        self.records = [self.record(step) for step in range(10, 301, 10)]
        self.errors_at = now
        self.logs: dict[str, str] = {"n0.out": "step 300/1000\n", "n0.err": "", "n1.err": ""}
        self.behind: dict[str, float] = {}
        """Hosts whose clocks are so many seconds behind."""
        self.beats: dict[str, float] = {}
        """Last heartbeats of the hosts."""
        self.attempts: list[dict] = []
        self.samples = {host: [self.sample(now - 5 * ago) for ago in range(30, -1, -1)] for host in self.hosts}

    def job(self, state: str, at: float | None = None, **fields: Any) -> dict[str, Any]:
        known = {
            "time": iso(self.now if at is None else at),
            "job": "77",
            "state": state,
            "reason": "",
            "nodes": "n[0-1]",
        }
        return known | {"exit_code": None, "elapsed": 0, "time_limit": 7200, "restarts": 0} | fields

    def record(self, step: int, **fields: Any) -> dict[str, Any]:
        """A step takes 1 s, so that there is a record every 10 s, the last one 10 s ago."""
        return {
            "step": step, "loss": 8.0 - step / 100 + 0.05 * (step % 3), "grad_norm": 1.0, "learning_rate": 1e-3,
            "tokens": 64 * step, "tokens_per_second": 64.0, "seconds": 1.0, "nonfinite": 0,
            "time": self.now - 10 - (300 - step),
            "rank_seconds": {"slowest": 1, "seconds": 0.9, "median": 0.85},
        } | fields  # fmt: skip

    def sample(self, at: float, **fields: Any) -> dict[str, Any]:
        device = {"name": "NVIDIA H200", "temperature": 60, "utilisation": 98, "memory_used": 40 << 30,
                  "memory_total": 140 << 30, "power": 600, "processes": [{"pid": 1, "name": "python"}]}  # fmt: skip
        devices = [{"index": index, **device} | fields for index in range(2)]
        return {"time": at, "host": "", "kind": "gpu", "devices": devices, "disk": {"free": 1 << 40, "total": 4 << 40}}

    def write(self) -> Path:
        (self.path / "run.json").write_text(json.dumps(self.manifest))
        (self.path / "launch.json").write_text(json.dumps(self.launch))
        self._lines("scheduler.jsonl", self.jobs)
        self._lines("attempts.jsonl", self.attempts)
        self._lines("metrics.jsonl", self.records)
        for host, reported in self.hosts.items():
            (self.path / "hosts" / f"{host}.json").write_text(json.dumps(reported))
        for name, text in self.logs.items():
            (self.path / "logs" / name).write_text(text)
            os.utime(self.path / "logs" / name, (self.errors_at, self.errors_at))
        for host, at in self.beats.items():
            (self.path / "launch" / "alive").mkdir(parents=True, exist_ok=True)
            (self.path / "launch" / "alive" / host).touch()
            os.utime(self.path / "launch" / "alive" / host, (at, at))
        for host, samples in self.samples.items():
            self._lines(f"logs/{host}.gpu", samples)
            came = samples[-1]["time"] + self.behind.get(host, 0.0) if samples else self.now
            os.utime(self.path / "logs" / f"{host}.gpu", (came, came))
        return self.path

    def state(self) -> RunState:
        self.write()
        state = RunState(self.path).refresh(self.now)
        state.disk = (1 << 40, 4 << 40)  # Not this machine's own.
        return state

    def _lines(self, name: str, records: list[dict[str, Any]]) -> None:
        (self.path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
