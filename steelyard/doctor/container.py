"""`--container IMAGE`: provides missing libraries to a read-only image from outside.

The image's Python reports which libraries torch needs and which are missing. The missing ones are searched for on the
host. A folder of links is created whose targets are inside the image, under /opt/steelyard. That folder, the libraries'
folders and, if the image has no nvcc, the host's CUDA are added to the site profile as binds, with CUDA_HOME and
LD_LIBRARY_PATH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import Any

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.doctor import elf, site_profile, sonames, undo_log
from steelyard.doctor.checks.libraries import package_of
from steelyard.doctor.finding import Finding
from steelyard.doctor.machine import Machine
from steelyard.doctor.paths import folder, sites_file
from steelyard.doctor.probes import image_libraries as image_script
from steelyard.doctor.undo_log import Change

TOPIC = "container"
INSIDE = "/opt/steelyard"
CUDA_INSIDE = "/usr/local/cuda"
SECONDS = 300  # Unpacking an image for the first time is slow.


@dataclass(frozen=True)
class Image:
    """An image, and the container runtime that runs it."""

    path: str
    kind: str

    def words(
        self, command: Sequence[str], binds: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command that runs `command` inside the image."""
        variables = [word for name, value in (env or {}).items() for word in ("--env", f"{name}={value}")]
        if self.kind in ("apptainer", "singularity"):
            options = [word for bind in binds for word in ("--bind", bind)]
            return [self.kind, "exec", "--cleanenv", *options, *variables, self.path, *command]
        if self.kind == "enroot":
            mounts = [word for bind in binds for word in ("--mount", bind)]
            return ["enroot", "start", *mounts, *variables, self.path, *command]
        volumes = [word for bind in binds for word in ("--volume", bind)]
        start = [
            self.kind,
            "run",
            "--rm",
            "--network=none",
            "--entrypoint",
            command[0],
        ]  # The image may define another entrypoint.
        return [*start, *volumes, *variables, self.path, *command[1:]]


@dataclass
class ImagePlan:
    """The changes for an image, and the findings."""

    findings: list[Finding] = field(default_factory=list)
    binds: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    prepend: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def choose(machine: Machine, image: str) -> Image:
    """The runtime for an image, by its file type and the installed runtimes."""
    if image.startswith("-"):
        raise UserError(f"{image} is not an image", hint="give a .sif or .sqsh file, or an image that docker knows")
    is_file = image.endswith((".sif", ".simg", ".sqsh")) or Path(image).exists()
    if is_file and not Path(image).exists():
        raise UserError(f"there is no image {image}", hint="give a .sif or .sqsh file, or an image that docker knows")
    kinds = ["enroot"] if image.endswith(".sqsh") else ["apptainer", "singularity"] if is_file else ["docker", "podman"]
    there = [name for name in kinds if machine.which(name)]
    if not there:
        raise RuntimeFailure(
            f"{image} needs {' or '.join(kinds)}, which is not on PATH", hint=f"often: module load {kinds[0]}"
        )
    kind = next((name for name in there if not is_file and _has(machine, name, image)), there[0])
    return Image(str(Path(image).resolve()) if is_file else image, kind)


def _has(machine: Machine, runtime: str, image: str) -> bool:
    """Whether docker or podman already has an image. They do not share images."""
    answer = machine.run([runtime, "image", "inspect", image])
    return answer is not None and answer.is_good


def look(
    machine: Machine, image: Image, binds: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The libraries of the image, as reported by its Python."""
    source = Path(elf.__file__).read_text(encoding="utf-8")
    probe = Path(image_script.__file__).read_text(encoding="utf-8")
    source += re.sub(r"^from steelyard\.doctor\.elf import read\n", "", probe, flags=re.MULTILINE)
    answer = machine.run(image.words(["python3", "-c", source], binds, env), seconds=SECONDS)
    if answer is None or not answer.is_good:
        by_hand = join(image.words(["python3", "--version"]))
        raise RuntimeFailure(f"{image.kind} could not run python3 in {image.path}: {answer.gist if answer else ''}",
                    hint=f"try it manually: {by_hand}")  # fmt: skip
    try:
        info: dict[str, Any] = json.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeFailure(f"python3 in {image.path} answered {answer.out.strip()[:100]!r}") from None
    return info


def prepare(machine: Machine, image: Image, site: str) -> ImagePlan:
    """Find what the image lacks and the host has, and plan the changes."""
    info = look(machine, image)
    plan = ImagePlan()
    if info["torch"] is None:
        hint = "build an image with torch: containers/steelyard.def, containers/Dockerfile"
        plan.findings.append(Finding(TOPIC, "torch", "fail", f"there is no torch in {image.path}", hint))
        return plan
    links = _links(machine, info, plan)
    _add_cuda(machine, info, plan)
    name = re.sub(r"[^\w.-]", "_", Path(image.path).name) or "image"
    place = folder(machine) / "images" / name
    if links:
        plan.binds.insert(0, f"{place}:{INSIDE}/links")
        # The runtime's variable replaces the image's LD_LIBRARY_PATH, so the image's entries are appended.
        plan.prepend = [f"{INSIDE}/links", *(entry for entry in info["library_path"].split(":") if entry)]
        plan.changes += undo_log.folders_to(place)
        for link, target in links.items():
            plan.changes += undo_log.link(place / link, target)
    for bind in plan.binds:
        if bind.count(":") != 1 or "," in bind:
            raise UserError(
                f"{bind.rsplit(':', 1)[0]} cannot be bound: its name contains a colon or comma", hint="move it"
            )
    prepend = {"LD_LIBRARY_PATH": plan.prepend} if plan.prepend else {}
    container = {"kind": image.kind, "image": image.path}
    text = site_profile.edited(sites_file(machine), site, container, plan.binds, plan.environment, prepend)
    plan.changes += undo_log.folders_to(sites_file(machine).parent) + undo_log.file(sites_file(machine), text)
    return plan


def _links(machine: Machine, info: Mapping[str, Any], plan: ImagePlan) -> dict[str, str]:
    """Links by name. Their targets are the paths inside the image at which the host's folders are mounted."""
    links: dict[str, str] = {}
    places: dict[str, str] = {}
    runtime = next((name for name in info["wanted"] if name.startswith("libcudart.so.")), "libcudart.so.12")
    cuda = [int(runtime.rsplit(".", 1)[1])]
    for soname in info["missing"]:
        found = sonames.candidates(machine, soname)
        if not found:
            package = package_of(soname, cuda)
            hint = f"pip install --target FOLDER {package}, and add its lib folder to LD_LIBRARY_PATH"
            plan.findings.append(
                Finding(TOPIC, soname, "fail", "missing in the image and not found on this host", hint)
            )
            continue
        for name, target in sonames.links_for(found[0].resolve(), soname).items():
            real = Path(target).resolve()
            place = places.setdefault(str(real.parent), f"{INSIDE}/libraries/{len(places)}")
            links.setdefault(name, f"{place}/{real.name}")
        words = f"missing in the image; {found[0]} is mounted under that name"
        plan.findings.append(Finding(TOPIC, soname, "ok", words, facts={"path": str(found[0])}))
    plan.binds += [f"{host}:{inside}" for host, inside in places.items()]
    return links


def _add_cuda(machine: Machine, info: Mapping[str, Any], plan: ImagePlan) -> None:
    """CUDA's programs and headers, if the image has no nvcc and the host does. Sets CUDA_HOME in any case."""
    if not info["wanted"]:
        plan.findings.append(Finding(TOPIC, "CUDA", "absent", "the image has a CPU-only build of torch"))
        return
    if info["nvcc"]:
        plan.environment |= {"CUDA_HOME": info["cuda_home"]} if info["cuda_home"] else {}
        plan.findings.append(Finding(TOPIC, "nvcc", "ok", f"{info['nvcc']} in the image"))
        return
    nvcc = machine.which("nvcc")
    homes = [
        machine.environment.get("CUDA_HOME"),
        str(Path(nvcc).resolve().parent.parent) if nvcc else None,
        str(machine.at("/usr/local/cuda")),
    ]
    home = next((Path(one) for one in homes if one and (Path(one) / "bin" / "nvcc").exists()), None)
    if home is None:
        words = "neither the image nor this host has nvcc; only packages that compile CUDA code need it"
        plan.findings.append(Finding(TOPIC, "nvcc", "absent", words))
        return
    parts = [part for part in ("bin", "include", "nvvm") if (home / part).is_dir()]
    plan.binds += [f"{(home / part).resolve()}:{CUDA_INSIDE}/{part}" for part in parts]
    plan.environment |= {"CUDA_HOME": CUDA_INSIDE, "CUDA_ROOT": CUDA_INSIDE}
    plan.findings.append(Finding(TOPIC, "nvcc", "ok", f"missing in the image; {home} is mounted as {CUDA_INSIDE}"))


def verify(machine: Machine, image: Image, plan: ImagePlan) -> list[Finding]:
    """Check the image again, with the planned binds and variables."""
    env = dict(plan.environment)
    if plan.prepend:
        env["LD_LIBRARY_PATH"] = ":".join(plan.prepend)
    info = look(machine, image, plan.binds, env)
    if info["missing"]:
        words = f"with the site profile, {', '.join(info['missing'])} still cannot be loaded"
        return [Finding(TOPIC, "with the site profile", "fail", words, "steelyard doctor --undo reverts the changes")]
    words = (
        f"all {len(info['wanted'])} libraries load" if info["wanted"] else "the image's torch needs no CUDA libraries"
    )
    return [Finding(TOPIC, "with the site profile", "ok", words)]
