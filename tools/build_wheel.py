"""Builds the source distribution, and the wheel from it, without changing the checkout.

setuptools keeps a `build` folder next to the sources. Files that were deleted since stay in it and would be part of the
next wheel, so the sources are copied first. Nothing is downloaded: the environment's setuptools builds.

Use: `.venv/bin/python tools/build_wheel.py [DIR]`, or `make wheel`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "steelyard")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, 'build_' + sys.argv[1])(sys.argv[2]))"


def main() -> None:
    """Build, and print the paths of both files."""
    parser = argparse.ArgumentParser(description="Build the source distribution and the wheel.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="output folder")
    for file in build(parser.parse_args().folder):
        print(file)


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution and the wheel made from it."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        copy.mkdir()
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, copy / name)
        sdist = folder / run_backend("sdist", folder, copy)
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        unpacked = Path(scratch) / sdist.name.removesuffix(".tar.gz")
        return sdist, folder / run_backend("wheel", folder, unpacked)


def run_backend(kind: str, folder: Path, source: Path) -> str:
    """Build one distribution with setuptools; returns the file name, which is its last line of output."""
    done = subprocess.run([sys.executable, "-c", BUILD, kind, folder], cwd=source, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: setuptools cannot build the {kind}\n{done.stderr}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
