"""Changes of a run folder by which a verdict follows, and runs that only look like it."""

from collections.abc import Callable
from pathlib import Path

from steelyard.observe.verdict import judge
from tests.observe.folders import NOW, Folder, iso


def verdicts(folder: Folder) -> dict[str, str]:
    """Kind and level of all verdicts."""
    return {verdict.kind: verdict.level for verdict in judge(folder.state())}


def ended(state: str, **fields) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.jobs.append(folder.job(state, **fields))
        folder.samples = {}

    return change


def finished(folder: Folder) -> None:
    folder.manifest |= {"state": "finished", "ended": iso(NOW)}
    folder.records += [folder.record(step) for step in range(310, 1001, 10)]
    ended("COMPLETED", exit_code=0)(folder)


def finished_before_the_scheduler_says_so(folder: Folder) -> None:
    finished(folder)
    folder.jobs = folder.jobs[:1]


def failed_in_an_earlier_attempt(folder: Folder) -> None:
    folder.manifest |= {"state": "failed", "error": "no", "ended": iso(NOW - 4000)}


def finished_and_failed(folder: Folder) -> None:
    finished(folder)
    ended("FAILED", exit_code=1)(folder)


def alone(state: str, **fields) -> Callable[[Folder], None]:
    """A run that no scheduler knows of."""

    def change(folder: Folder) -> None:
        folder.launch, folder.jobs, folder.samples = {}, [], {}
        folder.manifest |= {"state": state, **fields}

    return change


def waiting(reason: str, **fields) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.jobs = [folder.job("PENDING", reason=reason, nodes="", **fields)]
        folder.samples, folder.records, folder.hosts = {}, [], {}

    return change


def requeued(folder: Folder) -> None:
    folder.jobs += [folder.job("NODE_FAIL"), folder.job("PENDING", reason="BeginTime", restarts=1)]
    folder.logs["n0.err"] = "RuntimeError: Connection closed by peer\n"


def starting(folder: Folder) -> None:
    folder.hosts, folder.records, folder.samples = {}, [], {}
    folder.jobs = [folder.job("RUNNING", at=NOW - 20)]


def created_and_running(folder: Folder) -> None:
    starting(folder)
    folder.manifest["state"] = "created"


def another_command(folder: Folder) -> None:
    created_and_running(folder)
    folder.manifest["command"] = ["eval", "ppl", "runs/my"]


def compiling(folder: Folder) -> None:
    folder.records = []
    folder.jobs = [folder.job("RUNNING", at=NOW - 700)]
    for host in folder.hosts.values():
        host["clock"] = NOW - 600


def resuming(folder: Folder) -> None:
    """Requeued ten minutes ago, and compiling again: its last record is old."""
    for record in folder.records:
        record["time"] -= 1800
    folder.jobs.append(folder.job("RUNNING", at=NOW - 610, restarts=1))
    for host in folder.hosts.values():
        host["clock"] = NOW - 600


def older(folder: Folder, seconds: float) -> None:
    for record in folder.records:
        record["time"] -= seconds


def wedged(folder: Folder) -> None:
    older(folder, 300)


def saving(folder: Folder) -> None:
    """At step 500 a checkpoint is due."""
    folder.records = [folder.record(step, time=NOW - 110 - (500 - step)) for step in range(400, 501, 10)]


def validating_slowly(folder: Folder) -> None:
    """Every hundredth step a validation takes two minutes; it is in the third one for three."""
    times, at = [], NOW - 2000
    for step in range(10, 301, 10):
        at += 10
        times.append((step, at))
        at += 120 if step % 100 == 0 else 0
    folder.records = [folder.record(step, time=t - times[-1][1] + NOW - 180) for step, t in times]


def wedged_after_a_nap(folder: Folder) -> None:
    """Once, long ago, nothing happened for an hour."""
    older(folder, 600)
    for record in folder.records[:5]:
        record["time"] -= 3600
    for host in folder.hosts.values():
        host["clock"] -= 3600
    folder.jobs = [folder.job("RUNNING", at=NOW - 9000)]


def warnings_on_stderr(folder: Folder) -> None:
    folder.logs["n0.err"] = (Path(__file__).parent / "harmless.txt").read_text()


def error_on_stderr(folder: Folder) -> None:
    folder.logs["n0.err"] = "RuntimeError: [rank1] Connection closed by peer\n"
    folder.logs["n1.err"] = (
        "UserWarning: x\nTraceback (most recent call last):\n  File\nValueError: the cause\nerror: b\n"
    )


def not_finite(folder: Folder) -> None:
    folder.records.append(folder.record(310, loss=None, grad_norm=None))


def skipped(folder: Folder) -> None:
    folder.records[-3]["nonfinite"] = folder.records[-2]["nonfinite"] = folder.records[-1]["nonfinite"] = 2


def spike(folder: Folder) -> None:
    folder.records[-1]["loss"] = folder.records[-2]["loss"] = 19.0


def spike_that_passed(folder: Folder) -> None:
    folder.records[-2]["loss"] = 19.0


def falling_fast(folder: Folder) -> None:
    folder.records = [folder.record(step, loss=10.0 * 0.9 ** (step / 10)) for step in range(10, 301, 10)]


def nobody(folder: Folder) -> None:
    folder.samples["n1"] = [
        folder.sample(each["time"], processes=[], memory_used=500 << 20, utilisation=0) for each in folder.samples["n1"]
    ]


def hidden_by_a_container(folder: Folder) -> None:
    folder.samples["n1"] = [folder.sample(each["time"], processes=[]) for each in folder.samples["n1"]]


def one_gpu_unused(folder: Folder) -> None:
    for sample in folder.samples["n1"]:
        sample["devices"][1] |= {"processes": [], "memory_used": 0}


def nobody_yet(folder: Folder) -> None:
    starting(folder)
    folder.samples = {"n0": [folder.sample(NOW - ago, processes=[], memory_used=0) for ago in range(60, -1, -5)]}


def powered_off(folder: Folder) -> None:
    folder.samples["n1"] = [folder.sample(NOW - 120 - 5 * ago) for ago in range(10, -1, -1)]
    older(folder, 40)


def lost_node(folder: Folder) -> None:
    folder.beats = {"n0": NOW - 1, "n1": NOW - 11}
    folder.logs["n0.err"] = "error: rank 0: lost another rank: Connection closed by peer\n"
    older(folder, 5)


def too_few_for_elastic(folder: Folder) -> None:
    lost_node(folder)
    folder.attempts = [{"attempt": 1, "time": NOW - 100}, {"waiting": "needs 2 nodes, 1 is alive", "time": NOW - 5}]


def smaller_attempt(folder: Folder) -> None:
    folder.attempts = [{"attempt": 2, "time": NOW - 3550, "ranks": folder.launch["ranks"]}]
    folder.launch |= {"ranks": 2 * folder.launch["ranks"]}


def next_attempt(folder: Folder) -> None:
    older(folder, 5)
    folder.attempts = [{"attempt": 1, "time": NOW - 100}, {"attempt": 2, "time": NOW - 2, "unused": {"n1": "is down"}}]


def validated_first(folder: Folder) -> None:
    folder.records = [{"step": 0, "valid_loss": 8.0, "time": NOW - 5}]


def late_heartbeat(folder: Folder) -> None:
    """A record, which needs all ranks, is younger than the heartbeat."""
    folder.beats = {"n0": NOW - 1, "n1": NOW - 25}


def ended_in_order(folder: Folder) -> None:
    """The agent of n1 has removed its file."""
    folder.beats = {"n0": NOW - 1}


def too_few_nodes(folder: Folder) -> None:
    waiting("Resources")(folder)
    folder.launch |= {"partitions": ["a10", "gpu"], "placement": ["a10:1", "a100:2"]}
    folder.jobs[0]["missing"] = {"partition": "gpu", "needed": 2, "alive": 1, "down": ["n1 is down"]}


def slow_steps(folder: Folder) -> None:
    """For 20 minutes steps took 1 s, and since a minute 6 s."""
    folder.records = [folder.record(step, time=NOW - 1270 + 10 * (step / 10)) for step in range(10, 1210, 10)]
    for ago, record in enumerate(reversed(folder.records)):
        record |= {"time": NOW - 10 * (ago + 1), "seconds": 6.0 if ago < 7 else 1.0}


def shared_machine(folder: Folder) -> None:
    """All ranks take six times as long: they wait for cores that other processes use."""
    slow_steps(folder)
    for record in folder.records:
        waited = 5.2 if record["seconds"] == 6.0 else 0.1
        record["rank_seconds"] = {"slowest": 0, "seconds": 1.0, "median": 1.0, "core_wait": waited}


def uneven_steps(folder: Folder) -> None:
    """A shared machine: every third minute takes as long as the last one."""
    slow_steps(folder)
    for number, record in enumerate(folder.records):
        record["seconds"] = 6.0 if number // 6 % 3 == 0 or number > 112 else 1.0


def briefly_slow_steps(folder: Folder) -> None:
    slow_steps(folder)
    for record in folder.records[:-2]:
        record["seconds"] = 1.0


def larger_batch(folder: Folder) -> None:
    slow_steps(folder)
    for record in folder.records:
        record["global_batch"] = 24 if record["seconds"] == 6.0 else 4


def other_layout(folder: Folder) -> None:
    folder.hosts["n1"]["layout"] |= {"partition": "2-0", "global_batch": 8}


def fewer_ranks(folder: Folder) -> None:
    for host in folder.hosts.values():
        host["layout"] |= {"world": 2, "data": 1}
    folder.hosts["n0"]["ranks"], folder.hosts["n1"]["ranks"] = [0], [1]


def slow(folder: Folder) -> None:
    for record in folder.records[-8:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 1.4, "median": 0.9}


def slow_in_turns(folder: Folder) -> None:
    for number, record in enumerate(folder.records[-4:]):
        record["rank_seconds"] = {"slowest": number, "seconds": 1.4, "median": 0.9}


def slow_for_a_moment(folder: Folder) -> None:
    """Steps of milliseconds, each with a record."""
    folder.records += [folder.record(300 + number, time=NOW - 10 + number / 10) for number in range(20)]
    for record in folder.records[-20:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 1.4, "median": 0.9}


def slow_by_chance(folder: Folder) -> None:
    for record in folder.records[-3:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 1.4, "median": 0.9}


def much_slower(folder: Folder) -> None:
    for record in folder.records[-3:]:
        record["rank_seconds"] = {"slowest": 3, "seconds": 5.4, "median": 0.9}


def slow_host(folder: Folder) -> None:
    for number, record in enumerate(folder.records[-8:]):
        record["rank_seconds"] = {"slowest": 2 + number % 2, "seconds": 1.4, "median": 0.9}


def full_disk(folder: Folder) -> None:
    folder.samples["n1"][-1]["disk"] = {"free": 1000, "total": 1 << 40}


def filling_disk(folder: Folder) -> None:
    folder.samples["n1"][-1]["disk"] = {"free": 20 << 30, "total": 1 << 40}


def other_torch(folder: Folder) -> None:
    folder.hosts["n1"]["versions"] = {"torch": "2.12.0"}


def other_clock(folder: Folder) -> None:
    folder.hosts["n1"]["clock"] -= 30


def hot(folder: Folder) -> None:
    folder.samples["n0"][-1]["devices"][1]["temperature"] = 94


def frozen(folder: Folder) -> None:
    """A process that holds two GPUs, and an entry that is none."""
    for device in folder.samples["n1"][-1]["devices"]:
        device["processes"] = [{"pid": 2, "name": "python", "stopped": True}, {"pid": 1}, "?", None]


def wedged_at_a_restart(folder: Folder) -> None:
    """Pre-empted an hour ago, started again half an hour ago, and the ranks have not met since."""
    folder.manifest |= {"state": "interrupted", "ended": iso(NOW - 3600)}
    for record in folder.records:
        record["time"] -= 3600
    folder.jobs.append(folder.job("RUNNING", at=NOW - 1800, restarts=1))
    for host in folder.hosts.values():
        host["clock"] -= 7200


def restarted_and_importing(folder: Folder) -> None:
    wedged_at_a_restart(folder)
    folder.jobs[-1]["time"] = iso(NOW - 60)
    for samples in folder.samples.values():
        for sample in samples:
            for device in sample["devices"]:
                device |= {"processes": [], "memory_used": 0}


def written_as_nan(folder: Folder) -> None:
    folder.records[-1]["loss"] = float("nan")


def overflowed(folder: Folder) -> None:
    folder.records[-1] |= {"grad_norm": None, "skipped": 3}
    folder.records[-2] |= {"skipped": 2}
