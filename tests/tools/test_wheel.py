"""What a user installs: the wheel, from a folder of wheels, into an environment that has nothing but torch."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools.mirror import link, repack

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"


def tool(name: str):
    """One of the scripts in tools/, as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_script", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(*command, cwd: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a command that finds nothing of the checkout by itself."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    return subprocess.run(
        command, cwd=cwd, env={**kept, **variables}, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> SimpleNamespace:
    """The source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, TOOLS / "build_wheel.py", folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    sdist, wheel = map(Path, done.stdout.split())
    return SimpleNamespace(sdist=sdist, wheel=wheel)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> SimpleNamespace:
    """A new environment, with torch from here and all else from a folder of wheels that one command made."""
    folder = tmp_path_factory.mktemp("airgap")
    wheelhouse = tool("wheelhouse")
    pinned = {line.split("==")[0] for line in wheelhouse.pins("")}
    repack(pinned, folder / "mirror")
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    made = run(
        *(sys.executable, TOOLS / "wheelhouse.py", folder / "wheels", "--torch", "none"),
        **{"cwd": folder, **offline, "PIP_FIND_LINKS": str(folder / "mirror")},
    )
    assert made.returncode == 0, made.stderr
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    link(wheelhouse.closure(["torch"]) - pinned, folder / "torch")
    place = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    (Path(place) / "torch.pth").write_text(f"{folder / 'torch'}\n")
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "-q")
    done = run(*pip, "--no-index", "--find-links", folder / "wheels", "steelyard", cwd=folder, **offline)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(python=python, command=folder / "venv" / "bin" / "steelyard", made=made, place=Path(place))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package(built):
    held = {name for name in zipfile.ZipFile(built.wheel).namelist() if ".dist-info/" not in name}
    package = [path for path in (ROOT / "steelyard").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert held == {str(path.relative_to(ROOT)) for path in package}
    assert "steelyard/py.typed" in held


@pytest.mark.slow
def test_the_source_distribution_holds_what_the_wheel_holds(built):
    top = built.sdist.name.removesuffix(".tar.gz")
    with tarfile.open(built.sdist) as archive:
        held = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    wheel = {name for name in zipfile.ZipFile(built.wheel).namelist() if ".dist-info/" not in name}
    assert wheel <= held
    assert {"pyproject.toml", "LICENSE", "README.md"} <= held


@pytest.mark.slow
def test_the_wheel_installs_without_a_network_and_runs_outside_the_checkout(installed, workplace):
    found = run(installed.python, "-c", "import steelyard; print(steelyard.__file__)", cwd=workplace.path)
    assert Path(found.stdout.strip()).is_relative_to(installed.place)
    version = run(installed.command, "--version", cwd=workplace.path)
    assert version.returncode == 0, version.stderr
    assert "0.1.0" in version.stdout


@pytest.mark.slow
def test_the_installed_command_lists_the_shipped_recipes(installed, workplace):
    listed = run(installed.command, "recipe", "list", "--json", cwd=workplace.path)
    assert listed.returncode == 0, listed.stderr
    shipped = {path.stem for path in (ROOT / "steelyard" / "recipes").glob("*.toml")}
    assert all(name in listed.stdout for name in shipped)


@pytest.mark.slow
def test_the_installed_command_trains_two_steps_on_a_cpu(installed, workplace):
    done = run(installed.command, "train", "tiny.toml", "train.steps=2", "--run", "short", cwd=workplace.path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (workplace.path / "short" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines if "step" in line) == 2


def test_all_is_every_other_optional_part():
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"datasets", "eval", "postgresql", "tensorboard", "wandb", "all"} == set(optional)
    names = ",".join(sorted(optional.keys() - {"all"}))
    assert optional["all"] == [f"steelyard[{names}]"]


def test_a_folder_of_wheels_refuses_an_unknown_optional_part():
    with pytest.raises(SystemExit, match="there is no extra evaluation"):
        tool("wheelhouse").pins("evaluation")
