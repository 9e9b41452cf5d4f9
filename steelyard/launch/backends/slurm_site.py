"""Describes this cluster as a site, for `steelyard site init`: Slurm's partitions, GPUs, account, modules, containers.

Only programs of the login node are asked, and each answer may be missing. The modules that are loaded now become those
of the site, since the user's Python works with them. torch brings its own CUDA, so no CUDA module is added.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.host import output_of
from steelyard.core.recipe.toml import parse, to_toml
from steelyard.launch import sites
from steelyard.planning.slurm_cluster import GRES

SINFO = ["sinfo", "--noheader", "--format=%P|%a|%l|%c|%D|%G"]
SECONDS = 60
# The runtimes for each kind of image, the preferred one first. Pyxis is a plugin of srun, not a program.
RUNTIMES = {".sif": ("apptainer", "singularity"), ".sqsh": ("pyxis", "enroot"), "": ("pyxis", "podman", "docker")}
PROGRAMS = ("apptainer", "singularity", "enroot", "podman", "docker")
MODULE = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*")


@dataclass(frozen=True)
class SlurmPartition:
    """Nodes of one kind in a partition."""

    name: str
    is_default: bool
    time_limit: str | None
    cpus: int
    nodes: int
    gpu: str
    gpus: int

    @property
    def gres(self) -> str | None:
        """The gres of all GPUs of a node."""
        return f"gpu:{self.gpu}:{self.gpus}" if self.gpu else f"gpu:{self.gpus}" if self.gpus else None


@dataclass(frozen=True)
class SiteFacts:
    """The answers of the login node."""

    cluster: str
    partitions: list[SlurmPartition]
    account: str | None = None
    loaded: list[str] = field(default_factory=list)
    available: list[str] = field(default_factory=list)
    runtimes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The facts for a terminal."""
        kinds = [f"{each.name} ({each.nodes} x {each.gres or f'{each.cpus} CPUs'})" for each in self.partitions]
        return [
            f"cluster     {self.cluster}",
            f"partitions  {', '.join(kinds)}",
            f"account     {self.account or 'none'}",
            f"modules     {', '.join(self.loaded) or 'none loaded'}",
            f"containers  {', '.join(self.runtimes) or 'none'}",
        ]


def detect() -> SiteFacts:
    """Ask the programs of this machine."""
    listed = output_of(SINFO, SECONDS)
    if listed is None:
        raise UserError("Slurm is not installed here, or does not answer", hint="run this on a login node; check sinfo")
    settings = output_of(["scontrol", "show", "config"], SECONDS) or ""
    config = re.search(r"^ClusterName\s*=\s*(\S+)", settings, re.MULTILINE)
    association = ["sacctmgr", "--noheader", "--parsable2", "show", "user", getpass.getuser(), "format=defaultaccount"]
    available = MODULE.findall(output_of(["bash", "-lc", "module -t avail 2>&1"], SECONDS) or "")
    has_pyxis = "--container-image" in (output_of(["srun", "--help"], SECONDS) or "")
    return SiteFacts(
        config[1] if config else "cluster",
        partitions(listed),
        (output_of(association, SECONDS) or "").strip().partition("\n")[0] or None,
        [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
        [name for name in available if name.partition("/")[0].lower() in PROGRAMS],
        [*(["pyxis"] if has_pyxis else []), *(name for name in PROGRAMS if shutil.which(name))],
    )


def partitions(listed: str) -> list[SlurmPartition]:
    """The partitions that are up, in the order of sinfo."""
    found = []
    for line in listed.splitlines():
        name, state, limit, cpus, nodes, gres = [each.strip() for each in line.split("|", 5)]
        gpus = GRES.findall(gres)
        kind, count = gpus[0] if gpus else ("", "0")
        if state == "up":
            finite = None if limit in ("infinite", "n/a") else limit
            found.append(
                SlurmPartition(
                    name.rstrip("*"), name.endswith("*"), finite, int(cpus.rstrip("+")), int(nodes), kind, int(count)
                )
            )
    if not found:
        raise UserError("no partition of this cluster is up", hint="check sinfo")
    return found


def chosen(found: Sequence[SlurmPartition], name: str | None, gpus: bool) -> SlurmPartition:
    """The named partition, or the one with GPUs that is the default or has most of them."""
    named = [each for each in found if name in (None, each.name)]
    if not named:
        known = ", ".join(dict.fromkeys(each.name for each in found))
        raise UserError(f"there is no partition {name}", hint=f"partitions that are up: {known}")
    return max(named, key=lambda each: (gpus and each.gpus > 0, each.is_default, each.gpus * each.nodes))


def settings(facts: SiteFacts, partition: SlurmPartition, image: str | None, gpus: bool) -> dict[str, Any]:
    """The table of the site."""
    site: dict[str, Any] = {}
    slurm: dict[str, Any] = {"partition": partition.name}
    if facts.account:
        slurm["account"] = facts.account
    if gpus and partition.gres:
        site["ranks_per_node"] = partition.gpus
        slurm |= {"gres": partition.gres, "cpus_per_rank": max(1, partition.cpus // partition.gpus)}
    if partition.time_limit:
        slurm["time_limit"] = partition.time_limit
    modules = list(facts.loaded)
    if image is not None:
        kind = container_kind(image, facts)
        needed = [name for name in facts.available if name.partition("/")[0].lower() == kind]
        if kind not in facts.runtimes and needed:
            modules.append(needed[-1])
        site["container"] = {"kind": kind, "image": str(Path(image).resolve()) if Path(image).exists() else image}
    return ({"modules": modules} if modules else {}) | site | {"slurm": slurm}


def container_kind(image: str, facts: SiteFacts) -> str:
    """The runtime for an image: an installed one, one that a module provides, or the usual one."""
    usual = RUNTIMES.get(Path(image).suffix, RUNTIMES[""])
    from_modules = {name.partition("/")[0].lower() for name in facts.available}
    here = [kind for kind in usual if kind in facts.runtimes] or [kind for kind in usual if kind in from_modules]
    return (here or [usual[-1]])[0]


def add_site(file: Path | None, name: str, values: dict[str, Any]) -> Path:
    """Add a site to the file, which keeps everything else. The first site becomes the default."""
    path = file or sites.path()
    text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    before, _ = parse(text, str(path))
    if name in before:
        raise UserError(f"the site {name} is already described", where=str(path), hint="choose another name: --name")
    head = "" if sites.DEFAULT in before else to_toml({sites.DEFAULT: name}) + "\n"
    files.write_text(path, head + (text.rstrip() + "\n\n" if text.strip() else "") + to_toml({name: values}))
    return path
