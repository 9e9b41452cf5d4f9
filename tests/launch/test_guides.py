"""The guides to launching, line by line, as far as they go without a cluster; tests/cluster has the one to Slurm."""

import os
import shlex
import stat
import sys
from pathlib import Path

import pytest

from steelyard.cli import _cut, app
from tests import preloaded
from tests.conftest import write_documents
from tests.test_guides import DOCS, commands


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder, and a home for the page's sites.toml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "steelyard").mkdir(parents=True)
    return tmp_path


def settle(page: str, *changes: tuple[str, str]) -> str:
    """Write the page's site down, with what this machine has in the place of what it lacks."""
    text = page.split("```toml\n")[1].split("```")[0]
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    Path("config/steelyard/sites.toml").write_text(text)
    return text


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run(line: str, capsys) -> str:
    """A line of a guide in this process, which saves a start of Python."""
    words, passed_on = _cut(shlex.split(line)[1:])
    app(words)(args=[*words, *passed_on], prog_name="steelyard", standalone_mode=False)
    return capsys.readouterr().out


def test_the_guide_to_mpirun_prints_the_line_it_shows(place, capsys):
    page = (DOCS / "guide-mpi.md").read_text()
    settle(page)
    memory, shown, submitted, logs, listed = commands("guide-mpi.md")
    assert "fits: 69.5 GiB" in run(memory, capsys)
    megatron = page.split("```text\n")[1].split(" ../train_70b.sh")[0]
    assert f"exec {megatron} " in run(shown, capsys)
    assert not Path("runs").exists()
    program(place / "mpirun", "echo step 1")
    Path("datasets").mkdir()
    write_documents("datasets/llama3_arxiv_text_document", [range(5_000)] * 20, 128_000)
    settle(page, ("/opt/openmpi/bin/mpirun", str(place / "mpirun")))
    assert "job " in run(submitted.replace("train.init_from=checkpoints/Llama-3.1-70B-mega", ""), capsys)
    assert "launcher.log" in run(logs, capsys)
    assert "llama-70b" in run(listed, capsys)


def test_the_guide_to_containers_runs_inside(place, capsys, monkeypatch):
    """Apptainer is a program of ours that says how it was called."""
    page = (DOCS / "guide-containers.md").read_text()
    settle(page, ('modules = ["apptainer", "cuda/12.4"]\n', ""), ("/data/me/maskllm", str(place)))
    program(place / "bin" / "apptainer", 'echo "inside: $*, $LD_LIBRARY_PATH"')
    shell, command, prune, evaluate = commands("guide-containers.md")
    assert "exec apptainer exec" in run(shell, capsys)
    script = run(prune, capsys)
    assert "--groups 1x4" in script
    assert "--gres=gpu:4" in script
    assert "apptainer exec --nv" in script
    assert "eval ppl runs/masks" in run(evaluate, capsys)
    command = [sys.executable, "-P", "-m", "steelyard", *command.split()[1:]]
    own = {"PATH": f"{place}/bin:/usr/bin:/bin", "PYTHONPATH": str(DOCS.parent)}
    done = preloaded.run(command, capture_output=True, text=True, timeout=600, env=os.environ | own)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("inside: exec --bind /data:/data")
    assert "python3 -m steelyard --version, /opt/nccl_libs" in done.stdout
