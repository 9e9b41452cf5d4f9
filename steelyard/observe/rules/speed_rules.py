"""Rules about speed: a rank that is slower than its peers, and steps that take longer than before.

Single steps vary, most of all on a shared machine, so medians over a minute are compared. The ranks compute those of
the ranks (`training/straggler.py`), since the duration of a step is the same for all.
"""

from __future__ import annotations

from collections import Counter
from statistics import median, quantiles
from typing import Any

from steelyard.observe.host_logs import is_number
from steelyard.observe.rules import Verdict
from steelyard.observe.run_state import RunState

SLOWER, MUCH_SLOWER = 1.25, 2.0  # times
RECORDS_SLOW = 3
# For how long a rank must be slower, or much slower. On a shared machine, chance alone makes one a little slower for a
# minute.
SECONDS_SLOW, SECONDS_MUCH_SLOWER = 60.0, 15.0
MINUTE = 60.0
LONGER = 2.0  # times as long as before
LONGER_ALL = 3.0  # if no rank is slower than its peers
LONGEST = 1.25  # times as long as in the slowest quarter of the minutes before, which shows how much steps vary
AGO = 10 * MINUTE  # compared with the time before, if the run is that old
LEAST_MINUTES = 3
WAITS_FOR_DATA = ", waiting for data"
CAUSES = "check for other processes, heat or a low clock rate"


def slow_rank(state: RunState) -> Verdict | None:
    """Steps take longer than before, or a rank takes longer than its peers for the same work, or both."""
    if not state.is_live or not state.trained or (state.progressed or 0.0) < (state.began or 0.0):
        return None
    rank, (times, steps) = _slow_rank(state), _slow_steps(state)
    if rank is None and times < LONGER_ALL:
        return None
    tools = "nvidia-smi -q -d PERFORMANCE, top, iostat"
    if rank is None:
        message = f"{steps}; no rank is slower than its peers"
        what = f"{CAUSES} on all hosts, or a slow network or filesystem ({tools}, steelyard profile RUN)"
        return Verdict("slow-steps", "warning", message, what)
    message = "; ".join(filter(None, [steps, f"{rank}, and all ranks wait for it"]))
    what = f"{CAUSES} there ({tools}); exclude the host, or assign it fewer layers (steelyard plan)"
    if rank.endswith(WAITS_FOR_DATA):
        what = "check the disk or filesystem of the token files, as that host sees it (iostat, steelyard doctor)"
    return Verdict("slow-rank", "warning", message, what)


def _slow_rank(state: RunState) -> str | None:
    """Such as: rank 2 on b1 is 1.4 times slower than its peers. The same one in all records of a while."""
    begun = state.began or 0.0
    trained = [record for record in state.trained if _time(record) >= begun]
    records = [record for record in trained if isinstance(record.get("rank_seconds"), dict)]
    if not records or _time(records[-1]) - _time(records[0]) < MINUTE:
        return None
    return _same(state, records, SLOWER, SECONDS_SLOW) or _same(state, records, MUCH_SLOWER, SECONDS_MUCH_SLOWER)


def _same(state: RunState, records: list[dict[str, Any]], times: float, seconds: float) -> str | None:
    """The rank or host that is slower by a factor in all records of the last seconds, in words."""
    newest = _time(records[-1])
    recent = [record for record in records if newest - _time(record) <= seconds]
    recent = recent if len(recent) > RECORDS_SLOW else records[-RECORDS_SLOW:]
    reported = [record["rank_seconds"] for record in recent]
    lasted = _time(recent[-1]) - _time(recent[0])
    if len(reported) < RECORDS_SLOW or lasted < seconds / 2 or not all(_lags(each, times) for each in reported):
        return None
    ranks = [each["slowest"] for each in reported]
    hosts = [state.host_of(rank) for rank in ranks]
    rank, count = Counter(ranks).most_common(1)[0]
    host, on_host = Counter(hosts).most_common(1)[0]
    if count == len(reported):
        who = f"rank {rank}" + (f" on {host}" if host else "")
    elif on_host == len(reported) and host and len(state.hosts) > 1:
        who = f"{host}"
    else:
        return None
    devices = {name: each.get("device") for name, each in state.hosts.items()}
    if host and devices.get(host) not in (None, Counter(devices.values()).most_common(1)[0][0]):
        who += f" ({devices[host]})"
    times_slower = median(each["seconds"] / each["median"] for each in reported)
    waits = median(_number(each.get("data_wait")) / (each["seconds"] - each["median"]) for each in reported)
    return f"{who} is {times_slower:.1f} times slower than {_peers(state)}" + (WAITS_FOR_DATA if waits > 0.5 else "")


def _peers(state: RunState) -> str:
    """The only rank of a stage has no peers (`training/straggler.py`)."""
    layout = next((host.get("layout") or {} for host in state.hosts.values()), {})
    world, stages = layout.get("world"), layout.get("pipeline")
    return "before" if is_number(world) and world == stages else "its peers"


def _lags(reported: dict[str, Any], times: float) -> bool:
    seconds, usual = reported.get("seconds"), reported.get("median")
    if not isinstance(reported.get("slowest"), int):
        return False
    return is_number(seconds) and is_number(usual) and usual > 0 and seconds / usual > times


def _slow_steps(state: RunState) -> tuple[float, str]:
    """How many times as long steps take, and in words: steps take 6.0 times as long as 10 minutes ago."""
    newest, now = _time(state.trained[-1]), state.step_times.last(MINUTE, RECORDS_SLOW)
    ages = {newest - at: each for at, each in state.step_times.minutes(state.began or 0.0) if newest - at > MINUTE}
    past = {age: each for age, each in ages.items() if age >= AGO}
    past = past if len(past) >= LEAST_MINUTES else ages
    if now is None or len(past) < LEAST_MINUTES:
        return 1.0, ""
    for last, before in zip(now, zip(*past.values(), strict=True), strict=True):
        if last < LONGER * median(before) or last < LONGEST * quantiles(before, n=4)[-1]:
            return 1.0, ""
    times = now.whole / median(each.whole for each in past.values())
    minutes = round((min(past) if past is not ages else median(past)) / MINUTE)
    return times, f"steps take {times:.1f} times as long as {minutes} minutes ago"


def _number(value: Any) -> float:
    return float(value) if is_number(value) else 0.0


def _time(record: dict[str, Any]) -> float:
    return _number(record.get("time"))
