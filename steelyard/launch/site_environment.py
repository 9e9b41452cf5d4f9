"""Wraps a command in the environment of a site: modules, variables and container.

Arguments are lists until the script is written, where each one is quoted, so that user input cannot inject shell code.
The folders of a run are mounted in a container under the same paths, so that a path means the same inside and outside.

Docker and Podman run a container separately from the `run` client that requested it. Killing that client, as
`cancel --now`, a scheduler or the kernel do, would leave the ranks training. So a shell holds a pipe in the run folder
open and waits for the client. The node agent inside reads from the pipe and dies when no process holds it open any
more. The client must not hold the pipe itself: Podman passes its open files on to the process that monitors the
container.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from shlex import join, quote

from steelyard.core.errors import UserError
from steelyard.core.recipe.site_section import ContainerSection, SiteSection
from steelyard.launch.launch_record import FOLDER

# Docker, Podman and Enroot pass only named variables: these, and those that the backend sets for ranks.
PASSED_ON = (
    "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE",
    "WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL",
)  # fmt: skip
# Settings of a Python installation on the host must not affect Python in the image.
CLEARED = ("PYTHONHOME", "PYTHONPATH", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "CONDA_EXE", "CONDA_PYTHON_EXE")
SHELL = "/bin/sh"
NO_PULL = "error: the image cannot be pulled; an image built on this machine is current: omit --reload-container"
# Enroot clears the environment and changes to the home folder. It keeps named variables, but sets unset ones to "".
ENROOT = """options=()
for name in $1; do if [ -n "${!name+set}" ]; then options+=(--env "$name"); fi; done
shift
exec enroot start "${options[@]}" "$@"
"""
# A folder must belong to the user or to $2, not be a link, and not be writable for others. A folder that may have the
# sticky bit ($3), like /tmp, may be a link and writable for all.
REFUSING = """refuse_others() {
    { [ -n "$3" ] || [ ! -L "$1" ]; } && read -r owner mode < <(stat -L -c '%u %a' -- "$1") || owner= mode=0
    [[ $owner == "$EUID" || $owner == "$2" ]] && (( (0$mode & 022) == 0 || 0$mode & ${3:-0} )) && return
    echo "error: $1 belongs to another user or is writable for others: set unpack to a folder of your own" >&2
    exit 1
}
"""
IN_FOLDER = [SHELL, "-c", 'cd "$0" && exec "$@"']
HEAD = "#!/bin/bash\n# Written by steelyard submit; the next submission overwrites changes.\n"
MODULES = """if ! command -v module >/dev/null; then
    for file in /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /usr/share/modules/init/bash; do
        if [ -r "$file" ]; then . "$file"; break; fi
    done
fi
"""
WATCHDOG_PIPE = "STEELYARD_LIFELINE"  # the path of the pipe; Steelyard in an older image reads this name
SAME_REQUEST_SECONDS = 5.0
# $1 is the folder, the rest the client's command. The reader inside may be another user. On a file system without
# pipes the container runs without one. Signals are forwarded. The client has its own session, so that it does not also
# get signals of the process group. Background processes of a shell ignore SIGINT, so it is forwarded as SIGTERM. The
# parent is polled, because a killed mpirun does not stop what it started.
WATCHDOG_SHELL = f"""pipe=$(mktemp -u -- "$1/alive.XXXXXXXX")
shift
if mkfifo -m 644 -- "$pipe" 2>/dev/null && exec 9<>"$pipe"; then export {WATCHDOG_PIPE}="$pipe"; fi
setsid "$@" 9>&- &
client=$!
trap 'kill -TERM $client 2>/dev/null' TERM INT
trap 'kill -USR1 $client 2>/dev/null' USR1
while read -r _ _ _ parent _ </proc/$$/stat; do
    [ "$parent" = $PPID ] || {{ kill -KILL $$; break; }}
    sleep 1
done 9>&- >/dev/null 2>&1 &
watcher=$!
while wait $client; kill -0 $client 2>/dev/null; do :; done
wait $client
code=$?
kill $watcher 2>/dev/null
rm -f -- "$pipe"
exit $code
"""


def preamble(site: SiteSection, workdir: str) -> str:
    """The start of a script: modules, environment, and the working directory."""
    lines = [HEAD]
    if site.modules:
        lines.append(f"{MODULES}module load {join(site.modules)} || exit 1\n")
    if site.container.kind != "none":
        lines.append(f"unset {' '.join(CLEARED)}\n")
    lines += [_exported(site, name, quote(value)) for name, value in site.environment.items()]
    for name, folders in site.prepend.items():
        if name == "PATH":
            lines.append(_exported_path(site, quote(":".join(folders))))
            continue
        lines.append(_exported(site, name, f'{quote(":".join(folders))}"${{{name}:+:${name}}}"'))
    lines.append(f"cd -- {quote(workdir)} || exit 1\n")
    return "".join(lines)


def _exported(site: SiteSection, name: str, value: str) -> str:
    """A line that exports a variable. apptainer accepts some, like LD_LIBRARY_PATH, only with its own prefix."""
    lines = f"export {name}={value}\n"
    if site.container.kind in ("apptainer", "singularity"):
        lines += f'export {site.container.kind.upper()}ENV_{name}="${name}"\n'
    return lines


def _exported_path(site: SiteSection, folders: str) -> str:
    """A line that extends PATH. Inside an image the image's PATH stays, since the host's would hide its programs."""
    lines = f'export PATH={folders}"${{PATH:+:$PATH}}"\n'
    if site.container.kind in ("apptainer", "singularity"):
        lines += f"export {site.container.kind.upper()}ENV_PREPEND_PATH={folders}\n"
    return lines


def executing(command: Sequence[str]) -> str:
    """The last line of a script: exec of the command, so that signals reach it."""
    return f"exec {join(command)}\n"


def wrapped(
    site: SiteSection,
    command: Sequence[str],
    workdir: str,
    run: str | None,
    gpus: bool,
    variables: Sequence[str] = (),
) -> list[str]:
    """The command with the container runtime in front. With `run`, the container ends when its client ends.

    `variables` are those of the backend. Pyxis adds nothing here: it consists of srun options (`pyxis_options`).
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
            options = [" ".join(_passed(site, variables)), "--rw", *mounts, *container.options]
            return ["bash", "-c", ENROOT, "enroot", *options, name(container), *IN_FOLDER, workdir, *command]
        case "docker" | "podman":
            words = [*_docker(site, binds, workdir, gpus, variables), container.image, *command]
            return with_watchdog(words, str(Path(run) / FOLDER)) if run else words
        case _:
            return list(command)


def _docker(site: SiteSection, binds: Sequence[str], workdir: str, gpus: bool, variables: Sequence[str]) -> list[str]:
    kind = site.container.kind
    words = [kind, "run", "--rm", "--init", "--network=host", "--ipc=host"]
    if kind == "docker":
        words.append(f"--user={os.getuid()}:{os.getgid()}")
        if os.getuid():  # The image does not know this user. Compilers need a home and a name for their caches.
            words += ["--env=HOME=/tmp", f"--env=USER={os.getuid()}"]
    if gpus:  # InfiniBand cards access locked memory.
        words += ["--gpus=all", "--ulimit=memlock=-1"] if kind == "docker" else ["--device=nvidia.com/gpu=all"]
    words += [word for bind in binds for word in ("--volume", bind)]
    return [
        *words,
        *(word for each in _passed(site, variables) for word in ("--env", each)),
        "--workdir",
        workdir,
        *site.container.options,
    ]


def _passed(site: SiteSection, variables: Sequence[str]) -> list[str]:
    """Variables to pass. The host's PATH is passed only if a site sets it: it would hide the image's programs."""
    prepended = [name for name in site.prepend if name != "PATH"]
    return list(dict.fromkeys([*PASSED_ON, *variables, WATCHDOG_PIPE, *site.environment, *prepended]))


def pyxis_options(site: SiteSection, workdir: str, run: str) -> list[str]:
    """The options that pyxis adds to the srun command."""
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
                f"{folder} cannot be mounted in a container: its name contains a colon or a comma",
                hint="use a folder with a plainer name",
            )
    configured = [bind if ":" in bind else f"{bind}:{bind}" for bind in container.binds]
    shown = {bind.split(":")[1] for bind in configured}
    binds = [*configured, *(f"{folder}:{folder}" for folder in dict.fromkeys(folders) if folder not in shown)]
    return [_for_enroot(bind, container.kind) for bind in binds] if container.kind in ("enroot", "pyxis") else binds


def _for_enroot(bind: str, kind: str) -> str:
    """The bind for Enroot, which writes it to an fstab: spaces separate fields, and `ro` alone is not a bind option."""
    if any(character.isspace() for character in bind):
        raise UserError(
            f"{kind} cannot mount {bind}: its name contains a space", hint="use a folder with a plainer name"
        )
    source, inside, *options = bind.split(":")
    if kind == "enroot" and options and "bind" not in options[-1]:
        return f"{source}:{inside}:rbind,x-create=auto,{options[-1]}"
    return bind


def python(site: SiteSection, otherwise: str) -> str:
    """The Python interpreter of the ranks."""
    return site.python or otherwise if site.container.kind == "none" else site.container.python


def name(container: ContainerSection) -> str:
    """The name of an unpacked image on a node, derived from the image."""
    return f"steelyard-{hashlib.sha256(container.image.encode()).hexdigest()[:12]}"


def unpacked(container: ContainerSection) -> str:
    """The path of an unpacked image on a node."""
    return str(Path(container.unpack or "/tmp") / f"{name(container)}-{os.getuid()}" / "image")


def preparation(container: ContainerSection, reload: bool) -> str | None:
    """A script that runs on each node before the ranks: unpack the image if it is not there. None: not needed."""
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
    """Two jobs may start on a node at once: one unpacks, the other waits. A killed one leaves no incomplete image.

    The folder name is predictable, and on many nodes every user can write to its parent.
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


def with_watchdog(client: list[str], folder: str) -> list[str]:
    """The client's command, wrapped in the shell that holds the pipe."""
    return ["bash", "-c", WATCHDOG_SHELL, "watchdog", folder, *client]


def hold(otherwise: float) -> float:
    """Inside the container: die when no process outside holds the pipe. Does nothing without a pipe.

    Returns the seconds within which two stop signals count as one, `otherwise` without a pipe. A scheduler signals the
    shell and the client, and on a busy machine a runtime needs time to forward each.
    """
    path = os.environ.pop(WATCHDOG_PIPE, None)
    if path is None:
        return otherwise
    try:
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:  # The client was killed, and its shell removed the pipe, before this process started.
        _die(path)
    except OSError:
        pass
    else:
        os.set_blocking(pipe, True)
        threading.Thread(target=_wait, args=(pipe, path), daemon=True).start()
    return SAME_REQUEST_SECONDS


def _wait(pipe: int, path: str) -> None:
    while os.read(pipe, 4096):
        pass
    _die(path)


def _die(path: str) -> None:
    with suppress(OSError):
        Path(path).unlink()
    os.kill(os.getpid(), signal.SIGKILL)
