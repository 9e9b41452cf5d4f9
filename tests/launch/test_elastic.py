"""Elastic runs with groups of ranks as nodes: a lost node is replaced by a new plan, and no sample is lost or repeated.

Most tests have ranks without torch: a script that saves "checkpoints". The node agents and their supervisor are real.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from steelyard.core.errors import RuntimeFailure
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.site_section import ContainerSection
from steelyard.core.recipe.toml import leaves, read
from steelyard.core.run import Run
from steelyard.launch import elastic, elastic_job, lock_wait, node_end
from steelyard.launch.backends import slurm_script
from steelyard.launch.job_spec import JobSpec, NodeGroup
from steelyard.launch.sites import SiteSection
from tests.conftest import TINY, Workplace, kill
from tests.preloaded import descendants, loaded_host
from tests.test_guides import commands

pytestmark = pytest.mark.timeout(900)
NODES = ("--on", "local", "--nodes", "3", "--ranks-per-node", "1", "--min-nodes", "2")
# Rank 0 "saves" once a second, or fails as the file says.
RANK = """
import os, pathlib, sys, time
run, step = pathlib.Path(sys.argv[1]), 0
while True:
    if os.environ["RANK"] == "0":
        step = 1 + max([int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")], default=0)
        (run / "checkpoints" / f"step-{step:08d}").mkdir()
        if (run / "done").exists():
            break
    if (run / f"fail-{os.environ['RANK']}").exists():
        sys.exit(1)
    time.sleep(1)
"""


def until(holds, what: str, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def attempts(run: Path) -> list[dict]:
    return [each for each in elastic_job.attempts(run) if "attempt" in each]


def agent_of(run: Path, node: str) -> int:
    """The process of the node agent of a node; of a forked agent, the fork."""
    agents = list(agents_of(run, node))
    assert agents, f"{node} has no agent"
    return max(agents, key=lambda process: len(descendants(process)))


def agents_of(run: Path, node: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        is_agent = b"steelyard.launch.node_agent" in words and str(run).encode() in words
        if is_agent and words[words.index(b"--name") + 1] == node.encode():
            yield int(path.parent.name)


def supervisors(run: Path) -> list[int]:
    """The processes that supervise a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"steelyard.launch.elastic" in words and str(run).encode() in words:
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def loaded_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which node agents, and so the ranks that train, are forks of a loaded process."""
    with loaded_host(tmp_path_factory.mktemp("loaded") / "warm") as (_, variables):
        yield variables


@pytest.fixture
def forked_agents(loaded_agents: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in loaded_agents.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run(in_workplace: Workplace) -> Path:
    """A run folder with an elastic job of three nodes whose ranks are scripts."""
    run = in_workplace.path / "runs" / "tiny"
    for name in ("launch", "logs", "checkpoints"):
        (run / name).mkdir(parents=True)
    (run / "launch" / elastic_job.SUBMITTED).write_text(TINY.replace("global_batch = 4", "global_batch = 12"))
    (run / "rank.py").write_text(RANK)
    python = [sys.executable, "-P"]
    job = elastic_job.ElasticJob(
        "local", 2, [{"type": "node", "nodes": 3, "ranks": 1, "cpus": 1}],
        {"nodes": [{"type": "node", "count": 3, "gpu": "cpu", "gpus": 1}]},
        [*python, "-m", "steelyard.launch.node_agent", "--backend", "local", "--run", str(run)],
        ["--", *python, str(run / "rank.py"), str(run)],
    )  # fmt: skip
    (run / "launch" / elastic_job.JOB).write_text(json.dumps(asdict(job)))
    return run


def start(run: Path) -> subprocess.Popen:
    words = [sys.executable, "-P", "-m", "steelyard.launch.elastic", str(run)]
    with open(run / "logs" / "launcher.log", "wb") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


@pytest.fixture
def supervised(run: Path) -> Iterator[tuple[Path, subprocess.Popen]]:
    process = start(run)
    alive = run / "launch" / "alive"
    until(lambda: elastic.newest_checkpoint(run) > 0 and len(list(alive.glob("node-*"))) == 3, "the first attempt")
    yield run, process
    kill(process)


def until_attempt(run: Path, number: int) -> dict:
    until(lambda: len(attempts(run)) >= number, f"attempt {number}: {(run / 'logs' / 'launcher.log').read_text()}")
    return attempts(run)[number - 1]


@pytest.mark.slow
def test_a_node_that_does_not_answer_is_left_out_and_used_again_after_a_checkpoint(supervised):
    run, process = supervised
    os.kill(agent_of(run, "node-1"), signal.SIGSTOP)
    second = until_attempt(run, 2)
    assert second["nodes"] == ["node-0", "node-2"]
    assert second["why"].startswith("node-1 does not answer since")
    third = until_attempt(run, 3)
    assert (third["nodes"], third["why"]) == (["node-0", "node-1", "node-2"], "node-1 can be used again")
    assert third["layout"] == attempts(run)[0]["layout"] != second["layout"]
    (run / "fail-1").touch()
    assert process.wait(timeout=300) == 1, "rank 1 failed on its own: another attempt would fail again"
    assert len(attempts(run)) == 3


@pytest.mark.slow
def test_a_drained_node_is_given_back_and_too_few_nodes_wait(supervised):
    run, process = supervised
    (run / "launch" / "drain").write_text("node-2\n")
    second = until_attempt(run, 2)
    assert (second["why"], second["nodes"]) == ("node-2 is drained (launch/drain)", ["node-0", "node-1"])
    (run / "launch" / "drain").write_text("node-0\nnode-2\n")
    until(lambda: "waiting" in elastic_job.attempts(run)[-1], "a reason to wait")
    waiting = elastic_job.attempts(run)[-1]["waiting"]
    assert waiting.startswith("needs 2 nodes, 1 is alive (node-0 is drained (launch/drain), node-2"), waiting
    process.terminate()
    assert process.wait(timeout=300) == 130
    assert len(attempts(run)) == 2


def block(path: Path) -> None:
    """Make every write of a file fail, as a full disk would, until the folder is removed."""
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.slow
def test_errors_of_the_filesystem_in_the_supervisor_are_logged_and_the_run_goes_on(supervised):
    run, process = supervised
    log, recipe = run / "logs" / "launcher.log", run / "launch" / "recipe.toml"
    block(run / elastic_job.ATTEMPTS)
    block(recipe)
    os.kill(agent_of(run, "node-1"), signal.SIGKILL)
    until(lambda: "launch/recipe.toml cannot be written" in log.read_text(), "the first error")
    recipe.rmdir()
    until(lambda: "attempt 2 on node-0, node-2" in log.read_text(), "the second attempt")
    assert f"{elastic_job.ATTEMPTS} cannot be written" in log.read_text()
    saved = elastic.newest_checkpoint(run)
    until(lambda: elastic.newest_checkpoint(run) > saved, "a checkpoint of the second attempt")
    block(request := run / "launch" / f"{node_end.REQUEST}{process.pid}.2")
    process.terminate()
    until(lambda: "the request to the nodes (save) cannot be written" in log.read_text(), "the third error")
    request.rmdir()
    assert process.wait(timeout=300) == 130, log.read_text()


@pytest.mark.slow
def test_a_rank_that_fails_beside_ranks_that_wait_for_it_ends_the_run(run: Path):
    job = json.loads((run / "launch" / elastic_job.JOB).read_text())
    job["min_nodes"], job["groups"] = 1, [job["groups"][0] | {"nodes": 2, "ranks": 2}]
    job["cluster"]["nodes"][0] |= {"count": 2, "gpus": 2}
    (run / "launch" / elastic_job.JOB).write_text(json.dumps(job))
    (run / "fail-3").touch()
    done = subprocess.run([sys.executable, "-P", "-m", "steelyard.launch.elastic", str(run)], timeout=300)
    assert done.returncode == 1
    assert len(attempts(run)) == 1, "no node was lost"


def test_a_lost_node_that_is_drained_is_shown_as_drained(run: Path):
    (run / "launch" / "drain").write_text("node-2\n")
    supervisor = elastic.Elastic(run, [])
    supervisor.losses |= {f"node-{number}": elastic.Loss("lost its node agent", -1, 1) for number in (1, 2)}
    assert [node.name for node in supervisor._usable()] == ["node-0"]
    assert supervisor.unused == {"node-1": "lost its node agent", "node-2": "is drained (launch/drain)"}


@pytest.mark.slow
def test_a_node_that_does_not_start_is_lost_after_the_time_of_its_job(run: Path):
    job = json.loads((run / "launch" / elastic_job.JOB).read_text())
    job |= {"agent": [sys.executable, "-P", "-c", "import time; time.sleep(600)"], "seconds_to_start": 2}
    (run / "launch" / elastic_job.JOB).write_text(json.dumps(job))
    process = start(run)
    try:
        why = until_attempt(run, 2)["why"]
    finally:
        kill(process)
    assert why == ", ".join(f"node-{number} did not start within 2 s" for number in range(3))


@pytest.mark.parametrize(("kind", "seconds"), [("none", 90), ("pyxis", 900), ("apptainer", 900)])
def test_a_node_may_take_longer_to_start_if_it_pulls_an_image(in_workplace: Workplace, kind, seconds):
    site = SiteSection(container=ContainerSection(kind=kind, image="" if kind == "none" else "repo/image:1"))
    spec = JobSpec(
        run=in_workplace.path, site=site, submitted="now", groups=[NodeGroup(3, 1)], command=["true"], name="x",
        python="python3", workdir=str(in_workplace.path), min_nodes=2,
    )  # fmt: skip
    job = elastic_job.of(spec, "slurm", ["agent"], None, load_recipe("tiny.toml", ["train.device=cpu"]))
    assert job.seconds_to_start == seconds


# Holds the lock of a run folder as a lost node does on NFS: no process of this machine can end it.
HOLD = """
import sys, time
from pathlib import Path
from steelyard.core import files
with files.locked(Path(sys.argv[1])) as lock:
    lock.write("process 7 on b2")
    lock.flush()
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(run: Path) -> Iterator[subprocess.Popen]:
    words = [sys.executable, "-P", "-c", HOLD, str(run / "run.lock")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    kill(process)


@pytest.mark.slow
def test_an_attempt_waits_for_the_lock_of_a_lost_node(run: Path, held: subprocess.Popen):
    (run / "done").touch()
    words = [sys.executable, "-P", "-m", "steelyard.launch.elastic", str(run)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert "is in use by process 7 on b2; tries again for 300 s" in process.stderr.readline()
        assert not attempts(run)
        assert "is in use by process 7 on b2" in elastic_job.attempts(run)[-1]["waiting"]
        held.communicate(timeout=60)
        until(lambda: attempts(run), "the attempt")
    finally:
        kill(process)


def test_a_lock_that_is_not_released_ends_the_run_with_its_owner(run: Path, held: subprocess.Popen, monkeypatch):
    messages: list[str] = []
    assert not lock_wait.until_free(run, [signal.SIGUSR1], messages.append)
    monkeypatch.setattr(lock_wait, "SECONDS_TO_RELEASE", 0.0)
    monkeypatch.setattr(lock_wait, "SECONDS_BETWEEN_TRIES", 0.01)
    with pytest.raises(RuntimeFailure, match="still in use by process 7 on b2 after 0 s"):
        lock_wait.until_free(run, [], messages.append)
    assert len(messages) == 1
    held.communicate(timeout=60)
    assert lock_wait.until_free(run, [], messages.append)


@pytest.mark.slow
def test_the_warning_of_a_time_limit_ends_and_requeues_a_job_that_waits_for_nodes(run: Path, tmp_path: Path):
    """Slurm signals only the shell of the job script, which is all that it has while no step runs."""
    (run / "launch" / "drain").write_text("node-0\nnode-2\n")
    spec = JobSpec(
        run=run, site=SiteSection(), submitted="now", groups=[NodeGroup(3, 1)], command=["true"], name="x",
        python="python3", workdir=str(run), min_nodes=2,
    )  # fmt: skip
    assert "--signal=B:USR1@120" in slurm_script.sbatch(spec)
    for name, text in {"squeue": "echo RUNNING", "scontrol": 'echo "$@" >requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    given = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    words = ["bash", "-c", slurm_script.text(spec)]
    with open(run / "logs" / "slurm-7.log", "wb") as log:
        script = subprocess.Popen(words, env=given, stdout=log, stderr=log, start_new_session=True)
    try:
        until(lambda: any("waiting" in each for each in elastic_job.attempts(run)), "a reason to wait")
        script.send_signal(signal.SIGUSR1)
        assert script.wait(timeout=300) == 130
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    said = (run / "logs" / "slurm-7.log").read_text()
    assert "stopped by SIGUSR1 between attempts" in said
    assert said.endswith("requeueing the job\n")
    assert (run / "requeued").read_text() == "requeue 7\n"


def test_a_request_to_save_after_a_signal_is_not_a_second_signal(run: Path):
    for signals in ([], [signal.SIGUSR1]):
        requests = node_end.Requests(run, "1", received := list(signals), run / "alive")
        node_end.request(run, "1", node_end.SAVE)
        assert not requests.is_over()
        assert len(received) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("forked_agents")
def test_a_run_that_loses_a_node_trains_like_an_unbroken_one(workplace: Workplace):
    text = TINY.replace("global_batch = 4", "global_batch = 12").replace("[log]\nevery = 2", "[log]\nevery = 1")
    workplace.recipe.write_text(text)
    words = ["tiny.toml", "train.steps=30", "checkpoint.every=10", "eval.every=0", "parallel.timeout_minutes=60"]
    [line] = (line for line in commands("guide-elastic.md") if "--name here" in line)
    submitted = [word.replace("my.toml", "tiny.toml") for word in shlex.split(line)[1:]]
    done = workplace.steelyard(*submitted, *words[1:], "--json")
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout)["run"])
    try:
        until(lambda: elastic.newest_checkpoint(run) >= 10, "a checkpoint")
        (run / "launch" / "drain").write_text("node-2\n")  # So that it stays away.
        os.kill(agent_of(run, "node-2"), signal.SIGKILL)
        until(lambda: Run.open(run).state == "finished", "the end")
    finally:
        for process in supervisors(run):
            os.kill(process, signal.SIGTERM)
    first, second = attempts(run)
    assert (len(first["nodes"]), len(second["nodes"])) == (3, 2)
    whole = workplace.path / "whole"
    assert workplace.steelyard("train", *words, "--run", str(whole)).returncode == 0
    broken, whole = ([each for each in Run.open(path).metrics() if "loss" in each] for path in (run, whole))
    assert [record["step"] for record in broken] == list(range(1, 31))
    assert [record["samples"] for record in broken] == [record["samples"] for record in whole]
    for one, other in zip(broken, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4), one["step"]
    before = dict(leaves(read(run / "launch" / "submitted.toml", "a recipe")[0]))
    after = dict(leaves(read(run / "launch" / "recipe.toml", "a recipe")[0]))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed
    assert all(key.startswith("parallel.") or key == "train.micro_batch" for key in changed), changed


@pytest.mark.slow
@pytest.mark.usefixtures("forked_agents")
def test_a_run_without_a_checkpoint_that_can_be_loaded_ends(workplace: Workplace):
    workplace.recipe.write_text(TINY.replace("global_batch = 4", "global_batch = 12"))
    words = ["tiny.toml", "train.steps=100000", "checkpoint.every=100", "eval.every=0", "parallel.timeout_minutes=60"]
    done = workplace.steelyard("submit", *words, "parallel.data=3", *NODES, "--json")
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout)["run"])
    try:
        until(lambda: elastic.newest_checkpoint(run) >= 100, "a checkpoint")
        assert len(supervisors(run)) == 1
        for rank in descendants(agent_of(run, "node-2")):
            os.kill(rank, signal.SIGSTOP)  # The others wait for it, and no checkpoint follows the damaged ones.
        time.sleep(2)  # A save that had begun ends.
        damaged = sorted((run / "checkpoints").glob("step-*/*"))
        for path in damaged:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        os.kill(agent_of(run, "node-2"), signal.SIGKILL)
        until(lambda: len(attempts(run)) == 2, "the second attempt")
        until(lambda: not supervisors(run), "the end of the supervisor")
        until((run / "launch" / "ended.json").exists, "the end of the job")
    finally:
        for process in supervisors(run):
            os.kill(process, signal.SIGTERM)
    assert json.loads((run / "launch" / "ended.json").read_text())["state"] == "failed"
    assert len(attempts(run)) == 2
    assert all(path.exists() for path in damaged)
    verdict = workplace.steelyard("watch", str(run), "--once")
    assert "every checkpoint in" in verdict.stdout
    assert "is damaged" in verdict.stdout


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--min-nodes", "4"), "--min-nodes is 4, but the job has 3 nodes"),
        (("--min-nodes", "2", "parallel.replicate=3", "parallel.zero=1"), "hybrid sharding"),
        (("--min-nodes", "2", "train.device=cuda"), "GPU type is not known"),
    ],
)
def test_a_run_that_could_not_be_replanned_is_refused(workplace: Workplace, words, reported):
    given = ["tiny.toml", "parallel.data=3", "train.global_batch=12", "--nodes", "3", "--ranks-per-node", "1"]
    done = workplace.steelyard("submit", *given, *words)
    assert done.returncode == 2
    assert reported in done.stderr
    assert not (workplace.path / "runs").exists()
