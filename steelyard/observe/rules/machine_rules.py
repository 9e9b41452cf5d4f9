"""Rules about machines: stopped ranks, unused GPUs, full disks, and clocks or versions that differ between hosts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from steelyard.core import units
from steelyard.observe.host_logs import is_number
from steelyard.observe.rules import BYTES_SAVED, Verdict, some
from steelyard.observe.run_state import RunState
from steelyard.sizes.param_count import parameters
from steelyard.sizes.stage_layers import partition_of

STARTING = 300.0  # seconds in which a job loads its container and imports before it touches a GPU
EMPTY_FOR = 30.0  # seconds without a process before a GPU counts as unused
BARE_MEMORY = 1 << 30  # bytes that the driver takes on an unused GPU
DISK_SHARE, DISK_BYTES, DISK_LAST = 0.05, 50 << 30, 0.005
CLOCKS_APART = 2.0  # seconds
HOT = 90  # degrees Celsius
LAYOUT_KEYS = ("tensor", "context", "pipeline", "virtual", "zero", "schedule", "sequence_parallel")


def frozen(state: RunState) -> Verdict | None:
    """A process was stopped with SIGSTOP, and all others wait for it."""
    if not state.is_live:
        return None
    stopped: list[tuple[str, int]] = []
    for host, samples in state.devices.items():
        if state.now - samples.heard > EMPTY_FOR:
            continue
        stopped += [
            (host, each["pid"])
            for device in samples.last.get("devices") or []
            for each in device.get("processes") or []
            if isinstance(each, dict) and each.get("stopped") is True and type(each.get("pid")) is int
        ]
    if not stopped:
        return None
    stopped = list(dict.fromkeys(stopped))  # A process may be on several GPUs.
    named = [f"{_rank_of(state, host, pid)} on {host}" for host, pid in stopped]
    host, pid = stopped[0]
    what = f"resume it: kill -CONT {pid} on {host}" + (", and likewise the others" if len(stopped) > 1 else "")
    return Verdict("frozen", "wrong", f"stopped by a signal (SIGSTOP): {some(named)}", what)


def _rank_of(state: RunState, host: str, pid: int) -> str:
    reported = state.hosts.get(host, {})
    pids, ranks = reported.get("process ids"), reported.get("ranks") or []
    if isinstance(pids, list) and pid in pids and len(pids) == len(ranks):
        return f"rank {ranks[pids.index(pid)]}, process {pid},"
    return f"process {pid}"


def nobody_on_device(state: RunState) -> Verdict | None:
    """The job runs, but no process uses a GPU. A container may hide processes from the driver, but not their memory."""
    if not state.is_live:
        return None
    since = state.now - (state.began or state.now)
    empty: list[str] = []
    partly: list[str] = []
    for host, samples in state.devices.items():
        if state.now - samples.heard > 2 * EMPTY_FOR:
            continue
        # Samples of a host are compared by that host's clock, which may differ from ours by hours.
        recent = [each for each in samples.samples if samples.last["time"] - each["time"] <= 2 * EMPTY_FOR]
        if not recent or recent[-1]["time"] - recent[0]["time"] < EMPTY_FOR or not recent[-1].get("devices"):
            continue
        if since < STARTING and (state.progressed or 0.0) < (state.began or 0.0):
            continue
        unused = [index for index in range(len(recent[-1]["devices"])) if all(_is_unused(s, index) for s in recent)]
        if len(unused) == len(recent[-1]["devices"]):
            empty.append(host)
        elif unused:
            partly.append(f"{len(unused)} of {len(recent[-1]['devices'])} on {host}")
    if empty:
        message = f"running, but no process uses a GPU of {some(empty)}"
        if any(state.devices[host].last.get("kind") == "cpu" for host in empty):
            message = f"running, but no process of the run is on {some(empty)}"
        what = "read the end of that host's error log; if the ranks have died, steelyard cancel and submit again"
        return Verdict("no-process", "wrong", message, what)
    if partly:
        what = "start as many ranks as there are GPUs, or request fewer GPUs"
        return Verdict("idle-gpus", "warning", f"GPUs that no process uses: {some(partly)}", what)
    return None


def _is_unused(sample: dict[str, Any], index: int) -> bool:
    devices = sample.get("devices") or []
    device = devices[index] if index < len(devices) and isinstance(devices[index], dict) else {}
    if device.get("processes"):
        return False
    used = device.get("memory_used")
    return sample.get("kind") == "cpu" or not is_number(used) or used < BARE_MEMORY


def other_configuration(state: RunState) -> Verdict | None:
    """The layout that the ranks report differs from the requested one, or between hosts."""
    if state.is_waiting or not state.hosts:
        return None
    differences: list[str] = []
    wanted = requested(state)
    for host, reported in state.hosts.items():
        layout = reported.get("layout")
        if not isinstance(layout, dict):
            continue
        for key, value in wanted.items():
            if key in layout and layout[key] != value:
                differences.append(f"{host} has {key} {layout[key]}, but {value} was requested")
    ranks = sorted(rank for host in state.hosts.values() for rank in host.get("ranks") or [] if is_number(rank))
    worlds = {host["layout"].get("world") for host in state.hosts.values() if isinstance(host.get("layout"), dict)}
    if len(worlds) == 1 and None not in worlds and ranks != list(range(next(iter(worlds)))):
        differences.append(f"hosts/ lists {len(ranks)} of {next(iter(worlds))} ranks")
    if not differences:
        return None
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    what = "cancel the run; make all nodes use the same recipe and the planned number of ranks; submit again"
    return Verdict("other-configuration", "wrong", differences[0] + more, what)


def requested(state: RunState) -> dict[str, Any]:
    """The layout that the recipe and the launch request, with the same keys as the ranks' reports."""
    wanted: dict[str, Any] = {}
    attempt = state.attempts[-1] if state.attempts else {}  # Attempts of an elastic run have fewer ranks.
    ranks = attempt.get("ranks", state.launch.get("ranks"))
    if is_number(ranks) and not state.is_superseded:
        wanted["world"] = ranks
    recipe = (None if state.is_superseded else state.submitted) or state.recipe
    if recipe is None:
        return wanted
    wanted |= {key: getattr(recipe.parallel, key) for key in LAYOUT_KEYS}
    wanted["partition"] = str(partition_of(recipe))
    wanted |= {"global_batch": recipe.train.global_batch, "micro_batch": recipe.train.micro_batch}
    wanted |= {"precision": recipe.train.precision, "steps": recipe.train.steps}
    data, left = divmod(wanted.get("world", recipe.parallel.least_world), recipe.parallel.model_ranks)
    if recipe.parallel.data is not None or ("world" in wanted and not left):
        wanted["data"] = recipe.parallel.data or data
    return wanted


def disk_nearly_full(state: RunState) -> Verdict | None:
    """The disk of the run is nearly full, or has no room for the next checkpoint."""
    ended_well = state.manifest.get("state") in ("finished", "stopped")
    if state.is_waiting or ended_well or state.disk is None:
        return None
    disks = {"the run folder's disk": state.disk}
    for host, samples in state.devices.items():
        disk = samples.last.get("disk")
        if isinstance(disk, dict) and is_number(disk.get("free")) and is_number(disk.get("total")):
            disks[f"the disk of {host}"] = disk["free"], disk["total"]
    where, (free, total) = min(disks.items(), key=lambda item: item[1][0])
    needed = 0
    if state.recipe is not None:
        needed = BYTES_SAVED * parameters(state.recipe.model).total
    what = "free space, or lower checkpoint.keep_last; a run fails on a full disk and resumes from its last checkpoint"
    has = f"{where} has {units.size(free)} of {units.size(total)} left"
    if free < total * DISK_LAST:
        return Verdict("disk-full", "wrong", f"the disk is full: {has}", what)
    if free < needed:
        return Verdict("disk-full", "warning", f"{has}; a checkpoint takes about {units.size(needed)}", what)
    if free < min(total * DISK_SHARE, DISK_BYTES):
        return Verdict("disk-full", "warning", f"the disk is nearly full: {has}", what)
    return None


def clocks_differ(state: RunState) -> Verdict | None:
    """The hosts' clocks differed at the moment when their ranks connected."""
    clocks = sorted((host["clock"], name) for name, host in state.hosts.items() if is_number(host.get("clock")))
    if state.is_waiting or len(clocks) < 2 or clocks[-1][0] - clocks[0][0] <= CLOCKS_APART:
        return None
    _, before = max((b[0] - a[0], number) for number, (a, b) in enumerate(pairwise(clocks)))
    few = clocks[: before + 1] if before + 1 <= len(clocks) // 2 else clocks[before + 1 :]
    apart = clocks[-1][0] - clocks[0][0]
    message = f"the clocks of the hosts differ by {apart:.1f} s: {some([name for _, name in few])} differs most"
    what = "synchronize the clocks (chrony, timedatectl); until then, times of logs and files cannot be compared"
    return Verdict("clocks-differ", "warning", message, what)


def versions_differ(state: RunState) -> Verdict | None:
    """Library versions differ between hosts."""
    versions = {name: host["versions"] for name, host in state.hosts.items() if isinstance(host.get("versions"), dict)}
    if state.is_waiting:
        return None
    for library in sorted({library for each in versions.values() for library in each}):
        by_version: dict[str, list[str]] = {}
        for host, each in versions.items():
            by_version.setdefault(str(each.get(library, "none")), []).append(host)
        if len(by_version) > 1:
            reported = ", ".join(f"{version} on {some(hosts)}" for version, hosts in by_version.items())
            what = "install the same versions everywhere, or start the ranks in one container image"
            return Verdict("versions-differ", "warning", f"{library} differs between hosts: {reported}", what)
    return None


def hot_device(state: RunState) -> Verdict | None:
    """A GPU is so hot that it lowers its clock."""
    if not state.is_live:
        return None
    hot = [
        f"GPU {device.get('index')} of {host} at {device['temperature']:.0f} degrees"
        for host, samples in state.devices.items()
        if samples.last.get("kind") == "gpu"
        for device in samples.last.get("devices") or []
        if is_number(device.get("temperature")) and device["temperature"] >= HOT
    ]
    what = "report it to the administrator; a hot GPU lowers its clock, and all ranks wait for it"
    return Verdict("hot-gpu", "warning", f"too hot: {some(hot)}", what) if hot else None
