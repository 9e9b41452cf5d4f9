"""A command inside a container: the words that go before it, and what each node must do first.

Words are lists until the script is written, where every one of them is quoted. The folders that a run lives in are
shown inside under the same names, so that a path means the same on both sides.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import ContainerSection, SiteSection
from steelyard.launch import container_watchdog
from steelyard.launch.launch_record import FOLDER

# What a scheduler or launcher tells a process by its environment; Docker, Podman and Enroot pass on only what is named.
PASSED_ON = (
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE", "MASTER_ADDR", "MASTER_PORT", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE",
    "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL",
)  # fmt: skip
# A Python of the host's must not reach into the image.
CLEARED = ("PYTHONHOME", "PYTHONPATH", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE")
SHELL = "/bin/sh"
NO_PULL = "error: the image cannot be pulled; one that was built here is new already: leave --reload-container out"
# Enroot clears the environment and goes home. It takes names to keep, of which one that is not set would become empty.
ENROOT = """kept=()
for name in $1; do if [ -n "${!name+set}" ]; then kept+=(--env "$name"); fi; done
shift
exec enroot start "${kept[@]}" "$@"
"""
# A folder must belong to the user or to $2, be no link, and be writable for nobody else. One that may have the sticky
# bit ($3), like /tmp, may be a link and writable for all.
REFUSING = """refuse_others() {
    { [ -n "$3" ] || [ ! -L "$1" ]; } && read -r owner mode < <(stat -L -c '%u %a' -- "$1") || owner= mode=0
    [[ $owner == "$EUID" || $owner == "$2" ]] && (( (0$mode & 022) == 0 || 0$mode & ${3:-0} )) && return
    echo "error: $1 belongs to another user or can be written by others: name a folder of your own as unpack" >&2
    exit 1
}
"""
IN_FOLDER = [SHELL, "-c", 'cd "$0" && exec "$@"']


def wrapped(site: SiteSection, command: Sequence[str], workdir: str, run: str | None, gpus: bool) -> list[str]:
    """The command with the runtime before it; pyxis has no words of its own here, but options of srun.

    A command of a run's ends with whoever waits for it, however that one ends (`lifeline.py`).
    """
    container = site.container
    binds = _binds(container, [workdir, *([run] if run else [])])
    match container.kind:
        case "apptainer" | "singularity":
            options = ["--nv"] if gpus else []
            options += [word for bind in binds for word in ("--bind", bind)]
            image = unpacked(container) if container.unpack else container.image
            return [container.kind, "exec", *options, "--pwd", workdir, *container.options, image, *command]
        case "enroot":
            mounts = [word for bind in binds for word in ("--mount", bind)]
            options = [" ".join(_passed(site)), "--rw", *mounts, *container.options]
            return ["bash", "-c", ENROOT, "enroot", *options, name(container), *IN_FOLDER, workdir, *command]
        case "docker" | "podman":
            words = [*_docker(site, binds, workdir, gpus), container.image, *command]
            return container_watchdog.kept(words, str(Path(run) / FOLDER)) if run else words
        case _:
            return list(command)


def _docker(site: SiteSection, binds: Sequence[str], workdir: str, gpus: bool) -> list[str]:
    kind = site.container.kind
    words = [kind, "run", "--rm", "--init", "--network=host", "--ipc=host"]
    if kind == "docker":
        words.append(f"--user={os.getuid()}:{os.getgid()}")
        if os.getuid():  # Nobody that the image knows: without a home and a name, compilers find no place for caches.
            words += ["--env=HOME=/tmp", f"--env=USER={os.getuid()}"]
    if gpus:  # Memory that cards of InfiniBand read is locked.
        words += ["--gpus=all", "--ulimit=memlock=-1"] if kind == "docker" else ["--device=nvidia.com/gpu=all"]
    words += [word for bind in binds for word in ("--volume", bind)]
    return [
        *words,
        *(word for each in _passed(site) for word in ("--env", each)),
        "--workdir",
        workdir,
        *site.container.options,
    ]


def _passed(site: SiteSection) -> list[str]:
    """What goes inside. The host's PATH does not, unless a site sets all of it: it would hide the image's programs."""
    prepended = [name for name in site.prepend if name != "PATH"]
    return list(dict.fromkeys([*PASSED_ON, container_watchdog.VARIABLE, *site.environment, *prepended]))


def srun_options(site: SiteSection, workdir: str, run: str) -> list[str]:
    """What pyxis adds to srun's line."""
    container = site.container
    if container.kind != "pyxis":
        return []
    return [
        f"--container-image={container.image}", f"--container-name={name(container)}",
        f"--container-mounts={','.join(_binds(container, [workdir, run]))}", f"--container-workdir={workdir}",
        *container.options,
    ]  # fmt: skip


def _binds(container: ContainerSection, folders: Sequence[str]) -> list[str]:
    for folder in folders:
        if ":" in folder or "," in folder:
            raise UserError(
                f"{folder} cannot be shown inside a container: its name holds a colon or a comma",
                hint="use a folder with a plainer name",
            )
    given = [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    shown = {bind.split(":")[1] for bind in given}
    binds = [*given, *(f"{folder}:{folder}" for folder in dict.fromkeys(folders) if folder not in shown)]
    return [_for_enroot(bind, container.kind) for bind in binds] if container.kind in ("enroot", "pyxis") else binds


def _for_enroot(bind: str, kind: str) -> str:
    """Enroot makes a line of fstab of it, where spaces part the fields and `ro` alone is no bind."""
    if any(character.isspace() for character in bind):
        raise UserError(f"{kind} cannot show {bind}: its name holds a space", hint="use a folder with a plainer name")
    source, inside, *options = bind.split(":")
    if kind == "enroot" and options and "bind" not in options[-1]:
        return f"{source}:{inside}:rbind,x-create=auto,{options[-1]}"
    return bind


def python(site: SiteSection, otherwise: str) -> str:
    """The Python that runs ranks."""
    return site.python or otherwise if site.container.kind == "none" else site.container.python


def name(container: ContainerSection) -> str:
    """What an unpacked image is called on a node: the same image, the same name."""
    return f"steelyard-{hashlib.sha256(container.image.encode()).hexdigest()[:12]}"


def unpacked(container: ContainerSection) -> str:
    """Where an image lies unpacked on a node."""
    return str(Path(container.unpack or "/tmp") / f"{name(container)}-{os.getuid()}" / "image")


def preparation(container: ContainerSection, reload: bool) -> str | None:
    """A script for each node, run before the ranks: unpack the image, unless it is there already. None: not needed."""
    image, called = quote(container.image), quote(name(container))
    match container.kind:
        case "enroot":
            remove = f"enroot remove --force {called} || true\n" if reload else ""
            return f"{remove}enroot list | grep -Fxq {called} || enroot create --name {called} {image}\n"
        case "pyxis":
            return f"enroot remove --force pyxis_{called} || true\n" if reload else None
        case "docker" | "podman":
            return (
                f"{container.kind} pull {image} >&2 || {{ echo {quote(NO_PULL)} >&2; exit 1; }}\n" if reload else None
            )
        case "apptainer" | "singularity" if container.unpack:
            return _unpacking(container, reload)
        case _:
            return None


def _unpacking(container: ContainerSection, reload: bool) -> str:
    """Two jobs may come to a node at once: one unpacks, the other waits; a killed one leaves nothing that counts.

    The name of the folder can be guessed, and on many nodes everybody may write beside it.
    """
    image, place = quote(container.image), quote(unpacked(container))
    parent, own = (
        quote(str(each)) for each in (Path(unpacked(container)).parents[1], Path(unpacked(container)).parent)
    )
    return f"""{REFUSING}mkdir -p {parent}
mkdir -m 700 {own} 2>/dev/null
refuse_others {parent} 0 01000
refuse_others {own} "$EUID"
exec 9>{own}/lock
flock 9
{f"rm -rf {place}" if reload else ":"}
if [ ! -d {place} ]; then
    rm -rf {place}.part
    {container.kind} build --sandbox {place}.part {image} && mv {place}.part {place}
fi
"""
