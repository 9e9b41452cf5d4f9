"""One virtual cluster for all tests here, and a folder with a corpus and recipes that its nodes share."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import preloaded
from tests.cluster.lab import Lab, reason_to_skip
from tests.conftest import write_tokens

RECIPE = """
[model]
family = "gpt"
layers = 4
hidden = 32
heads = 4
vocab = 97

[data]
train = "tokens_text_document"
split = "1,0,0"
sequence_length = 16

[train]
steps = 20
global_batch = 8
micro_batch = 2
device = "cpu"

[optim]
learning_rate = 1e-3

[checkpoint]
every = 10
background = false

[log]
every = 1
"""
MIXED = """
[parallel]
pipeline = 4
partition = "0-2-2-0"
placement = ["a10:2", "a100:2"]
"""
CLUSTER = """
[[nodes]]
type = "a10"
count = 2
gpu = "a10"
gpus = 1
partition = "a10"
gres = "gpu:a10:1"

[[nodes]]
type = "a100"
count = 2
gpu = "a100-40"
gpus = 1
partition = "a100"
gres = "gpu:a100:1"
"""
SITES = """
default = "yard"

[yard.slurm]
cpus_per_rank = 1
partition = "a10"

[yard.environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{source}"
STEELYARD_TESTS_WARM = "{warm}"

[apart.slurm]
cpus_per_rank = 1
heterogeneous = "several-jobs"

[apart.environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{source}"
STEELYARD_TESTS_WARM = "{warm}"
"""
OVER_MPI = """
[hosts.environment]
OMP_NUM_THREADS = "1"
PYTHONPATH = "{source}"
OMPI_ALLOW_RUN_AS_ROOT = "1"
OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = "1"

[hosts.mpi]
hosts = ["10.214.0.11", "10.214.0.21"]
options = ["--mca", "plm_rsh_agent", "{rsh}"]
"""
STEPS = 120
COMMANDS_EVERY = 2.0  # seconds between commands of ours that wait for something
WARM = preloaded.ROOT / "tests" / "warm"  # its sitecustomize.py


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    reason = reason_to_skip()
    if reason:
        pytest.skip(reason)
    made = Lab()
    try:
        made.start()
        yield made
    finally:
        made.stop()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember for `no_job_is_left` whether a test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True)
def no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed test leaves jobs, for whose nodes later tests would wait."""
    yield
    if request.node.stash.get(FAILED, False) and "lab" in request.fixturenames:
        request.getfixturevalue("lab").client("scancel", "--user=root")


@dataclass
class Yard:
    """A folder that all nodes see, and the real command in it."""

    path: Path
    lab: Lab

    @property
    def environment(self) -> dict[str, str]:
        own = {
            "PATH": f"{self.lab.bin}:{os.environ['PATH']}",
            "PYTHONPATH": str(preloaded.ROOT),
            "OMP_NUM_THREADS": "1",
        }
        # Whatever a test has set since the cluster began counts too.
        return self.lab.environment | os.environ | own | {"XDG_CONFIG_HOME": str(self.path / "config")}

    def steelyard(self, *words: str, on_host: str | None = None, beside: str | None = None, code: int | None = 0):
        """Run a command; its exit code must be `code`, or may be any if that is None."""
        command = [sys.executable, "-P", "-m", "steelyard", *words]
        if beside is not None:
            command = self.lab.beside(beside, *command)
        if on_host is not None:
            command = self.lab.inside(on_host, "sh", "-c", 'cd "$0" && exec "$@"', str(self.path), *command)
        done = preloaded.run(command, cwd=self.path, env=self.environment, capture_output=True, text=True, timeout=600)
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    def submit(self, *words: str, **where: str) -> Path:
        """Submit and return the run folder."""
        return Path(json.loads(self.steelyard("submit", "--json", *words, **where).stdout)["run"])

    def records(self, run: Path) -> list[dict]:
        """What the scheduler says now, and has said."""
        self.steelyard("list", str(run.parent), "--json")
        return [json.loads(line) for line in (run / "scheduler.jsonl").read_text().splitlines()]

    def state(self, run: Path) -> str:
        rows = json.loads(self.steelyard("list", str(run.parent), "--json").stdout)["runs"]
        return next(row["state"] for row in rows if row["name"] == run.name)

    def until_state(self, run: Path, *states: str, seconds: float = 400) -> str:
        deadline = time.monotonic() + seconds
        while (found := self.state(run)) not in states:
            assert time.monotonic() < deadline, f"{run.name} is {found}, not {states}\n{everything(run)}"
            time.sleep(COMMANDS_EVERY)
        return found

    def until_step(self, run: Path, step: int, seconds: float = 400) -> None:
        deadline = time.monotonic() + seconds
        while not any(record["step"] >= step for record in metrics(run)):
            assert time.monotonic() < deadline, f"{run.name} came to no step {step}\n{everything(run)}"
            time.sleep(0.1)

    def _all_idle(self) -> bool:
        said = self.lab.client("sinfo", "--noheader", "--Node", "--format=%T").stdout
        return set(said.split()) == {"idle"}

    def _has_no_message_left(self) -> bool:
        """Whether slurmctld has nothing to send again: a job that starts now would get the end of its last attempt."""
        reported = self.lab.client("sdiag").stdout
        return bool(re.search(r"Agent queue size:\s+0\b", reported))

    def verdicts(self, run: Path, code: int, on_host: str | None = None) -> set[str]:
        """The kinds of what watch says of a run, which must exit with a code."""
        return {verdict["kind"] for verdict in self.watched(run, code, on_host)}

    def watched(self, run: Path, code: int, on_host: str | None = None) -> list[dict[str, str]]:
        """The verdicts of watch, which must exit with a code."""
        said = self.steelyard("watch", str(run), "--json", on_host=on_host, code=code).stdout
        verdicts: list[dict[str, str]] = json.loads(said)["verdicts"]
        return verdicts

    def until_verdict(self, run: Path, kind: str, seconds: float = 120) -> dict[str, str]:
        """Wait until watch says this, and return it."""
        found: list[dict[str, str]] = []
        ask = ("watch", str(run), "--json")

        def is_said() -> bool:
            said = json.loads(self.steelyard(*ask, code=None).stdout)["verdicts"]
            found[:] = [verdict for verdict in said if verdict["kind"] == kind]
            return bool(found)

        self.lab.until(is_said, f"watch says {kind}", seconds, every=COMMANDS_EVERY)
        return found[0]

    def until_pending(self, run: Path, seconds: float = 400) -> list[str]:
        """Wait until all jobs of a run, and all their parts, are in the queue; returns the jobs."""
        jobs = json.loads((run / "launch.json").read_text())["jobs"]
        ask = ("squeue", "--noheader", f"--jobs={','.join(jobs)}", "--format=%T")
        self.lab.until(lambda: set(self.lab.client(*ask).stdout.split()) == {"PENDING"}, f"{run.name} pending", seconds)
        return jobs

    def hurry(self, *runs: Path) -> None:
        """Have requeued jobs start now: Slurm would let them wait for two minutes, so that their nodes come to rest.

        One that starts before its earlier attempt is gone from a node is never begun there.
        """
        jobs = [job for run in runs for job in self.until_pending(run)]
        self.lab.until(self._all_idle, "all nodes to be idle", 240)
        self.lab.until(self._has_no_message_left, "Slurm to deliver all signals", 240)
        time.sleep(2)
        for job in jobs:
            self.lab.until(
                lambda job=job: self.lab.client("scontrol", "update", f"job={job}", "StartTime=now").returncode == 0,
                f"job {job} to be pending", 240,
            )  # fmt: skip

    @contextmanager
    def held(self, run: Path, step: int = 10) -> Iterator[None]:
        """Hold a run's rank on a2 once it came to a step, and so all its ranks: a short run then waits for a test."""
        self.until_step(run, step)
        rank = rank_on(self, run, "a2")
        os.kill(rank, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGCONT)

    def is_warned(self, run: Path, times: int = 1) -> bool:
        """Whether rank 0, on a1, was asked to stop so many times."""
        return (run / "logs" / "a1.out").read_text().count("stopping after this step") == times


def assert_trained_on_four_nodes(yard: Yard, run: Path, jobs: int) -> None:
    """See that a run over two partitions has all that it should have."""
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    last = {record["job"]: record for record in yard.records(run)}
    assert sorted(record["nodes"] for record in last.values()) == ["a[1-2]", "b[1-2]"]
    assert {path.stem for path in (run / "logs").glob("*.out")} == {"a1", "a2", "b1", "b2"}
    assert len(json.loads((run / "launch.json").read_text())["jobs"]) == jobs
    assert yard.verdicts(run, 0) == {"completed"}


def metrics(run: Path) -> list[dict]:
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # It is being written.
            break
    return found


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in metrics(run) if "loss" in record}


def everything(run: Path) -> str:
    """All logs of a run, for the message of a failed test."""
    texts = [
        f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted((run / "logs").glob("*")) if path.is_file()
    ]
    return "\n".join(texts)


@pytest.fixture(scope="session")
def yard(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Yard:
    path = tmp_path_factory.mktemp("yard")
    write_tokens(path / "tokens_text_document")
    (path / "alike.toml").write_text(RECIPE)
    (path / "mixed.toml").write_text(RECIPE + MIXED)
    (path / "cluster.toml").write_text(CLUSTER)
    (path / "config" / "steelyard").mkdir(parents=True)
    (path / "config" / "steelyard" / "sites.toml").write_text(
        SITES.format(source=f"{WARM}:{preloaded.ROOT}", warm=lab.warm)
    )
    return Yard(path, lab)


@pytest.fixture(scope="session")
def undisturbed(yard: Yard) -> Path:
    """A run over two nodes of one partition, from beginning to end."""
    words = ["alike.toml", "parallel.data=2", f"train.steps={STEPS}", "--nodes", "2"]
    run = yard.submit(*words, "--on", "slurm", "--name", "whole")
    yard.until_state(run, "finished")
    return run


@pytest.fixture(scope="session")
def undisturbed_mixed(yard: Yard) -> Path:
    """A run over two partitions as one heterogeneous job, 0-2-2-0: the first and last stage hold no layer."""
    words = ["mixed.toml", f"train.steps={STEPS}", "--cluster", "cluster.toml", "--site", "yard"]
    run = yard.submit(*words, "--on", "slurm", "--name", "mixed-yard")
    yard.until_state(run, "finished")
    return run


def rank_on(yard: Yard, run: Path, host: str) -> int:
    """The number, here, of the process that trains on a host."""
    return process_on(yard, run, host)


def process_on(yard: Yard, run: Path, host: str, is_agent: bool = False) -> int:
    """The number, here, of the process that trains on a host, or of its node agent."""
    here, agent = Path(f"/proc/{yard.lab.boxes[host][0]}/ns/uts").readlink(), b"steelyard.launch.node_agent"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            inside = (path.parent / "ns/uts").readlink() == here
        except OSError:
            continue
        is_ours = inside and b"train" in words and str(run).encode() in words and words[0] != b"srun"
        if is_ours and (agent in words) == is_agent:
            return int(path.parent.name)
    raise AssertionError(f"nobody trains on {host}")
