"""Real ranks that raise, die and hang. A job ends soon, tells one error, and leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.launch import spawn
from steelyard.launch.error_file import ErrorRecord
from steelyard.launch.root_cause import RankExit, find_root_cause
from tests import preloaded
from tests.conftest import kill

LAUNCHER = "import sys; from steelyard.launch import spawn; sys.exit(spawn.run(sys.argv[2:], int(sys.argv[1])))"

# A rank as `steelyard train` is one: what it raises ends in the command line's main.
RANK = """
import os, signal, sys, time
from pathlib import Path
from steelyard import cli
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError

def work(world):
    {work}

def run(words):
    def command(**_):
        import torch, torch.distributed as dist
        from steelyard.parallel.world import init_distributed, run_on_rank0
        from steelyard.training.graceful_stop import stop_request
        globals().update(torch=torch, dist=dist, run_on_rank0=run_on_rank0, stop_request=stop_request)
        with init_distributed("cpu", {timeout}) as world:
            Path(f"rank-{{world.rank}}.pid").write_text(str(os.getpid()))
            work(world)
    return command

cli.app = run
cli.main([])
"""


class Job:
    """A launcher of ranks that do `work`, and a way to see what is left of them."""

    def __init__(self, folder: Path, work: str, nproc: int = 3, timeout: float = 60.0) -> None:
        self.folder, self.nproc = folder, nproc
        (folder / "rank.py").write_text(RANK.format(work=work.strip().replace("\n", "\n    "), timeout=timeout))
        command = [sys.executable, "-c", LAUNCHER, str(nproc), sys.executable, "rank.py"]
        self.process = preloaded.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def ranks(self) -> list[int]:
        """Process numbers, once every rank has met the others."""
        files = [self.folder / f"rank-{rank}.pid" for rank in range(self.nproc)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def end(self, within: float = 300) -> str:
        """Wait for the end of the job, see that nothing is left, and return what it told."""
        try:
            _, reported = self.process.communicate(timeout=within)
        finally:
            kill(self.process)
        wait_until(lambda: not self.left(), 60)
        return reported

    def left(self) -> list[int]:
        """Processes that stand in the job's folder."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                is_ours = entry.name.isdigit() and (entry / "cwd").readlink() == self.folder
                if is_ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture
def start(tmp_path):
    """Start jobs, each in a folder of its own; a test that fails leaves nothing running either."""
    jobs = []

    def start(work: str, **options) -> Job:
        folder = tmp_path / f"job-{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(folder, work, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        kill(job.process)
        for number in job.left():
            os.kill(number, signal.SIGKILL)


def wait_until(holds, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "this did not come about in time"
        time.sleep(0.02)


FOREVER = "while True: dist.all_reduce(torch.ones(1)); time.sleep(0.01)"


def test_ranks_meet_and_rank_0_alone_is_heard(start):
    work = """
print("rank", world.rank, "of", world.size, os.environ["OMP_NUM_THREADS"], flush=True)
total = torch.tensor(world.rank)
dist.all_reduce(total)
assert total == 3
"""
    job = start(work)
    out, reported = job.process.communicate(timeout=600)
    assert (job.process.returncode, out, reported) == (0, "rank 0 of 3 1\n", "")
    assert job.left() == []


@pytest.mark.slow
def test_a_rank_that_raises_is_named_and_the_others_do_not_wait(start):
    work = f"if world.rank == 2: time.sleep(1); raise RuntimeFailure('the disk of rank 2 is full')\n{FOREVER}"
    job = start(work)
    job.ranks()
    reported = job.end()
    assert (job.process.returncode, reported) == (1, "error: rank 2: the disk of rank 2 is full\n")


def test_a_killed_rank_is_named(start):
    job = start(FOREVER)
    os.kill(job.ranks()[1], signal.SIGKILL)
    reported = job.end()
    assert job.process.returncode == 1
    assert reported == "error: rank 1 was killed by SIGKILL\n  out of memory? see dmesg\n"


@pytest.mark.slow
def test_a_rank_that_stops_answering_is_named_after_the_timeout(start):
    job = start(FOREVER, timeout=6 / 60)
    os.kill(job.ranks()[1], signal.SIGSTOP)
    reported = job.end()
    assert (job.process.returncode, reported) == (
        1,
        "error: rank 1 stopped responding, and the other ranks timed out\n",
    )


def test_a_mistake_that_rank_0_finds_is_told_once_without_a_rank(start):
    work = "run_on_rank0(world, lambda: (_ for _ in ()).throw(UserError('wrong', where='a.toml:3', hint='correct it')))"
    job = start(work)
    assert job.end() == "error: a.toml:3: wrong\n  hint: correct it\n"
    assert job.process.returncode == 2


@pytest.mark.slow
def test_a_bug_and_a_crash_before_python_can_speak_are_told_with_their_rank(start):
    job = start(f"if world.rank == 1: {{}}['key']\n{FOREVER}")
    assert "error: rank 1: KeyError: 'key'" in job.end()
    assert job.process.returncode == 1
    job = start("if world.rank == 1: print('the last line', flush=True); os._exit(7)\ntime.sleep(99)")
    reported = job.end()
    assert reported == "error: rank 1 ended with exit code 7\n  its last lines:\n  | the last line\n"
    assert job.process.returncode == 7


STOPPABLE = """
with stop_request() as stop:
    for step in range(1, 10_000):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01 * world.rank)
        if stop.agreed():
            Path(f"stopped-{world.rank}").write_text(str(step))
            raise Interrupted("saved step")
"""


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_stops_all_ranks_at_one_step(start, number):
    job = start(STOPPABLE)
    job.ranks()
    time.sleep(0.5)
    job.process.send_signal(number)
    lines = [line for line in job.end().splitlines() if not line.startswith("stopping after")]
    assert lines == ["error: interrupted; saved step"]
    assert job.process.returncode == 130
    assert len({(job.folder / f"stopped-{rank}").read_text() for rank in range(3)}) == 1


@pytest.mark.slow
def test_a_signal_that_reaches_one_rank_stops_all_at_one_step(start):
    job = start(STOPPABLE)
    ranks = job.ranks()
    time.sleep(0.5)
    os.kill(ranks[2], signal.SIGUSR1)
    assert "error: interrupted; saved step" in job.end()
    assert job.process.returncode == 130
    assert len({(job.folder / f"stopped-{rank}").read_text() for rank in range(3)}) == 1


@pytest.mark.slow
def test_asked_twice_the_launcher_ends_ranks_that_cannot_hear(start):
    work = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])\ntime.sleep(999)"
    job = start(work)
    job.ranks()
    job.process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == "error: interrupted\n"
    assert job.process.returncode == 130


def test_when_the_launcher_is_killed_the_ranks_die(start):
    job = start(FOREVER)
    ranks = job.ranks()
    kill(job.process)
    wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 60)
    assert job.left() == []


@pytest.mark.slow
def test_what_a_dead_rank_started_is_ended_with_it(start):
    work = f"import subprocess; subprocess.Popen(['sleep', '600'])\nif world.rank == 1: os._exit(3)\n{FOREVER}"
    job = start(work)
    assert "rank 1 ended with exit code 3" in job.end()


def words(kind="Fault", lost=False, shared=False, at=0.0, code=1) -> ErrorRecord:
    return ErrorRecord(kind, f"{kind} at {at}", code, at, lost, shared)


def ended(rank, code, said=None, sent=(), at=9.0) -> RankExit:
    return RankExit(rank, code, at, frozenset(sent), said)


@pytest.mark.parametrize(
    ("ends", "hung", "asked", "message"),
    [
        ([ended(0, 0), ended(1, 0)], [], False, None),
        ([ended(0, 1, words(at=2)), ended(1, 1, words(at=1))], [], False, "rank 1: Fault at 1"),
        ([ended(0, 1, words(lost=True, at=1)), ended(1, 1, words(at=2))], [], False, "rank 1: Fault at 2"),
        ([ended(0, 1, words(lost=True, at=1)), ended(1, -9)], [], False, "rank 1 was killed by SIGKILL"),
        ([ended(0, 1, words(lost=True, at=1)), ended(1, -9, sent=[9])], [1], False, "rank 1 stopped responding"),
        ([ended(0, -6), ended(1, -9, sent=[9])], [1], False, "rank 1 stopped responding"),
        ([ended(0, -6), ended(1, -9)], [], False, "rank 1 was killed by SIGKILL"),
        ([ended(0, 0), ended(1, -6)], [], False, "rank 1 was killed by SIGABRT"),
        ([ended(0, 1, words(lost=True)), ended(1, 130, words("Interrupted"), [15])], [1], False, "rank 1 stopped"),
        ([ended(0, 2, words(shared=True, at=2)), ended(1, 2, words(shared=True, at=1))], [], False, "Fault at 2"),
        ([ended(0, 1, words(lost=True, at=3)), ended(1, 1, words(lost=True, at=1))], [], False, "rank 1: Fault at 1"),
        ([ended(0, -2, sent=[2]), ended(1, 1, words(lost=True))], [], True, "interrupted"),
        ([ended(0, 1, words(at=5)), ended(1, -2, sent=[2])], [], True, "rank 0: Fault at 5"),
    ],
)
def test_the_error_that_counts_is_told(ends, hung, asked, message):
    cause = find_root_cause(ends, hung, asked)
    assert (cause.message[: len(message)] == message) if message else cause is None


def test_who_is_killed_after_saying_why_it_ends_has_failed_and_who_only_lost_others_was_stopped():
    said = words("UserError", shared=True, code=2)
    assert find_root_cause([ended(0, -15, said, sent=[15])], [], True).exit_code == 2
    assert find_root_cause([ended(0, -15, words(lost=True), sent=[15])], [], True).exit_code == 130


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert spawn.rank_environment(3, {})["OMP_NUM_THREADS"] == "2"
    assert spawn.rank_environment(99, {})["OMP_NUM_THREADS"] == "1"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in spawn.rank_environment(2, {})
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert spawn.rank_environment(3, {})["OMP_NUM_THREADS"] == "5"


def test_the_launcher_imports_no_torch():
    code = "import sys, steelyard.launch.spawn, steelyard.cli.train; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_a_plan_says_how_many_ranks_it_runs_on(workplace):
    plan = ParallelSection(tensor=2, pipeline=2)
    assert (plan.data_for(4), plan.data_for(12)) == (1, 3)
    for world, wrong in ((6, plan), (2, plan), (8, ParallelSection(tensor=2, data=2)), (1, plan)):
        with pytest.raises(UserError, match=f"not on {world}"):
            wrong.data_for(world)
    assert load_recipe(workplace.recipe).parallel.data_for(7) == 7


def test_ranks_that_do_not_fit_the_plan_are_refused_before_any_starts(workplace):
    done = workplace.steelyard("train", "tiny.toml", "parallel.tensor=2", "--nproc", "3")
    assert done.returncode == 2
    assert "runs on a multiple of 2 ranks, not on 3" in done.stderr
    assert not (workplace.path / "runs").exists()


def test_a_launcher_inside_a_launch_is_refused(workplace):
    inside = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "0202", strict=True))
    done = workplace.steelyard("train", "tiny.toml", "--nproc", "2", env=os.environ | inside)
    assert done.returncode == 2
    assert "torchrun has already started 2" in done.stderr
