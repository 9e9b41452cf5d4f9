"""The current state of a run, read from its folder only.

Each refresh of a `RunState` reads only new data (`observe/tail.py`), so following 64 ranks is cheap, and a log of a
gigabyte costs only its last lines. This module writes nothing and judges nothing; the rules do (`observe/verdict.py`).
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections import deque
from datetime import datetime
from pathlib import Path
from statistics import median_low
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.core.run import LOCK, MANIFEST, METRICS, RECIPE
from steelyard.core.safe_parse import json_objects
from steelyard.launch import backends, heartbeat
from steelyard.launch.backends import ENDED, WAITING, JobState
from steelyard.launch.elastic_job import ATTEMPTS
from steelyard.observe.error_scan import ErrorScan
from steelyard.observe.host_logs import GpuSamples, HostLog, is_number
from steelyard.observe.run_files import listed
from steelyard.observe.step_times import StepTimes
from steelyard.observe.tail import CachedJson, Tail

LAUNCH, SCHEDULER, HOSTS, LOGS = "launch.json", "scheduler.jsonl", "hosts", "logs"
LAUNCHED = "launch"  # folder with the submitted recipe
KEPT_RECORDS = 1024
PATIENCE = 60.0  # seconds without a step that are normal: a network filesystem may delay a record this long
FIRST_METRICS, FIRST_LINES = 512 << 10, 16 << 10
MOST_METRICS, MOST_LINES = 4 << 20, 16 << 10
FIRST_OF_ONE = 1 << 20
# Bytes of error logs per refresh: the first one, later ones (both shared by all hosts), and the minimum for each host.
FIRST_ERRORS, MOST_ERRORS, LEAST_ERRORS = 4 << 20, 1 << 20, 16 << 10
MOST_EARLIER = 2 << 20  # total bytes of error logs per refresh while skipped parts remain


class RunState:
    """The state of one run, from its files."""

    def __init__(self, path: Path, patience: float = PATIENCE) -> None:
        self.path, self.patience = path, patience
        self.now = 0.0
        self.manifest: dict[str, Any] = {}
        self.launch: dict[str, Any] = {}
        self.scheduler: list[dict[str, Any]] = []
        self.unwritten: list[dict[str, Any]] = []
        """Scheduler records that could not be written to the folder."""
        self.attempts: list[dict[str, Any]] = []
        """Attempts of an elastic run, and its reasons to wait (`launch/elastic_job.py`)."""
        self.metrics: deque[dict[str, Any]] = deque(maxlen=KEPT_RECORDS)
        self.step_times = StepTimes()
        self.hosts: dict[str, dict[str, Any]] = {}
        self.out: dict[str, HostLog] = {}
        self.err: dict[str, HostLog] = {}
        self.devices: dict[str, GpuSamples] = {}
        self.recipe: Recipe | None = None
        """The recipe that the ranks read."""
        self.submitted: Recipe | None = None
        """The recipe that was submitted, if the run was submitted."""
        self.beats: dict[str, float] = {}
        """When the node agent of each host was last alive, unless it has ended (`launch/heartbeat.py`)."""
        self.is_held = False
        self.disk: tuple[int, int] | None = None
        self._manifest, self._launch = CachedJson(path / MANIFEST), CachedJson(path / LAUNCH)
        self._hosts: dict[str, CachedJson] = {}
        self._metrics = Tail(path / METRICS, FIRST_METRICS, MOST_METRICS)
        self._scheduler = Tail(path / SCHEDULER, MOST_METRICS, MOST_METRICS)
        self._attempts = Tail(path / ATTEMPTS, MOST_METRICS, MOST_METRICS)
        self._recipes: dict[Path, tuple[int, Recipe]] = {}

    def refresh(self, now: float | None = None) -> RunState:
        """Read new data. Tests pass `now`; by default it is the current time."""
        self.now = time.time() if now is None else now
        self.manifest, self.launch = self._manifest.read(), self._launch.read()
        self._refresh_recipes()
        lines, is_new = self._metrics.lines()
        if is_new:
            self.metrics.clear()
            self.step_times = StepTimes()
        new = [record for record in json_objects(lines) if isinstance(record.get("step"), int)]
        self.metrics.extend(new)
        self.step_times.add(new)
        lines, is_new = self._scheduler.lines()
        if is_new:
            self.scheduler.clear()
        self.scheduler.extend(backends.neutral(record) for record in json_objects(lines))
        self.attempts.extend(json_objects(self._attempts.lines()[0]))
        self._refresh_hosts()
        self._refresh_logs()
        self.beats = heartbeat.beats(self.path)
        self.is_held = is_held(self.path / LOCK)
        try:
            usage = shutil.disk_usage(self.path)
            self.disk = usage.free, usage.total
        except OSError:
            self.disk = None
        return self

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Records of training steps."""
        return [record for record in self.metrics if "loss" in record]

    @property
    def is_superseded(self) -> bool:
        """Whether all jobs of the last launch have ended and another process continues the run, such as one by hand."""
        launched = list(self._launched().values())
        if not launched or not {record["state"] for record in launched} <= ENDED:
            return False
        reported = max(seconds_of(record.get("time")) or 0.0 for record in launched)
        met_since = any(is_number(host.get("clock")) and host["clock"] > reported for host in self.hosts.values())
        return met_since or (self.is_held and self.manifest.get("state") == "running")

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """The last scheduler record of each current job of the run."""
        return {} if self.is_superseded else self._launched()

    def _launched(self) -> dict[str, dict[str, Any]]:
        jobs, backend = self.launch.get("jobs"), self.launch.get("backend")
        own = [str(job) for job in jobs] if isinstance(jobs, list) else []  # Earlier launches had other jobs.
        return {
            job: record
            for record in [*self.scheduler, *self.unwritten]
            if record.get("state")
            and (not own or any(backends.owns(backend, each, str(record.get("job"))) for each in own))
            and (job := str(record.get("job")))
        }

    @property
    def job_states(self) -> set[JobState]:
        """The states of the jobs."""
        return {JobState(record["state"]) for record in self.jobs.values()}

    @property
    def is_live(self) -> bool:
        """Whether the run is active. The scheduler's state comes first, since locks may not be visible on this host."""
        states = self.job_states
        if states:
            return not states <= ENDED | WAITING
        return self.manifest.get("state") == "running" and self.is_held

    @property
    def is_waiting(self) -> bool:
        """Whether the run is queued or requeued."""
        states = self.job_states
        return bool(states & WAITING) and states <= WAITING | ENDED

    @property
    def job_started(self) -> float | None:
        """When the job last started, as far as the scheduler was polled, or the attempt of an elastic run."""
        running = [record for record in self.scheduler if record.get("state") == JobState.RUNNING]
        at = seconds_of(running[-1].get("time")) if running else None
        started = None if at is None else at - (span_of(running[-1].get("elapsed")) or 0.0)
        again = seconds_of(self.attempts[-1].get("time")) if self.attempts else None
        return max((each for each in (started, again) if each is not None), default=None)

    @property
    def began(self) -> float | None:
        """When the ranks of this attempt connected; before that, when the job last started, or else the run."""
        clocks: list[float] = [host["clock"] for host in self.hosts.values() if is_number(host.get("clock"))]
        started = self.job_started
        known = [*([] if started is None else [started]), *([median_low(clocks)] if clocks else [])]
        return max(known) if known else seconds_of(self.manifest.get("started"))

    @property
    def is_initialized(self) -> bool:
        """Whether the ranks of this attempt have connected: the files of an earlier one stay until then."""
        clocks = [host["clock"] for host in self.hosts.values() if is_number(host.get("clock"))]
        return bool(clocks) and max(clocks) >= (self.job_started or 0.0)

    @property
    def progressed(self) -> float | None:
        """When the last record was written."""
        last = self.metrics[-1].get("time") if self.metrics else None
        if not is_number(last):
            return self._metrics.changed if self.metrics else None
        writer = self.devices.get(self.host_of(0) or "")  # Records carry the time of rank 0's host.
        return float(last) + (writer.behind if writer is not None and self.is_live else 0.0)

    def errors_of(self, host: str) -> list[tuple[int, str]]:
        """Errors of a host since its ranks connected, with offsets. Earlier ones may be from an earlier attempt."""
        return self.err[host].errors(self._log_start(host))

    def written(self, host: str, place: int) -> float:
        """Upper bound of the time at which offset `place` of a host's error log was written.

        A log has no timestamps, and its mtime is that of its last line. GPU samples record the log's size over time.
        """
        log, samples = self.err[host], self.devices.get(host)
        sampled = None if samples is None else samples.when_logged(place)
        if samples is None or sampled is None:
            return log.last_error_at
        return min(sampled + (samples.behind if self.is_live else 0.0), log.last_error_at)

    def search(self, seconds: float) -> RunState:
        """Scan skipped parts of the error logs, from the beginning, for at most `seconds`."""
        until = time.monotonic() + seconds
        while self._search(MOST_EARLIER) and time.monotonic() < until:
            pass
        return self

    def _search(self, most: int) -> int:
        """Scan at most `most` skipped bytes of all hosts; returns the number of scanned bytes."""
        behind = [host for host, log in self.err.items() if log.unread(self._log_start(host))]
        share = max(LEAST_ERRORS, most // max(1, len(behind)))
        return sum(self.err[host].catch_up(self._log_start(host), share) for host in behind)

    def _log_start(self, host: str) -> int:
        """Size of a host's error log when its ranks connected."""
        size = self.hosts.get(host, {}).get("logged", 0)
        return int(size) if is_number(size) and size <= self.err[host].tail.offset else 0

    def unread(self, host: str) -> int:
        """Bytes of a host's error log, from this attempt, that were not scanned yet."""
        return self.err[host].unread(self._log_start(host)) if host in self.err else 0

    def host_of(self, rank: int) -> str | None:
        """The host of a rank."""
        return next((name for name, host in self.hosts.items() if rank in (host.get("ranks") or [])), None)

    def _refresh_recipes(self) -> None:
        for path in (self.path / RECIPE, self.path / LAUNCHED / RECIPE):
            try:
                seen = path.stat().st_mtime_ns
                if self._recipes.get(path, (0, None))[0] != seen:
                    self._recipes[path] = seen, load_recipe(path)
            except (OSError, UserError):
                self._recipes.pop(path, None)
        self.recipe = self._recipes.get(self.path / RECIPE, (0, None))[1]
        self.submitted = self._recipes.get(self.path / LAUNCHED / RECIPE, (0, None))[1]

    def _refresh_hosts(self) -> None:
        paths = {path.stem: path for path in listed(self.path / HOSTS, ".json")}
        self._hosts = {name: self._hosts.get(name) or CachedJson(path) for name, path in paths.items()}
        self.hosts = {name: _host(value) for name, small in sorted(self._hosts.items()) if (value := small.read())}

    def _refresh_logs(self) -> None:
        logs = listed(self.path / LOGS, ".out", ".err", ".gpu")
        if not any(path.suffix == ".err" for path in logs):
            logs = [
                *logs,
                *listed(self.path / LOGS, ".log"),
            ]  # A job that ended before its ranks started has only this.
        share = max(1, sum(path.suffix == ".err" for path in logs))
        for path in logs:
            host, kind = path.stem, path.suffix
            if kind == ".gpu" and host not in self.devices:
                self.devices[host] = GpuSamples(Tail(path, FIRST_LINES * 4, MOST_LINES * 4))
            elif kind in (".err", ".log") and host not in self.err:
                first = max(LEAST_ERRORS, min(FIRST_ERRORS // share, FIRST_OF_ONE))
                most = max(LEAST_ERRORS, MOST_ERRORS // share)
                self.err[host] = HostLog(Tail(path, first, most), ErrorScan())
            elif kind == ".out" and host not in self.out:
                self.out[host] = HostLog(Tail(path, FIRST_LINES, MOST_LINES), None)
        for log in self.out.values():
            log.refresh()
        read = sum(log.refresh() for log in self.err.values())
        for samples in self.devices.values():
            samples.refresh()
        self._search(max(0, MOST_EARLIER - read))


def is_held(path: Path) -> bool:
    """Whether a process holds a lock file. Tries a shared lock, which needs no write permission."""
    try:
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


def seconds_of(value: Any) -> float | None:
    """Seconds since 1970, from an ISO time or a number of seconds."""
    if is_number(value):
        return float(value)
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


def span_of(value: Any) -> float | None:
    """Seconds, from a number or a text such as `1-02:03:04`, `02:03:04` or `03:04`."""
    if is_number(value):
        return float(value)
    days, _, clock = str(value or "").rpartition("-")
    try:
        parts: list[float] = [float(part) for part in clock.split(":")]
        span = 86400.0 * int(days or 0) + sum(part * 60.0**place for place, part in enumerate(reversed(parts)))
        return span if is_number(span) else None
    except (ValueError, OverflowError):
        return None


def _host(reported: dict[str, Any]) -> dict[str, Any]:
    """The report of a host's ranks, without fields of the wrong type."""
    ranks = reported["ranks"] if isinstance(reported.get("ranks"), list) else []
    ranks = [rank for rank in ranks if type(rank) is int]
    layout = reported["layout"] if isinstance(reported.get("layout"), dict) else {}
    layout = {key: value for key, value in layout.items() if isinstance(value, str | int | float)}
    if type(layout.get("world")) is not int:
        layout.pop("world", None)
    return reported | {"ranks": ranks, "layout": layout}
