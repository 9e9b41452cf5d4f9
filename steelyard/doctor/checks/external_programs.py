"""Programs that launch jobs, compile code and run containers: their versions, and what needs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine, dotted, version_in
from steelyard.doctor.python_info import PythonInfo, installed_torch

TOPIC = "programs"
OLDEST_SLURM = (20, 11)
RUNTIMES = ("apptainer", "singularity", "enroot", "docker", "podman")
# A client without its daemon cannot run anything, and `--version` does not show that.
COMMANDS = {"docker": "info", "podman": "info", "enroot": "version"}


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Check all programs."""
    yield _nvcc(machine, seen)
    yield _torchrun(machine, seen)
    yield _mpirun(machine)
    yield _ssh(machine)
    yield _slurm(machine)
    yield _container(machine)


def _nvcc(machine: Machine, seen: PythonInfo) -> Finding:
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"):
        home = machine.environment.get(name)
        if home and not (Path(home) / "bin" / "nvcc").exists():
            real = machine.which("nvcc")
            words = f"{name} is {home}, which has no bin/nvcc: compiling CUDA code fails with FileNotFoundError"
            hint = (
                f"set it to {Path(real).resolve().parent.parent}"
                if real
                else f"unset {name}, or in a container: steelyard doctor --container IMAGE"
            )
            return Finding(TOPIC, "nvcc", "warn", words, hint, unset=() if real else (name,))
    path = machine.which("nvcc")
    if path is None:
        return Finding(TOPIC, "nvcc", "absent", "not on PATH and not needed: Steelyard compiles nothing with it")
    answer = machine.run(["nvcc", "--version"])
    version = version_in(answer.out) if answer and answer.is_good else None
    if version is None:
        return Finding(
            TOPIC, "nvcc", "warn", f"{path} does not run: {answer.gist if answer else ''}", "remove it from PATH"
        )
    disk = installed_torch(machine)
    cuda = seen.torch_cuda or (disk.cuda if disk else None)
    facts = {"version": dotted(version), "path": path}
    if cuda and cuda[0] != version[0]:
        words = f"{dotted(version)} at {path}, but torch is built for CUDA {dotted(cuda)}: extensions will not build"
        return Finding(TOPIC, "nvcc", "warn", words, f"only needed to build extensions: load CUDA {cuda[0]}.x", facts)
    return Finding(TOPIC, "nvcc", "ok", f"{dotted(version)}, {path}", facts=facts)


def _torchrun(machine: Machine, seen: PythonInfo) -> Finding:
    path = machine.which("torchrun")
    if path is None:
        words = "not on PATH; steelyard --nproc and steelyard submit do not need it"
        return Finding(
            TOPIC,
            "torchrun",
            "absent",
            words,
            f"{machine.python} -m torch.distributed.run is the same" if seen.torch else "",
        )
    prefix = seen.answers.get("prefix")
    if prefix and Path(path).resolve().parent != (Path(prefix) / "bin").resolve():
        words = f"{path} belongs to another Python than {machine.python}: its ranks would use another torch"
        return Finding(TOPIC, "torchrun", "warn", words, f"run {machine.python} -m torch.distributed.run instead")
    return Finding(TOPIC, "torchrun", "ok", path)


def _mpirun(machine: Machine) -> Finding:
    path = machine.which("mpirun")
    if path is None:
        return Finding(
            TOPIC,
            "mpirun",
            "absent",
            "not on PATH; needed only for submit --on mpi",
            "load your site's MPI module, or set its path in the site profile",
        )
    answer = machine.run(["mpirun", "--version"])
    if answer is None or not answer.is_good:
        return Finding(
            TOPIC,
            "mpirun",
            "warn",
            f"{path} does not run: {answer.gist if answer else ''}",
            "load the complete MPI module, not only its bin folder",
        )
    return Finding(
        TOPIC,
        "mpirun",
        "ok",
        f"{answer.out.strip().splitlines()[0] if answer.out.strip() else path}",
        facts={"path": path},
    )


def _ssh(machine: Machine) -> Finding:
    path = machine.which("ssh")
    if path is None:
        return Finding(
            TOPIC, "ssh", "absent", "not on PATH; mpirun over several machines needs it", "install openssh-client"
        )
    return Finding(TOPIC, "ssh", "ok", f"{path}; --nodes a,b tests it between machines")


def _slurm(machine: Machine) -> Finding:
    path = machine.which("sbatch")
    if path is None:
        return Finding(
            TOPIC,
            "Slurm",
            "absent",
            "no sbatch on PATH; needed only for submit --on slurm",
            "log in to a login node of the cluster, or load its module",
        )
    answer = machine.run(["sbatch", "--version"])
    version = version_in(answer.out) if answer and answer.is_good else None
    if version is None:
        words = f"{path} does not print its version: {answer.gist if answer else ''}"
        return Finding(TOPIC, "Slurm", "warn", words, "its slurm.conf or libraries are missing here")
    facts = {"version": dotted(version)}
    if version[:2] < OLDEST_SLURM:
        words = f"{dotted(version)}: {dotted(OLDEST_SLURM)} is the oldest supported version"
        return Finding(TOPIC, "Slurm", "warn", words, "submit may still work; heterogeneous jobs may not", facts)
    answer = machine.run(["sinfo", "--noheader", "--format=%P|%D|%t"], seconds=10)
    if answer is None or not answer.is_good:
        words = (
            f"{dotted(version)}, but the controller does not answer: {answer.gist if answer else 'there is no sinfo'}"
        )
        return Finding(TOPIC, "Slurm", "warn", words, "is this a node of the cluster, and does munge run?", facts)
    return Finding(TOPIC, "Slurm", "ok", f"{dotted(version)}, {_partitions(answer.out)}", facts=facts)


def _partitions(text: str) -> str:
    names = dict.fromkeys(line.split("|")[0].rstrip("*") for line in text.splitlines() if line.strip())
    return f"partitions {', '.join(names)}" if names else "no partition"


def _container(machine: Machine) -> Finding:
    there = [name for name in RUNTIMES if machine.which(name)]
    if not there:
        return Finding(
            TOPIC,
            "containers",
            "absent",
            f"none of {', '.join(RUNTIMES)}; needed only if a site profile names an image",
            "often: module load apptainer",
        )
    answers = {name: machine.run([name, COMMANDS.get(name, "--version")], seconds=10) for name in there}
    works = [name for name, answer in answers.items() if answer and answer.is_good]
    broken = [f"{name}: {answer.gist}" for name, answer in answers.items() if answer and not answer.is_good]
    if not works:
        return Finding(
            TOPIC,
            "containers",
            "warn",
            f"installed, but not working: {'; '.join(broken)}",
            "start its daemon, or load apptainer, which needs none",
        )
    if works == ["podman"] and not _has_init(machine):
        words = "podman has no init (catatonit) to start ranks under"
        return Finding(TOPIC, "containers", "warn", words, "install the package catatonit", {"works": works})
    return Finding(
        TOPIC,
        "containers",
        "ok",
        ", ".join(works) + (f" (not working: {'; '.join(broken)})" if broken else ""),
        facts={"works": works},
    )


def _has_init(machine: Machine) -> bool:
    """Whether podman's init is in one of podman's search paths."""
    places = (
        "/usr/libexec/podman",
        "/usr/local/libexec/podman",
        "/usr/local/lib/podman",
        "/usr/lib/podman",
        "/usr/bin",
    )
    return any((machine.at(place) / "catatonit").exists() for place in places)
