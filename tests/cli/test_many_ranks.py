"""`steelyard train --nproc 2` from end to end, and what a person reads when something goes wrong in it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steelyard.core.run import Run
from tests import preloaded
from tests.conftest import Workplace, kill

PATIENT = "parallel.timeout_minutes=60"  # A rank that waited for a dead one would outlast every test.


def children(process: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while not run.exists() or not any(record["step"] >= step for record in Run.open(run).metrics()):
        assert time.monotonic() < deadline, "the run stands still"
        time.sleep(0.02)


def test_two_ranks_train_as_one_process_does_and_say_it_once(workplace: Workplace):
    words = ["train", "tiny.toml", "train.steps=6", "parallel.zero=1", "--json"]
    done = workplace.steelyard(*words, "--nproc", "2", "--run", "two")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["state"], result["steps"]) == ("finished", 6)
    assert Path(workplace.path / result["report"]).is_file()
    assert done.stderr.count("new run") == 1
    assert "Warning" not in done.stderr
    assert done.stderr.count("validation loss") == 2
    alone = json.loads(workplace.steelyard(*words, "--run", "one").stdout)
    run = Run.open(workplace.path / "two")
    assert run.manifest()["world_size"] == 2
    for key in ("loss", "valid_loss_after"):
        assert result[key] == pytest.approx(alone[key], rel=1e-5)


# Started as `python -c`, ranks are the same code again.
RAISING = """
import os
from steelyard.training.engine import Engine
step = Engine.step
def failing(self, *arguments):
    Engine.count = getattr(Engine, "count", 0) + 1
    if Engine.count == 4 and os.environ["RANK"] == "1":
        raise {error}
    return step(self, *arguments)
if os.environ.get("RANK"):
    Engine.step = failing
from steelyard.cli import main
main()
"""


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        ("OSError(5, 'Input/output error', 'tokens.bin')", "error: rank 1: Input/output error: tokens.bin"),
        pytest.param("KeyError('weights')", "error: rank 1: KeyError: 'weights'", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_raises_is_named_first_and_the_run_goes_on_from_its_checkpoint(workplace, error, reported):
    words = ["train", "tiny.toml", "checkpoint.every=1", "checkpoint.background=false", PATIENT, "--nproc", "2"]
    code = RAISING.format(error=error)
    failed = preloaded.run(
        [sys.executable, "-c", code, *words], cwd=workplace.path, capture_output=True, text=True, timeout=600
    )
    assert failed.returncode == 1
    told_lines = [line for line in failed.stderr.splitlines() if line.startswith("error:")]
    assert [line[: len(reported)] for line in told_lines] == [reported]
    assert Run.open(workplace.path / "runs" / "tiny").state in ("failed", "killed")
    resumed = workplace.steelyard(*words)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed at step 3" in resumed.stderr


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job_soon_and_the_run_can_go_on(workplace: Workplace):
    words = ["train", "tiny.toml", "checkpoint.every=5", "eval.every=0", PATIENT, "--nproc", "2"]
    process = workplace.start(*words, "train.steps=100000")
    try:
        wait_for_step(workplace.path / "runs" / "tiny", 20)
        ranks = children(process.pid)
        os.kill(ranks[1], signal.SIGKILL)
        _, reported = process.communicate(timeout=600)
    finally:
        kill(process)
    assert process.returncode == 1
    assert [line for line in reported.splitlines() if line.startswith("error")] == [
        "error: rank 1 was killed by SIGKILL"
    ]
    assert "Traceback" not in reported
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    run = Run.open(workplace.path / "runs" / "tiny")
    saved = max(int(path.name.removeprefix("step-")) for path in run.checkpoints.glob("step-*"))
    resumed = workplace.steelyard(*words, f"train.steps={saved + 5}")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed at step {saved}" in resumed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.train=nowhere"], "there is no token file nowhere.idx"),
        pytest.param(["trian.steps=5"], "did you mean train.steps?", marks=pytest.mark.slow),
        (["train.global_batch=3", "train.micro_batch=3"], "a batch of 3 does not divide"),
        pytest.param(["train.init_from=nowhere"], "there is no checkpoint nowhere", marks=pytest.mark.slow),
        pytest.param(["data.mask_documents=true"], "need the end-of-document token", marks=pytest.mark.slow),
        pytest.param(["log.wandb=project"], "W&B is not installed", marks=pytest.mark.slow),
        pytest.param(["log.tensorboard=true"], "TensorBoard is not installed", marks=pytest.mark.slow),
        pytest.param(
            ["parallel.pipeline=2", "parallel.data=1", "train.global_batch=2"], "micro-batches", marks=pytest.mark.slow
        ),
    ],
)
def test_a_mistake_is_told_once_and_exits_with_two(workplace, words, message):
    environment = dict(os.environ)
    if "not installed" in message:
        (workplace.path / "stubs").mkdir()
        for name in ("wandb", "tensorboard"):
            (workplace.path / "stubs" / f"{name}.py").write_text("raise ImportError")
        paths = filter(None, [str(workplace.path / "stubs"), os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = workplace.steelyard("train", "tiny.toml", *words, "--nproc", "2", env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(message) == 1
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert "error: rank" not in done.stderr


# As if they were not installed: not found, rather than failing.
ENGINE_ALONE = """
import sys
BLOCKED = {"tokenizers", "sentencepiece", "gigatoken", "orjson", "pyarrow", "zstandard", "huggingface_hub",
           "tensorboard", "transformers", "datasets", "wandb"}
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def found(name, path=None, target=None):
    return None if name.partition(".")[0] in BLOCKED else find(name, path, target)
PathFinder.find_spec = staticmethod(found)
from steelyard.cli import main
main()
"""


@pytest.mark.slow
def test_training_needs_only_torch_numpy_pydantic_tomlkit_typer_and_rich(workplace: Workplace):
    command = [sys.executable, "-c", ENGINE_ALONE, "train", "tiny.toml", "train.steps=2", "--json"]
    done = subprocess.run(command, cwd=workplace.path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "finished"
    assert "Traceback" not in done.stderr
    assert "warning" not in done.stderr
    assert list(workplace.path.glob("runs/*/report.html"))
