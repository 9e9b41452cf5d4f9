"""Creates `.venv` from the pinned requirements. It runs before anything is installed, so it has no dependencies.

torch is installed first, from PyTorch's index for the chosen variant if that is reachable: the default build on PyPI
pulls gigabytes of CUDA packages onto machines without a GPU. The other pins are installed by uv, which needs a fifth
of pip's time, or by pip where uv cannot reach an index. A stamp records what was installed; while it matches, nothing
is done. `--use` skips what only the development of Steelyard needs; container images use it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "steelyard-setup"
REQUIREMENTS = [ROOT / "requirements.txt", ROOT / "requirements-dev.txt"]
PEERS = ROOT / "requirements-peers.txt"
TORCH = "torch==2.13.0"
TRITON = "triton==3.9.0"  # GPU builds of torch include it; on a CPU the kernel tests use its interpreter.
UV = "uv==0.13.8"
QUIETLY = ("--disable-pip-version-check", "-q")
TORCH_INDEX = "https://download.pytorch.org/whl"
EXTRAS = "all"
VARIANTS = ("cpu", "cu126", "cu128", "cu130")
OLDEST_MACOS = 14  # minimum of torch's wheels
WSL_DRIVER = "/usr/lib/wsl/lib/nvidia-smi"  # The driver comes from Windows; the folder may not be in PATH.
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))


def main() -> None:
    """Bring `.venv` up to date."""
    parser = argparse.ArgumentParser(description="Create .venv from the pinned requirements.")
    parser.add_argument("--torch", choices=("auto", *VARIANTS), default="auto", help="which build of PyTorch")
    parser.add_argument("--use", action="store_true", help="all optional dependencies, but no development tools")
    given = parser.parse_args()
    if STAMP.is_file() and STAMP.read_text(encoding="utf-8") == stamp(given.torch, given.use):
        return
    refuse_platform(platform.system(), platform.machine(), platform.mac_ver()[0])
    make_venv(find_python())
    build = fitting_variant(driver_cuda()) if given.torch == "auto" else given.torch
    install_torch(build)
    if given.use:
        install_for_use()
    else:
        install_for_work(build)
    STAMP.write_text(stamp(given.torch, given.use), encoding="utf-8")


def install_for_use() -> None:
    """Install Steelyard with all optional dependencies, in the pinned versions."""
    run, work = REQUIREMENTS
    install_pinned([run], [])
    pip("install", f"--constraint={work}", "--no-build-isolation", "--editable", f"{ROOT}[{EXTRAS}]")


def install_for_work(build: str) -> None:
    """Install Steelyard with its development and test dependencies."""
    is_linux = platform.system() == "Linux"  # Triton has wheels only for Linux, and Megatron's helper is built there.
    triton = [TRITON] if build == "cpu" and is_linux else []
    install_pinned(REQUIREMENTS + [PEERS] * is_linux, triton)
    pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))


def install_pinned(files: list[Path], packages: list[str]) -> None:
    """Install exactly what the files and the list name, which includes all dependencies."""
    wanted = ["--no-deps", *(f"--requirement={file}" for file in files), *packages]
    uv = ["-m", "uv", "pip", "install", "-q", "--compile-bytecode", "--python", str(VENV / "bin" / "python")]
    if not (python("-m", "pip", *QUIETLY, "install", UV) and python(*uv, *pip_index(), *wanted)):
        print("uv cannot install the requirements: using pip", flush=True)
        pip("install", *wanted)


def pip_index() -> list[str]:
    """The option that has uv use the index that pip is configured with; uv does not read pip's settings."""
    config = [str(VENV / "bin" / "python"), "-m", "pip", "config", "list"]
    listed = subprocess.run(config, capture_output=True, text=True).stdout
    found = re.findall(r"^\S*\.index-url='(.*)'$", listed, re.MULTILINE)  # sorted: PIP_INDEX_URL comes first
    return ["--default-index", found[0]] if found else []


def stamp(variant: str, use: bool) -> str:
    """A fingerprint of the inputs of the environment."""
    inputs = b"".join(file.read_bytes() for file in [*REQUIREMENTS, PEERS, ROOT / "pyproject.toml", Path(__file__)])
    purpose = " use" if use else ""
    return f"torch={variant}{purpose} place={ROOT} inputs={hashlib.sha256(inputs).hexdigest()}\n"


def refuse_platform(system: str, machine: str, macos: str) -> None:
    """Fail on platforms without torch wheels."""
    if system == "Darwin":
        if machine != "arm64":
            fail("on macOS steelyard needs a Mac with Apple silicon", "PyTorch no longer has builds for Intel Macs")
        if macos and int(macos.split(".")[0]) < OLDEST_MACOS:
            fail(f"{TORCH} needs macOS {OLDEST_MACOS} or newer; this is {macos}", "update macOS, or train on Linux")
    elif system != "Linux":
        fail(f"steelyard runs on Linux and macOS; this is {system}", "on Windows, install WSL2 and run this inside it")


def find_python() -> str:
    """A supported Python: the running one, or one in PATH."""
    for candidate in (sys.executable, "python3.12", "python3.13", "python3.14", "python3.11", "python3"):
        if candidate and version_of(candidate) in PYTHONS:
            return candidate
    known = " to ".join(f"{major}.{minor}" for major, minor in (PYTHONS[0], PYTHONS[-1]))
    hint = "choose one with make setup PYTHON=..., or build an image: see containers/"
    fail(f"steelyard needs Python {known}; this is {sys.version.split()[0]}", hint)


def version_of(python: str) -> tuple[int, int] | None:
    """Major and minor version of an interpreter; None if it does not run."""
    question = "import sys; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", question], capture_output=True, text=True, timeout=30, check=True)
        major, minor = answer.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def make_venv(python: str) -> None:
    """Create an environment with a working pip; an incomplete one of a killed setup is replaced."""
    inside = VENV / "bin" / "python"
    works = inside.exists() and subprocess.run([inside, "-m", "pip", "--version"], capture_output=True).returncode == 0
    if works and version_of(str(inside)) == version_of(python):
        return
    if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        major, minor = version_of(python) or (3, 11)
        fail(
            f"{python} cannot create virtual environments: its venv package is missing",
            f"on Debian and Ubuntu: apt-get install python3-venv (or python{major}.{minor}-venv), then run this again",
        )
    print(f"creating {VENV.name} with {python}", flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    if subprocess.run([python, "-m", "venv", VENV]).returncode:
        fail("cannot create the virtual environment", "see the message above")


def install_torch(variant: str) -> None:
    """Install the pinned torch from PyTorch's index for the variant or, if unreachable, from the configured index."""
    base = os.environ.get("STEELYARD_TORCH_INDEX", TORCH_INDEX).rstrip("/")
    index = f"{base}/{variant}"
    if not reachable(f"{index}/torch/"):
        print(f"PyTorch's index for {variant} is not reachable: using {TORCH} from the configured index", flush=True)
        pip("install", TORCH)
        return
    print(f"installing {TORCH} ({variant}) from {index}", flush=True)
    pip("install", "--index-url", index, TORCH)


def reachable(url: str) -> bool:
    """Whether a URL answers within 10 seconds."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA version that this machine's NVIDIA driver supports; None without a driver."""
    program = "nvidia-smi" if shutil.which("nvidia-smi") else WSL_DRIVER
    try:
        answer = subprocess.run([program], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", answer.stdout)
    return (int(found.group(1)), int(found.group(2))) if found else None


def fitting_variant(cuda: tuple[int, int] | None) -> str:
    """The newest build that a driver supports; `cpu` without a driver or with one too old for all builds."""
    served = [v for v in VARIANTS if v != "cpu" and cuda is not None and (int(v[2:4]), int(v[4:])) <= cuda]
    return served[-1] if served else "cpu"


def python(*arguments: str) -> bool:
    """Whether the environment's Python succeeds with these arguments."""
    return subprocess.run([VENV / "bin" / "python", *arguments]).returncode == 0


def pip(*arguments: str) -> None:
    """Run pip inside the environment."""
    if not python("-m", "pip", *QUIETLY, *arguments):
        fail(f"pip {' '.join(arguments)} failed", "see the message above; running this again continues from here")


def fail(message: str, hint: str) -> NoReturn:
    """Print an error with a hint, and exit with 1."""
    print(f"error: {message}\n  {hint}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
