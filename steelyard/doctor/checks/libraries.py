"""NCCL, cuDNN, CUPTI and other CUDA libraries: whether the sonames that torch needs are found, load, and fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from steelyard.doctor import elf, sonames
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine, dotted
from steelyard.doctor.paths import environment_file, library_folder
from steelyard.doctor.python_info import PythonInfo, installed_torch, load_library
from steelyard.doctor.sonames import FAMILIES, Wanted

TOPIC = "libraries"
PACKAGES = {"nccl": "nvidia-nccl", "cupti": "nvidia-cuda-cupti"}


def check(machine: Machine, seen: PythonInfo) -> Iterator[Finding]:
    """One finding per family."""
    torch = installed_torch(machine)
    if torch is None:
        yield from (
            Finding(TOPIC, name, "absent", "torch is not installed, so nothing needs it") for name in FAMILIES.values()
        )
        return
    needed = sonames.wanted(torch.folder)
    for family, name in (*FAMILIES.items(), ("cuda", "CUDA")):
        names = [want for want in needed if want.family == family]
        if not names:
            yield Finding(TOPIC, name, "absent", f"torch {torch.version} does not need it")
            continue
        found = [_one(machine, want, name, seen, torch.cuda) for want in names]
        yield _combined(name, found)


def _combined(name: str, found: Sequence[Finding]) -> Finding:
    """One finding for a family: the worst verdict of its libraries, and the links that all of them need."""
    order = ("fail", "warn", "ok", "absent")
    worst = min(found, key=lambda finding: order.index(finding.verdict))
    links: dict[str, str] = {}
    for finding in found:
        links |= finding.links
    others = [finding for finding in found if finding.verdict == worst.verdict and finding is not worst]
    if worst.verdict == "ok":
        return replace(worst, name=name, words=worst.words + (f", and {len(others)} more" if others else ""))
    named = [str(finding.facts["soname"]) for finding in others]
    words = worst.words + (f"; the same applies to {', '.join(named)}" if named else "")
    return replace(worst, name=name, words=words, links=links)


def _one(machine: Machine, want: Wanted, name: str, seen: PythonInfo, cuda: Sequence[int] | None) -> Finding:
    facts: dict[str, Any] = {"soname": want.soname, "asked_by": want.by}
    path = sonames.resolve(machine, want)
    if path is None and seen.torch_cuda is not None:
        return Finding(TOPIC, name, "ok", f"torch finds {want.soname} itself", facts=facts)
    if path is None:
        return _missing(machine, want, name, facts, cuda)
    facts["path"] = str(path)
    library = elf.read(path)
    if library is None:
        return Finding(
            TOPIC, name, "fail", f"{path} is not a library that this machine can load",
            "remove it, or replace it with the real one", facts, _elsewhere(machine, want, path),
        )  # fmt: skip
    if library.soname not in (None, want.soname) and sonames.family_of(library.soname or "") == want.family:
        words = f"torch needs {want.soname}; {path} has that name, but is {library.soname}"
        hint = f"a link cannot fix this: remove the file and install {package_of(want.soname, cuda)}"
        links = _elsewhere(machine, want, path)
        return Finding(
            TOPIC, name, "fail", words, "steelyard doctor --fix links the right one" if links else hint, facts, links
        )
    loaded = load_library(machine, str(path), want.family)
    facts["version"] = loaded.get("version")
    if (
        not loaded["loads"] and seen.torch_cuda is not None
    ):  # It loads after the other libraries that torch loads first.
        return Finding(TOPIC, name, "ok", f"torch loads {want.soname} from {path.parent}", facts=facts)
    if not loaded["loads"]:
        return Finding(
            TOPIC, name, "fail", f"{path} cannot be loaded: {loaded['error']}", _load_hint(loaded["error"]), facts
        )
    return _by_version(want, name, path, loaded, seen, facts)


def _elsewhere(machine: Machine, want: Wanted, wrong: Path) -> dict[str, str]:
    """Links to the right library, unless the wrong one is in torch's own search path, which comes first."""
    right = next((path for path in sonames.candidates(machine, want.soname) if path != wrong), None)
    if right is None or wrong.parent in want.search:
        return {}
    return sonames.links_for(right, want.soname)


def _missing(machine: Machine, want: Wanted, name: str, facts: dict[str, Any], cuda: Sequence[int] | None) -> Finding:
    words = f"torch needs {want.soname}, and the loader does not find that name"
    ours = library_folder(machine) / want.soname
    if ours.exists():
        hint = f"source {environment_file(machine)}"
        return Finding(
            TOPIC,
            name,
            "warn",
            f"{want.soname} is linked in {ours.parent}, which is not on this shell's LD_LIBRARY_PATH",
            hint,
            facts,
        )
    found = sonames.candidates(machine, want.soname)
    if not found:
        hint = f"pip install {package_of(want.soname, cuda)}; for an image: steelyard doctor --container IMAGE"
        return Finding(TOPIC, name, "fail", words, hint, facts)
    facts["candidate"] = str(found[0])
    return Finding(
        TOPIC, name, "fail", f"{words}; {found[0]} fits",
        "steelyard doctor --fix creates a link with that name, and a file to source", facts,
        sonames.links_for(found[0], want.soname),
    )  # fmt: skip


def package_of(soname: str, cuda: Sequence[int] | None) -> str:
    """The pip requirement for a soname. The packages of CUDA 13 itself have no version suffix."""
    family, major = sonames.family_of(soname), cuda[0] if cuda else 12
    if family == "cuda":
        return "--force-reinstall torch"  # which installs all of them
    if family == "cudnn":
        return f"'nvidia-cudnn-cu{major}=={soname.split('.so.')[-1]}.*'"
    return PACKAGES[family] + (f"-cu{major}" if family != "cupti" or major < 13 else "")


def _load_hint(error: str) -> str:
    if "cannot open shared object file" in error:
        missing = error.split(":")[0]
        return f"it depends on {missing}: add the folder that contains it to LD_LIBRARY_PATH"
    if "version `" in error:
        return "it was built for a newer system: install a build for this one, or use containers/"
    return "reinstall the package that it belongs to"


def _by_version(
    want: Wanted, name: str, path: Path, loaded: dict[str, Any], seen: PythonInfo, facts: dict[str, Any]
) -> Finding:
    """Whether the loaded version is at least the one that torch was built with, if both are known."""
    version = loaded.get("version")
    built = seen.answers.get("nccl") if want.family == "nccl" else None
    if want.soname.startswith("libcudnn.so") and seen.answers.get("cudnn"):
        code = int(seen.answers["cudnn"])
        built = [code // 10000, code // 100 % 100] if code >= 90000 else [code // 1000, code // 100 % 10]
    reported = f" {dotted(version)}" if version else ""
    if version and built and list(version)[:2] < list(built)[:2]:
        return Finding(
            TOPIC, name, "warn", f"{path} is{reported}, but torch was built with {dotted(built)}",
            f"another folder precedes torch's own: remove {path.parent} from LD_LIBRARY_PATH, or update it", facts,
        )  # fmt: skip
    return Finding(TOPIC, name, "ok", f"{want.soname}{reported} loads from {path.parent}", "", facts)
