"""`--container IMAGE`: an image that cannot be changed, made whole from outside.

The image's own Python is asked which libraries torch wants and which are missing. For those, the host is searched; a
folder of links is made whose targets lie inside the image, under /opt/steelyard; and the folder, the libraries' folders
and, where the image has no nvcc, the host's CUDA go into the site profile as binds, with CUDA_HOME and LD_LIBRARY_PATH.
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
SECONDS = 300  # Unpacking an image the first time takes long.


@dataclass(frozen=True)
class Image:
    """An image and the program that runs it."""

    path: str
    kind: str

    def words(
        self, command: Sequence[str], binds: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command inside."""
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
        ]  # An image may have one of its own.
        return [*start, *volumes, *variables, self.path, *command[1:]]


@dataclass
class Made:
    """What is to be done for an image, and what was found on the way."""

    findings: list[Finding] = field(default_factory=list)
    binds: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    prepend: list[str] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)


def choose(machine: Machine, image: str) -> Image:
    """The runtime for an image: by the kind of file it is, and by what is installed."""
    if image.startswith("-"):
        raise UserError(f"{image} is no image", hint="name a .sif or .sqsh file, or an image that docker knows")
    is_file = image.endswith((".sif", ".simg", ".sqsh")) or Path(image).exists()
    if is_file and not Path(image).exists():
        raise UserError(f"there is no image {image}", hint="name a .sif or .sqsh file, or an image that docker knows")
    kinds = ["enroot"] if image.endswith(".sqsh") else ["apptainer", "singularity"] if is_file else ["docker", "podman"]
    there = [name for name in kinds if machine.which(name)]
    if not there:
        raise RuntimeFailure(
            f"{image} needs {' or '.join(kinds)}, which is not on PATH", hint=f"often: module load {kinds[0]}"
        )
    kind = next((name for name in there if not is_file and _has(machine, name, image)), there[0])
    return Image(str(Path(image).resolve()) if is_file else image, kind)


def _has(machine: Machine, runtime: str, image: str) -> bool:
    """Whether docker or podman has an image already: those of the one are not the other's."""
    answer = machine.run([runtime, "image", "inspect", image])
    return answer is not None and answer.is_good


def look(
    machine: Machine, image: Image, binds: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What the image's Python says of its libraries."""
    source = Path(elf.__file__).read_text(encoding="utf-8")
    asked = Path(image_script.__file__).read_text(encoding="utf-8")
    source += re.sub(r"^from steelyard\.doctor\.elf import read\n", "", asked, flags=re.MULTILINE)
    answer = machine.run(image.words(["python3", "-c", source], binds, env), seconds=SECONDS)
    if answer is None or not answer.is_good:
        by_hand = join(image.words(["python3", "--version"]))
        raise RuntimeFailure(f"{image.kind} could not run python3 in {image.path}: {answer.gist if answer else ''}",
                    hint=f"try it by hand: {by_hand}")  # fmt: skip
    try:
        said: dict[str, Any] = json.loads(answer.out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeFailure(f"python3 in {image.path} answered {answer.out.strip()[:100]!r}") from None
    return said


def prepare(machine: Machine, image: Image, site: str) -> Made:
    """What the image lacks, where the host has it, and the changes that bring both together."""
    said = look(machine, image)
    made = Made()
    if said["torch"] is None:
        hint = "build one that has it: containers/steelyard.def, containers/Dockerfile"
        made.findings.append(Finding(TOPIC, "torch", "fail", f"there is no torch in {image.path}", hint))
        return made
    links = _links(machine, said, made)
    _bring_cuda(machine, said, made)
    name = re.sub(r"[^\w.-]", "_", Path(image.path).name) or "image"
    place = folder(machine) / "images" / name
    if links:
        made.binds.insert(0, f"{place}:{INSIDE}/links")
        # What a runtime is told replaces the image's own list, so that goes behind.
        made.prepend = [f"{INSIDE}/links", *(entry for entry in said["library_path"].split(":") if entry)]
        made.changes += undo_log.folders_to(place)
        for link, target in links.items():
            made.changes += undo_log.link(place / link, target)
    for bind in made.binds:
        if bind.count(":") != 1 or "," in bind:
            raise UserError(f"{bind.rsplit(':', 1)[0]} cannot be bound: its name has a colon or comma", hint="move it")
    prepend = {"LD_LIBRARY_PATH": made.prepend} if made.prepend else {}
    container = {"kind": image.kind, "image": image.path}
    text = site_profile.edited(sites_file(machine), site, container, made.binds, made.environment, prepend)
    made.changes += undo_log.folders_to(sites_file(machine).parent) + undo_log.file(sites_file(machine), text)
    return made


def _links(machine: Machine, said: Mapping[str, Any], made: Made) -> dict[str, str]:
    """Links by name, to places inside the image where the host's folders will be seen."""
    links: dict[str, str] = {}
    places: dict[str, str] = {}
    runtime = next((name for name in said["wanted"] if name.startswith("libcudart.so.")), "libcudart.so.12")
    cuda = [int(runtime.rsplit(".", 1)[1])]
    for soname in said["missing"]:
        found = sonames.candidates(machine, soname)
        if not found:
            package = package_of(soname, cuda)
            hint = f"pip install --target FOLDER {package}, and put its lib on LD_LIBRARY_PATH"
            made.findings.append(
                Finding(TOPIC, soname, "fail", "missing in the image, and not found on this host", hint)
            )
            continue
        for name, target in sonames.links_for(found[0].resolve(), soname).items():
            real = Path(target).resolve()
            place = places.setdefault(str(real.parent), f"{INSIDE}/libraries/{len(places)}")
            links.setdefault(name, f"{place}/{real.name}")
        words = f"missing in the image; {found[0]} is shown inside under that name"
        made.findings.append(Finding(TOPIC, soname, "ok", words, facts={"path": str(found[0])}))
    made.binds += [f"{host}:{inside}" for host, inside in places.items()]
    return links


def _bring_cuda(machine: Machine, said: Mapping[str, Any], made: Made) -> None:
    """CUDA's programs and headers, where the image has no nvcc and the host has; and CUDA_HOME in any case."""
    if not said["wanted"]:
        made.findings.append(Finding(TOPIC, "CUDA", "absent", "the image's torch is built for processors"))
        return
    if said["nvcc"]:
        made.environment |= {"CUDA_HOME": said["cuda_home"]} if said["cuda_home"] else {}
        made.findings.append(Finding(TOPIC, "nvcc", "ok", f"{said['nvcc']} in the image"))
        return
    nvcc = machine.which("nvcc")
    homes = [
        machine.environment.get("CUDA_HOME"),
        str(Path(nvcc).resolve().parent.parent) if nvcc else None,
        str(machine.at("/usr/local/cuda")),
    ]
    home = next((Path(one) for one in homes if one and (Path(one) / "bin" / "nvcc").exists()), None)
    if home is None:
        words = "neither the image nor this host has it; only packages that compile CUDA code need it"
        made.findings.append(Finding(TOPIC, "nvcc", "absent", words))
        return
    parts = [part for part in ("bin", "include", "nvvm") if (home / part).is_dir()]
    made.binds += [f"{(home / part).resolve()}:{CUDA_INSIDE}/{part}" for part in parts]
    made.environment |= {"CUDA_HOME": CUDA_INSIDE, "CUDA_ROOT": CUDA_INSIDE}
    made.findings.append(Finding(TOPIC, "nvcc", "ok", f"missing in the image; {home} is shown inside as {CUDA_INSIDE}"))


def verify(machine: Machine, image: Image, made: Made) -> list[Finding]:
    """The image once more, with what was made for it."""
    env = dict(made.environment)
    if made.prepend:
        env["LD_LIBRARY_PATH"] = ":".join(made.prepend)
    said = look(machine, image, made.binds, env)
    if said["missing"]:
        words = f"with all that, {', '.join(said['missing'])} still cannot be loaded"
        return [Finding(TOPIC, "with the site profile", "fail", words, "steelyard doctor --undo takes it back")]
    words = f"all of {len(said['wanted'])} libraries load" if said["wanted"] else "the image's torch needs no more"
    return [Finding(TOPIC, "with the site profile", "ok", words)]
