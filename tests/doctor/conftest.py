"""Broken machines, built from real folders, real libraries and real small programs."""

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine

VERSIONS = {
    "nccl": "int ncclGetVersion(int *v) {{ *v = {0}; return 0; }}",
    "cudnn": "unsigned long cudnnGetVersion(void) {{ return {0}; }}",
    "cupti": "int cuptiGetVersion(unsigned *v) {{ *v = {0}; return 0; }}",
}


@dataclass
class Bench:
    """A place to build a machine in."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)
    packages: list[Path] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.path / "root"

    def file(self, path: str, text: str) -> Path:
        """A file of the system."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        return place

    def program(self, name: str, script: str) -> Path:
        """A program on PATH, written in sh."""
        place = self.path / "bin" / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(f"#!/bin/sh\n{script}\n")
        place.chmod(0o755)
        return place

    def says(self, name: str, text: str, code: int = 0) -> Path:
        """A program that says one thing, whatever it is asked."""
        words = self.path / f"{name}.txt"
        words.write_text(text if text.endswith("\n") or not text else text + "\n")
        return self.program(name, f'while IFS= read -r line; do echo "$line"; done < {words}\nexit {code}')

    def machine(self, **environment: str) -> Machine:
        given = {"PATH": str(self.path / "bin"), "HOME": str(self.path / "home")}
        (self.path / "home").mkdir(exist_ok=True)
        (self.path / "work").mkdir(exist_ok=True)
        return Machine(
            given | self.environment | environment,
            root=self.root,
            python=str(self.program("plain-python", f'exec {sys.executable} -S "$@"')),  # Without torch, so quick.
            packages=tuple(self.packages),
            folder=self.path / "work",
        )

    def library(self, path: Path, soname: str | None, needed=(), search: str = "", source: str = "") -> Path:
        """A real shared library of a few kilobytes."""
        if shutil.which("gcc") is None:
            pytest.skip("building libraries needs gcc")
        path.parent.mkdir(parents=True, exist_ok=True)
        code = self.path / "code.c"
        code.write_text(source or "int steelyard_nothing(void) { return 0; }")
        options = [f"-Wl,-soname,{soname}"] if soname else []
        options += [f"-Wl,-rpath,{search}"] if search else []
        # A library that is asked for need not be there when the asker is loaded in a test: it never is.
        links = [f"-Wl,--no-as-needed,{one}" for one in needed]
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-nostdlib", *options, "-o", path, code, *links], check=True, timeout=600
        )
        return path

    def versioned(self, path: Path, soname: str, version: int) -> Path:
        family = next(name for name in VERSIONS if name in soname)
        return self.library(path, soname, source=VERSIONS[family].format(version))

    def torch(self, *sonames: str, version: str = "2.13.0+cu126", cuda: str = "12.6", search: str = "") -> Path:
        """A torch of which only the version and the libraries it asks for are there."""
        packages = self.path / "packages"
        lib = packages / "torch" / "lib"
        lib.mkdir(parents=True)
        (packages / "torch" / "version.py").write_text(f"__version__ = '{version}'\ncuda: Optional[str] = '{cuda}'\n")
        (packages / "torch" / "__init__.py").write_text("raise AssertionError('nobody should import this')\n")
        stubs = [self.library(self.path / "stubs" / name, name) for name in sonames]
        self.library(lib / "libtorch_cuda.so", "libtorch_cuda.so", needed=stubs, search=search)
        shutil.rmtree(self.path / "stubs", ignore_errors=True)
        self.packages.append(packages)
        return packages

    def gpus(self, name: str = "NVIDIA A100-SXM4-80GB", count: int = 2, driver: str = "550.54.14", cuda: str = "12.4",
             topology: str = "", links: str = "") -> None:  # fmt: skip
        """An nvidia-smi that has these."""
        for file, text in (
            ("query", f"{driver}, {name}\n" * count),
            ("page", f"| NVIDIA-SMI {driver}   Driver Version: {driver}   CUDA Version: {cuda} |\n"),
            ("topo", topology),
            ("nvlink", links),
        ):
            (self.path / f"smi-{file}").write_text(text)
        self.program(
            "nvidia-smi",
            f'case "$1" in --query*) file=query;; topo) file=topo;; nvlink) file=nvlink;; *) file=page;; esac\n'
            f'while IFS= read -r line; do echo "$line"; done < {self.path}/smi-$file',
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def named(findings, name: str) -> Finding:
    """The finding of a name, which must be there once."""
    [finding] = [finding for finding in findings if finding.name == name]
    return finding
