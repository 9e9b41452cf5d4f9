"""What is wrong with a job's files or its memory is found before it is queued."""

import os
import shutil
from pathlib import Path

import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.site_section import ContainerSection, SiteSection, SlurmSection
from steelyard.launch import preflight, submit
from steelyard.launch.submit import SubmitRequest
from tests import preloaded


@pytest.fixture
def queue(in_workplace, monkeypatch):
    """A program of ours in the place of sbatch notes what is queued."""
    sbatch = in_workplace.path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/bash\ntouch queued\necho 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "subprocess", preloaded)
    return in_workplace.path / "queued"


def asked(*overrides: str, **changes) -> SubmitRequest:
    return SubmitRequest(
        "slurm", **({"site": SiteSection(ranks_per_node=1)} | changes), recipe=load_recipe("tiny.toml", overrides)
    )


def refused(queue: Path, request: SubmitRequest, message: str) -> None:
    with pytest.raises(UserError, match=message):
        submit.submit(request)
    assert not queue.exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=tokns_text_document", "there is no token file tokns_text_document.idx"),
        ("data.valid=damaged", "this is not an index of token files"),
        ("model.vocab=10", "contains the id"),
        ("data.tokenizer=./tokenizer.json", r"data\.tokenizer: there is no \S*tokenizer\.json"),
        ("data.tokenizer=damaged.idx", "damaged.idx"),
        ("train.init_from=./runs/another", r"train\.init_from: there is no \./runs/another"),
        ("train.init_from=tiny.toml", "is not a checkpoint of a supported format"),
    ],
)
def test_files_that_are_missing_or_wrong_are_told_before_the_job_is_queued(queue, override, message):
    for name in ("damaged.idx", "damaged.bin"):
        Path(name).write_text("nothing")
    refused(queue, asked(override), message)


def test_a_sound_job_is_queued_without_a_warning(queue, capsys):
    submit.submit(asked("train.device=cpu"))
    assert queue.exists()
    assert "warning" not in capsys.readouterr().err


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a second file system")
def test_what_cannot_be_seen_from_here_is_named_in_a_warning(queue, capsys):
    hidden = "/dev/shm/steelyard-no-such-folder/tokens"
    submit.submit(asked(f"data.train={hidden}", "data.tokenizer=someone/small", "train.device=cpu"))
    assert queue.exists()
    reported = capsys.readouterr().err
    assert f"data.train: {hidden} is not visible on this machine" in reported
    assert "data.tokenizer: someone/small" in reported


def test_paths_inside_a_container_are_looked_for_where_they_are_bound_from(queue, capsys):
    Path("elsewhere").mkdir()
    for name in ("tokens_text_document.idx", "tokens_text_document.bin"):
        shutil.move(name, f"elsewhere/{name}")
    container = ContainerSection(kind="docker", image="x", binds=[f"{Path.cwd()}/elsewhere:/data"])
    bound = SiteSection(ranks_per_node=1, container=container)
    refused(queue, asked("data.train=/data/other", site=bound), "there is no token file /data/other.idx")
    submit.submit(asked("data.train=/data/tokens_text_document", "train.device=cpu", site=bound))
    assert "warning" not in capsys.readouterr().err
    submit.submit(asked("data.train=/image/tokens", "train.device=cpu", site=bound, run=Path("second")))
    assert "data.train: /image/tokens is not visible" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_the_gpus_is_refused_with_what_would_help(queue, capsys):
    data = [f"data.train={Path.cwd()}/tokens_text_document"]
    large = load_recipe("gpt2-xl", [*data, "parallel.pipeline=1", "train.micro_batch=64", "train.global_batch=64"])
    request = SubmitRequest("slurm", SiteSection(slurm=SlurmSection(gres="gpu:t4:1")), recipe=large)
    with pytest.raises(UserError, match=r"pipeline rank 0 needs .*, but t4 has") as error:
        submit.submit(request)
    assert "would need" in str(error.value.hint)
    assert not queue.exists()
    submit.submit(asked("train.device=auto", site=SiteSection(slurm=SlurmSection(gres="gpu:1"))))
    assert "memory was not checked" in capsys.readouterr().err


def test_a_study_of_jobs_is_refused_before_its_first_trial(queue, in_workplace):
    done = in_workplace.steelyard("tune", "tiny.toml", "data.train=tokns", "--on", "slurm", "--nproc", "2")
    assert done.returncode == UserError.exit_code
    assert "there is no token file tokns.idx" in done.stderr
    assert not Path("studies").exists()
