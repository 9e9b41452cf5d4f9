"""Prints the version of a Python interpreter and facts about torch and related packages, as one JSON object.

Each fact is read separately: one that fails leaves its error under its name and does not affect the others.
"""

import json
import os
import sys
from typing import Any

PACKAGES = ("triton", "flash_attn", "flash_attn_interface", "transformer_engine", "apex")


def ask(answers: Any, name: str, question: Any) -> None:
    """Record a fact, or the error if reading it fails."""
    try:
        answers[name] = question()
    except BaseException as error:
        answers[name] = None
        answers.setdefault("errors", {})[name] = "{}: {}".format(type(error).__name__, error)[:500]


def ask_torch(answers: Any) -> None:
    """The facts that torch knows about itself and the GPUs."""
    import torch

    cuda = torch.backends.cuda
    count = torch.cuda.device_count()
    answers["torch"] = torch.__version__
    answers["torch_cuda"] = torch.version.cuda
    answers["torch_hip"] = getattr(torch.version, "hip", None)
    ask(answers, "available", torch.cuda.is_available)
    ask(answers, "gpus", lambda: [torch.cuda.get_device_name(index) for index in range(count)])
    ask(answers, "capabilities", lambda: [list(torch.cuda.get_device_capability(index)) for index in range(count)])
    ask(answers, "built_for", torch.cuda.get_arch_list)
    ask(answers, "cudnn", torch.backends.cudnn.version)
    ask(answers, "nccl", lambda: list(torch.cuda.nccl.version()) if torch.version.cuda else None)
    ask(answers, "flash", lambda: bool(cuda.is_flash_attention_available()))
    ask(answers, "memory_efficient", lambda: bool(cuda.mem_efficient_sdp_enabled()))
    ask(answers, "cudnn_attention", lambda: bool(cuda.cudnn_sdp_enabled()))
    if count and answers.get("available"):
        ask(answers, "sum_on_gpu", lambda: float(torch.ones(8, device="cuda").sum()))


def package_version(name: str) -> Any:
    """A package's version, without importing it; None if it is not installed."""
    from importlib import metadata, util

    if util.find_spec(name) is None:
        return None
    for distribution in (name, name.replace("_", "-"), "flash-attn-3" if name == "flash_attn_interface" else name):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def import_package(name: str) -> bool:
    """Import a package."""
    __import__(name)
    return True


def main() -> None:
    """Collect all facts and print them."""
    sys.path.pop(0)  # This folder: its files must not be imported as modules.
    answers: Any = {"python": list(sys.version_info[:3]), "executable": sys.executable, "prefix": sys.prefix}
    if sys.version_info >= (3, 8):
        ask(answers, "import_torch", lambda: ask_torch(answers))
        versions: Any = {}
        for name in PACKAGES:
            ask(versions, name, lambda name=name: package_version(name))
            if versions[name] is not None:
                ask(answers, "import_" + name, lambda name=name: import_package(name))
        answers["packages"] = versions
    sys.stdout.write("\n" + json.dumps(answers) + "\n")
    sys.stdout.flush()
    os._exit(0)  # Some libraries crash when they are unloaded, which does not affect the facts.


if __name__ == "__main__":
    main()
