"""The libraries that torch needs by soname, whether the loader finds them, and candidates elsewhere on the disk.

Usually a library is not missing but has another name or is in another folder: torch needs `libcudnn.so.8`, and the disk
has `libcudnn.so.8.9.7` in a folder that the loader does not search. A link with the right name fixes that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from steelyard.doctor import elf
from steelyard.doctor.machine import Machine, version_in

# Families that torch needs. The other CUDA libraries share one finding.
FAMILIES = {"nccl": "NCCL", "cudnn": "cuDNN", "cupti": "CUPTI"}
OTHERS = re.compile(
    r"lib(cudart|cublas|cublasLt|cufft|curand|cusolver|cusparse|cusparseLt|nvrtc|nvJitLink|nvshmem\w*|cufile)\.so"
)
# Folders with libraries that the loader does not search, as patterns below the root.
PLACES = (
    "usr/local/cuda*/lib64", "usr/local/cuda*/targets/*/lib", "usr/local/cuda*/extras/CUPTI/lib64",
    "usr/local/cuda*/[Nn]sight*/target-linux-*", "usr/local/cuda*/[Nn]sight*/host-linux-*",
    "opt/nvidia/nsight-systems*/*/target-linux-*", "opt/nvidia/nsight-compute/*/target/linux-*", "opt/nccl*/lib",
)  # fmt: skip
LOADER_PLACES = (
    "lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu",
    "lib64", "usr/lib64", "lib", "usr/lib", "usr/local/lib",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """A soname that torch's libraries need, and the search path of the library that needs it."""

    soname: str
    by: str
    search: tuple[Path, ...]

    @property
    def family(self) -> str:
        """`cudnn` for libcudnn.so.9 and libcudnn_ops.so.9."""
        return family_of(self.soname)


def family_of(name: str) -> str:
    """The family of a library's file name."""
    return next((family for family in FAMILIES if re.match(rf"lib{family}(_\w+)?\.so", name)), "cuda")


def wanted(torch_folder: Path) -> list[Wanted]:
    """All CUDA libraries that torch's own libraries need, each once."""
    found: dict[str, Wanted] = {}
    for path in sorted((torch_folder / "lib").glob("*.so*")):
        if family_of(path.name) != "cuda" or OTHERS.match(path.name):
            continue  # A wheel that bundles NCCL.
        library = elf.read(path)
        for soname in library.needed if library else ():
            if family_of(soname) != "cuda" or OTHERS.match(soname):
                assert library is not None
                found.setdefault(soname, Wanted(soname, path.name, library.search))
    return list(found.values())


def resolve(machine: Machine, want: Wanted) -> Path | None:
    """The file that the loader would use, in its order: RPATH or RUNPATH, LD_LIBRARY_PATH, the cache, defaults."""
    folders = [*want.search, *library_path(machine)]
    for folder in folders:
        if (folder / want.soname).exists():
            return folder / want.soname
    return _in_cache(machine, want.soname) or next(
        (machine.at(place) / want.soname for place in LOADER_PLACES if (machine.at(place) / want.soname).exists()), None
    )


def library_path(machine: Machine) -> list[Path]:
    """The folders of LD_LIBRARY_PATH."""
    return [Path(folder) for folder in machine.environment.get("LD_LIBRARY_PATH", "").split(":") if folder]


def _in_cache(machine: Machine, soname: str) -> Path | None:
    """The entry in ldconfig's cache, if there is one. /sbin is not on every user's PATH."""
    program = next((name for name in ("ldconfig", "/sbin/ldconfig") if machine.which(name)), None)
    answer = machine.run([program, "-p"]) if program and machine.root == Path("/") else None
    found = re.search(rf"^\s*{re.escape(soname)} .*=> (\S+)", answer.out, re.MULTILINE) if answer else None
    return Path(found[1]) if found and Path(found[1]).exists() else None


def candidates(machine: Machine, soname: str) -> list[Path]:
    """Files that match a soname, wherever they are, the best one first.

    The library's own SONAME decides. A file without one is matched by name (`libnccl.so.2.19.4` for `libnccl.so.2`).
    """
    base = soname.split(".so")[0]
    found: dict[Path, tuple[bool, tuple[int, ...]]] = {}
    for folder in folders(machine):
        for path in folder.glob(f"{base}.so*") if folder.is_dir() else ():
            library = elf.read(path) if path.exists() else None
            if library is None:
                continue
            by_name = path.name == soname or path.name.startswith(f"{soname}.")
            if library.soname == soname or (library.soname in (None, path.name) and by_name):
                found.setdefault(
                    path, (library.soname == soname, version_in(path.resolve().name.split(".so")[1]) or ())
                )
    return sorted(found, key=lambda path: found[path], reverse=True)


def folders(machine: Machine) -> Iterator[Path]:
    """All folders that may contain such libraries."""
    environment = machine.environment
    yield from library_path(machine)
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"):
        if environment.get(name):
            home = Path(environment[name])
            yield from (home / "lib64", home / "lib", home / "extras" / "CUPTI" / "lib64", *home.glob("targets/*/lib"))
    packages = list(machine.packages)
    for name in ("CONDA_PREFIX", "VIRTUAL_ENV"):
        if environment.get(name):
            prefix = Path(environment[name])
            yield prefix / "lib"
            packages += prefix.glob("lib/python*/site-packages")
    for folder in packages:
        yield from sorted(folder.glob("nvidia/*/lib"))
    for pattern in PLACES:
        yield from sorted(machine.root.glob(pattern), reverse=True)
    yield from (machine.at(place) for place in LOADER_PLACES)


def links_for(target: Path, soname: str) -> dict[str, str]:
    """The missing link, and those of its family in the same folder: cuDNN opens its sub-libraries by name."""
    links = {soname: str(target)}
    family = family_of(soname)
    if family == "cuda":
        return links
    number = soname.split(".so.")[1] if ".so." in soname else ""
    for path in sorted(target.parent.glob(f"lib{family}*.so.*")):
        library = elf.read(path)
        name = (library.soname if library and library.soname else None) or f"{path.name.split('.so')[0]}.so.{number}"
        if family_of(name) == family and name.endswith(f".so.{number}") and library is not None:
            links.setdefault(name, str(path))
    return links
