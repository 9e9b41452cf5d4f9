"""torch, the CUDA version it was built for, and the NVIDIA driver."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine, dotted, version_in
from steelyard.doctor.python_info import PythonInfo, installed_torch
from steelyard.observe import known_errors

TOPIC = "torch and driver"
OLDEST, NEWEST = (2, 11), (2, 13)
# The oldest driver for each major CUDA version. Builds of one major version run on all of them ("CUDA Compatibility").
DRIVERS = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
INDEX = "make setup TORCH="


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: its version, the newest CUDA it supports, and its GPUs."""

    name: str
    """Its version as printed, with leading zeros."""
    cuda: tuple[int, ...] | None
    gpus: tuple[str, ...]

    @property
    def version(self) -> tuple[int, ...]:
        """The version as numbers, for comparisons."""
        return version_in(self.name) or ()


def driver(machine: Machine) -> Driver | None:
    """The NVIDIA driver, from nvidia-smi or /proc; None if there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    answer = machine.run(query)
    rows = (
        [line.split(", ", 1) for line in answer.out.splitlines() if ", " in line] if answer and answer.is_good else []
    )
    if rows:
        page = machine.run(["nvidia-smi"])
        cuda = re.search(r"CUDA Version:\s*([\d.]+)", page.out) if page else None
        return Driver(rows[0][0].strip(), version_in(cuda[1]) if cuda else None, tuple(row[1] for row in rows))
    version_text = machine.text("/proc/driver/nvidia/version")
    version = re.search(r"Kernel Module\D*(\d+\.\d+(?:\.\d+)?)", version_text) if version_text else None
    if version is None:
        return None
    files = sorted(machine.at("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [re.search(r"Model:\s*(.+)", file.read_text(errors="replace")) for file in files]
    return Driver(version[1], None, tuple(name[1].strip() for name in names if name))


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Whether torch is installed, has a supported version, and can use the GPUs."""
    kernel = driver(machine)
    yield _torch(machine, seen)
    yield _driver(machine, kernel)
    cuda = seen.torch_cuda or getattr(installed_torch(machine), "cuda", None)
    if kernel is not None and (seen.torch or installed_torch(machine)):
        yield _driver_for_torch(kernel, cuda)
        if cuda is not None and seen.torch is not None and kernel.gpus:
            yield _gpus_in_torch(kernel, seen)


def _torch(machine: Machine, seen: PythonInfo) -> Finding:
    disk = installed_torch(machine)
    if seen.torch is None:
        error = seen.error("import_torch") or seen.problem
        if disk is None and "No module named 'torch'" in error:
            return Finding(TOPIC, "torch", "fail", "it is not installed", f"{INDEX}auto installs the matching build")
        meaning = known_errors.explain_line(error)
        hint = meaning.hint if meaning else "reinstall it: make setup"
        return Finding(TOPIC, "torch", "fail", f"it cannot be imported: {error}", hint)
    version = version_in(seen.torch) or ()
    facts = {"version": seen.torch, "cuda": seen.answers.get("torch_cuda")}
    built = f"for CUDA {dotted(seen.torch_cuda)}" if seen.torch_cuda else "for CPUs"
    if not OLDEST <= version[:2] <= NEWEST:
        words = f"{seen.torch}: versions {dotted(OLDEST)} to {dotted(NEWEST)} are supported"
        return Finding(TOPIC, "torch", "fail", words, f"{INDEX}auto installs a supported version", facts)
    return Finding(TOPIC, "torch", "ok", f"{seen.torch}, built {built}", facts=facts)


def _driver(machine: Machine, kernel: Driver | None) -> Finding:
    if kernel is None:
        broken = machine.run(["nvidia-smi"])
        if broken is not None and not broken.is_good:
            words = f"nvidia-smi fails: {broken.gist}"
            hint = "reboot, or ask your administrator; start a container with apptainer --nv, docker --gpus all"
            return Finding(TOPIC, "driver", "fail", words, hint)
        return Finding(TOPIC, "driver", "absent", "no NVIDIA driver: everything runs on the CPU")
    cuda = f", supports CUDA up to {dotted(kernel.cuda)}" if kernel.cuda else ""
    counted = f"{len(kernel.gpus)} x {kernel.gpus[0]}" if kernel.gpus else "no GPU"
    facts = {"version": kernel.name, "gpus": list(kernel.gpus)}
    return Finding(TOPIC, "driver", "ok", f"{kernel.name}{cuda}, {counted}", facts=facts)


def _driver_for_torch(kernel: Driver, cuda: tuple[int, ...] | None) -> Finding:
    name = "torch on this driver"
    if cuda is None:
        words = "the machine has a GPU, but torch is a CPU-only build"
        return Finding(TOPIC, name, "fail", words, f"{INDEX}{_variant(kernel)}")
    needed = DRIVERS.get(cuda[0])
    if needed is not None and kernel.version < needed:
        words = f"torch's CUDA {dotted(cuda)} needs driver {dotted(needed)}; this is {kernel.name}"
        return Finding(TOPIC, name, "fail", words, _for_old_driver(kernel))
    if kernel.cuda is not None and kernel.cuda < cuda[:2]:
        words = (
            f"torch is built for CUDA {dotted(cuda)} and the driver supports {dotted(kernel.cuda)}: the same major "
            "version, so it runs, except for kernels that must be compiled from PTX"
        )
        return Finding(
            TOPIC,
            name,
            "warn",
            words,
            f"{INDEX}{_variant(kernel)} installs a build that matches, or update the driver",
        )
    return Finding(TOPIC, name, "ok", f"driver {kernel.name} supports CUDA {dotted(cuda)}")


def _variant(kernel: Driver) -> str:
    """The newest build that the driver supports, as tools/setup.py names them."""
    if kernel.version >= DRIVERS[13]:
        return "cu130"
    return "cu128" if (kernel.cuda or (12, 6)) >= (12, 8) else "cu126"


def _for_old_driver(kernel: Driver) -> str:
    if kernel.version >= DRIVERS[12]:
        return (
            f"{INDEX}{_variant(kernel)} installs a build for this driver; or update to {dotted(DRIVERS[13])} or newer"
        )
    return (
        f"update the driver to {dotted(DRIVERS[12])} or newer. If that is not possible, on data centre GPUs, "
        "containers/ built with COMPAT= has NVIDIA's forward compatibility libraries (cuda-compat)"
    )


def _gpus_in_torch(kernel: Driver, seen: PythonInfo) -> Finding:
    name = "GPUs in torch"
    if not seen.answers.get("available"):
        words = f"the driver has {len(kernel.gpus)} GPUs, but torch sees none"
        error = seen.error("available") or seen.error("gpus")
        hint = "check CUDA_VISIBLE_DEVICES; start a container with --nv (apptainer) or --gpus all (docker)"
        return Finding(TOPIC, name, "fail", words + (f": {error}" if error else ""), hint)
    built = set(seen.answers.get("built_for") or [])
    for gpu, (major, minor) in zip(seen.gpus, seen.answers.get("capabilities") or [], strict=False):
        if built and not _has_code(built, major, minor):
            words = f"{gpu} has compute capability {major}.{minor}; torch has code for {', '.join(sorted(built))}"
            return Finding(
                TOPIC, name, "fail", words, f"another build may have it: {INDEX}cu126 supports the oldest GPUs"
            )
    if seen.error("sum_on_gpu"):
        error = seen.error("sum_on_gpu") or ""
        meaning = known_errors.explain_line(error)
        return Finding(TOPIC, name, "fail", f"a sum on the GPU fails: {error}", meaning.hint if meaning else "")
    return Finding(
        TOPIC,
        name,
        "ok",
        f"{len(seen.gpus)} x {seen.gpus[0]}, and a sum on a GPU is correct",
        facts={"gpus": seen.gpus},
    )


def _has_code(built: set[str], major: int, minor: int) -> bool:
    """Machine code runs on its major version from its minor version on; PTX (compute_) on everything newer."""
    for name in built:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", name)
        if found is None:
            continue
        has = (int(found[2]), int(found[3]))
        if found[1] == "sm" and has[0] == major and has[1] <= minor:
            return True
        if found[1] == "compute" and has <= (major, minor):
            return True
    return False
