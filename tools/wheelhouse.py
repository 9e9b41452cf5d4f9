"""Creates a folder of wheels for an offline installation of Steelyard, in the pinned versions.

The folder is for the Python version and the architecture that run this script. Install from it with pip:

    pip install --no-index --find-links wheelhouse steelyard

Use: `.venv/bin/python tools/wheelhouse.py DIR [--torch auto|none|cpu|cu126|...] [--extras all]`, or `make wheelhouse`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import setup  # noqa: E402
from build_wheel import build  # noqa: E402
from pin import closure  # noqa: E402


def main() -> None:
    """Build or download all wheels."""
    parser = argparse.ArgumentParser(description="Create a folder of wheels for an offline installation.")
    parser.add_argument("folder", type=Path, help="output folder")
    choices = ("auto", "none", *setup.VARIANTS)
    parser.add_argument(
        "--torch", choices=choices, default="auto", help="which build of PyTorch; none: the target has its own"
    )
    parser.add_argument("--extras", default="", help="optional dependencies: all, or names separated by commas")
    given = parser.parse_args()
    sdist, wheel = build(given.folder)
    sdist.unlink()
    pip_wheel(given.folder, "--no-deps", *pins(given.extras))
    if given.torch != "none":
        variant = setup.fitting_variant(setup.driver_cuda()) if given.torch == "auto" else given.torch
        take_torch(given.folder, variant)
    files = sorted(given.folder.glob("*.whl"))
    megabytes = sum(file.stat().st_size for file in files) / 1e6
    target = f"steelyard[{given.extras}]" if given.extras else "steelyard"
    print(f"{len(files)} wheels, {megabytes:,.0f} MB, with {wheel.name}; install offline with:")
    print(f"  pip install --no-index --find-links {given.folder} '{target}'")


def pins(extras: str) -> list[str]:
    """The pins of Steelyard and these optional dependencies, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = [name for name in optional if name != "all"] if extras == "all" else [e for e in extras.split(",") if e]
    unknown = [name for name in wanted if name not in optional]
    if unknown:
        sys.exit(f"error: there is no extra {unknown[0]}; known: {', '.join(optional)}")
    names = closure([*project["dependencies"], *(text for name in wanted for text in optional[name])])
    lines = [line for file in setup.REQUIREMENTS for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line.strip() and not line.startswith("#") and Requirement(line).name in names]


def take_torch(folder: Path, variant: str) -> None:
    """Add torch and its CUDA packages, from PyTorch's index if it is reachable, as `make setup` does."""
    base = os.environ.get("STEELYARD_TORCH_INDEX", setup.TORCH_INDEX).rstrip("/")
    index = f"{base}/{variant}"
    if setup.reachable(f"{index}/torch/"):
        pip_wheel(folder, "--no-deps", "--index-url", index, setup.TORCH)
    constraints = [f"--constraint={file}" for file in setup.REQUIREMENTS]
    pip_wheel(folder, "--find-links", str(folder), *constraints, setup.TORCH)


def pip_wheel(folder: Path, *arguments: str) -> None:
    """Put wheels of these packages into the folder; packages without wheels are built from source."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel", "--wheel-dir", str(folder)]
    if subprocess.run([*command, *arguments]).returncode:
        sys.exit("error: pip cannot get all wheels\n  see the message above; the same command continues from here")


if __name__ == "__main__":
    main()
