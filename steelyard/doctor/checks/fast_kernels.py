"""Fast kernels: attention backends, Triton, Transformer Engine. None of them is needed on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.python_info import PythonInfo
from steelyard.observe import known_errors

TOPIC = "kernels"
OLDEST_FLASH = (8, 0)


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """Attention, Triton, and optional packages."""
    if seen.torch is None:
        yield Finding(TOPIC, "attention", "absent", "torch cannot be imported, so its kernels were not checked")
        return
    yield _attention(seen)
    yield _triton(machine, seen)
    yield _package(seen, "flash_attn", "flash-attn", "torch's own flash attention is used")
    yield _package(seen, "flash_attn_interface", "flash-attn 3", "torch's own flash attention is used")
    yield _package(seen, "transformer_engine", "Transformer Engine", "torch's own matrix products are used for fp8")


def _attention(seen: PythonInfo) -> Finding:
    if seen.torch_cuda is None or not seen.gpus:
        return Finding(TOPIC, "attention", "ok", "no GPU: torch's attention for CPUs is used")
    backends = {
        "flash": seen.answers.get("flash"),
        "memory efficient": seen.answers.get("memory_efficient"),
        "cuDNN": seen.answers.get("cudnn_attention"),
    }
    there = [name for name, has in backends.items() if has]
    old = [list(one) for one in seen.answers.get("capabilities") or [] if tuple(one) < OLDEST_FLASH]
    if not backends["flash"]:
        words = "this torch was built without flash attention" + (f"; it has {', '.join(there)}" if there else "")
        return Finding(
            TOPIC, "attention", "warn", words, "install a build from PyTorch's own index: make setup", backends
        )
    if old:
        words = f"flash attention needs compute capability 8.0, this GPU has {old[0][0]}.{old[0][1]}: another is used"
        return Finding(
            TOPIC, "attention", "warn", words, "expect attention to be slower than the planner predicts", backends
        )
    return Finding(TOPIC, "attention", "ok", ", ".join(there), facts=backends)


def _triton(machine: Machine, seen: PythonInfo) -> Finding:
    version, error = seen.package("triton"), seen.error("import_triton")
    has_gpu = bool(seen.gpus)
    if version is None:
        if not has_gpu:
            return Finding(TOPIC, "Triton", "absent", "not installed; the plain kernels are used on CPUs")
        return Finding(
            TOPIC, "Triton", "fail", "it is not installed", "it is part of torch's builds for GPUs: make setup"
        )
    if error:
        return Finding(TOPIC, "Triton", "fail", f"{version} cannot be imported: {error}", _hint(error))
    if has_gpu and not any(machine.which(name) for name in ("cc", "gcc", "clang")):
        words = f"{version}, but there is no C compiler, which it needs for the first launch of each kernel"
        return Finding(TOPIC, "Triton", "fail", words, "install gcc, or set CC to a compiler")
    return Finding(TOPIC, "Triton", "ok", version)


def _package(seen: PythonInfo, module: str, name: str, instead: str) -> Finding:
    """An optional package that must work if it is installed: torch and others import it when they find it."""
    version, error = seen.package(module), seen.error(f"import_{module}")
    if version is None:
        return Finding(TOPIC, name, "absent", f"not installed and not needed: {instead}")
    if error:
        return Finding(TOPIC, name, "warn", f"{version} cannot be imported: {error}", _hint(error))
    return Finding(TOPIC, name, "ok", version)


def _hint(error: str) -> str:
    meaning = known_errors.explain_line(error)
    if meaning is not None:
        return meaning.hint
    return "it was built for another torch or CUDA: rebuild it, or pip uninstall it, since Steelyard does not need it"
