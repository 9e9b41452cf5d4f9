"""The Python interpreter, the C library, and conda environments that conflict with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine, dotted, version_in
from steelyard.doctor.python_info import PythonInfo

TOPIC = "python"
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
GLIBC = (2, 28)  # torch's wheels are built on it (manylinux_2_28).
CONTAINER = (
    "containers/steelyard.def (apptainer) and containers/Dockerfile have both: build one elsewhere and run it here"
)
# Variables that make a Python outside conda search conda's modules and libraries.
CONDA_VARIABLES = (
    "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_PYTHON_EXE", "CONDA_EXE", "CONDA_SHLVL", "CONDA_PROMPT_MODIFIER",
    "_CE_CONDA", "_CE_M",
)  # fmt: skip


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Python, the C library, and variables that affect them."""
    yield _interpreter(machine, seen)
    yield _c_library(machine)
    yield _conda(machine, seen)


def _interpreter(machine: Machine, seen: PythonInfo) -> Finding:
    if seen.python is None:
        return Finding(TOPIC, "Python", "fail", f"{machine.python} does not run: {seen.problem}", "use another Python")
    version = dotted(seen.python)
    if seen.python[:2] in PYTHONS:
        return Finding(TOPIC, "Python", "ok", f"{version}, {machine.python}", facts={"version": version})
    tested = f"{dotted(PYTHONS[0])} to {dotted(PYTHONS[-1])}"
    hint = f"install Python {tested}, or use a container: {CONTAINER}"
    facts = {"version": version}
    if seen.python[:2] > PYTHONS[-1]:
        words = f"{version} is newer than the versions Steelyard is tested with ({tested})"
        return Finding(TOPIC, "Python", "warn", words, f"if a package does not install: {hint}", facts)
    return Finding(TOPIC, "Python", "fail", f"{version} is too old: Python {tested} is needed", hint, facts)


def _c_library(machine: Machine) -> Finding:
    answer = machine.run(["getconf", "GNU_LIBC_VERSION"])
    version = version_in(answer.out) if answer and answer.is_good else None
    if version is None:
        words = "the C library is not glibc, which torch's wheels need"
        return Finding(TOPIC, "C library", "warn", words, f"if torch does not install, use a container: {CONTAINER}")
    facts = {"version": dotted(version)}
    if version < GLIBC:
        words = f"glibc {dotted(version)} is too old: torch's wheels need {dotted(GLIBC)}"
        hint = f"no Python package can fix that; a container can: {CONTAINER}"
        return Finding(TOPIC, "C library", "fail", words, hint, facts)
    return Finding(TOPIC, "C library", "ok", f"glibc {dotted(version)}", facts=facts)


def _conda(machine: Machine, seen: PythonInfo) -> Finding:
    """An active conda environment with another Python mixes two sets of modules and libraries."""
    environment = machine.environment
    wrong_home = environment.get("PYTHONHOME")
    if wrong_home:
        words = f"PYTHONHOME is {wrong_home}: this Python loads its modules from there"
        return Finding(TOPIC, "environment", "fail", words, "unset PYTHONHOME", unset=("PYTHONHOME",))
    prefix, used = environment.get("CONDA_PREFIX"), seen.answers.get("prefix")
    if not prefix or used is None:
        return Finding(TOPIC, "environment", "ok", "no conda environment is active")
    if Path(used).resolve().is_relative_to(Path(prefix).resolve()):
        return Finding(TOPIC, "environment", "ok", f"the active conda environment {prefix} is the one in use")
    set_ = tuple(name for name in CONDA_VARIABLES if name in environment)
    words = f"the conda environment {prefix} is active, but Python is {machine.python}"
    hint = "conda deactivate; or steelyard doctor --fix writes a file that unsets its variables"
    return Finding(TOPIC, "environment", "warn", words, hint, unset=set_)
