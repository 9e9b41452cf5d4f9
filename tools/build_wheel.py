"""Builds the source distribution, and from it the wheel, without touching the checkout.

setuptools keeps a `build` folder beside the sources; files that were deleted since stay in it and end up in the next
wheel. So the sources are copied first. Nothing is downloaded: the setuptools of the environment builds.

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
    """Print the two files."""
    parser = argparse.ArgumentParser(description="Build the source distribution and the wheel.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist", help="where to put them")
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
    """Let setuptools build one of the two; gives the file's name, its last line."""
    done = subprocess.run([sys.executable, "-c", BUILD, kind, folder], cwd=source, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: setuptools could not build the {kind}\n{done.stderr}")
    return done.stdout.splitlines()[-1]


if __name__ == "__main__":
    main()
