"""The command itself, in a Python that has no torch, and in the one at hand."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from steelyard.cli import main
from steelyard.doctor.checks.python import GLIBC, PYTHONS

ROOT = Path(__file__).parents[2]
HIDDEN = ("torch", "triton", "nvidia", "functorch", "torchgen")


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    """A real environment with everything that is installed here, except torch."""
    place = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=600)
    packages = place / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(HIDDEN) and "editable" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    return place / "bin" / "python"


def doctor(python, *words, **environment):
    """The real command; with nothing on PATH, whose programs would only take their time."""
    return subprocess.run(
        [python, "-P", "-m", "steelyard", "doctor", *words], capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin/nowhere"} | environment, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_doctor_runs_where_there_is_no_torch_and_says_so(without_torch, tmp_path):
    done = doctor(without_torch, "--json", HOME=str(tmp_path))
    reported = json.loads(done.stdout)
    findings = {finding["name"]: finding for finding in reported["findings"]}
    assert done.returncode == 1
    assert reported["verdict"] == "fail"
    assert findings["torch"]["words"] == "it is not installed"
    assert "make setup" in findings["torch"]["hint"]
    assert findings["Python"]["verdict"] == "ok"
    assert findings["all-reduce"]["verdict"] == "absent"
    assert not any("the check itself failed" in finding["words"] for finding in reported["findings"])


def test_doctor_never_imports_torch_itself():
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch': raise ImportError('torch is hidden')\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "from steelyard.doctor import container, explain, run_checks\n"
        "from steelyard.cli import main\n"
        "try: main(['doctor', 'explain', '-'])\nexcept SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, input="fine\n", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no errors found\n"


def run(capsys, *words):
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", *words])
    captured = capsys.readouterr()
    return exit_.value.code, captured.out, captured.err


def test_undo_with_nothing_done_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert run(capsys, "--undo") == (0, "there is nothing to undo\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fix", "--undo"], "choose one"),
        (["--nodes", "-oProxyCommand=x", "--quick"], "is not a host name"),
        (["--container", "gone.sif"], "there is no image gone.sif"),
        (["--container", "gone.sif", "--site", "a.b"], "is not a site name"),
        (["--container", "gone.sif", "--site", "default"], "is not a site name"),
        (["explain", "gone.log"], "there is no log gone.log"),
        (["explain"], "missing argument"),
        (["explane", "a"], "unexpected extra argument"),
    ],
)
def test_a_mistake_exits_with_two_and_one_message(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_fix_without_a_terminal_shows_and_asks_for_yes_and_does_it_with_yes(without_torch, tmp_path):
    places = {"XDG_DATA_HOME": str(tmp_path / "data"), "CONDA_PREFIX": str(tmp_path / "conda")}
    asked = doctor(without_torch, "--fix", "--quick", **places)
    assert asked.returncode == 2
    assert "unset CONDA_PREFIX" in asked.stderr
    assert "pass --yes" in asked.stderr
    assert not (tmp_path / "data").exists()
    done = json.loads(doctor(without_torch, "--fix", "--quick", "--yes", "--json", **places).stdout)
    assert done["applied"]
    assert [(finding["name"], finding["verdict"]) for finding in done["after"]] == [("environment", "ok")]
    assert "unset CONDA_PREFIX\n" in (tmp_path / "data/steelyard/doctor/environment.sh").read_text()
    undone = doctor(without_torch, "--undo", **places)
    assert undone.returncode == 0, undone.stderr
    assert not (tmp_path / "data").exists()


def test_the_containers_bring_what_doctor_asks_for():
    for name in ("Dockerfile", "steelyard.def"):
        text = (ROOT / "containers" / name).read_text()
        assert any(f"python:{major}.{minor}-" in text for major, minor in PYTHONS), name
        assert "requirements.txt" in text
        assert "tools/setup.py" in text
    assert "bookworm" in (ROOT / "containers" / "Dockerfile").read_text()  # glibc 2.36
    assert GLIBC <= (2, 36)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={PYTHONS[0][0]}.{PYTHONS[0][1]}"
    named = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if "Python :: 3." in line]
    assert named == [f"{major}.{minor}" for major, minor in PYTHONS]
