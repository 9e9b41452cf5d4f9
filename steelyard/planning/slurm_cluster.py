"""Write a cluster file from Slurm's `sinfo`, which reports partitions, nodes and GPUs, but no links or prices.

The input is the output of `sinfo --noheader --Node --format "%N|%P|%G|%f|%m"`: node, partition, generic resources such
as `gpu:a10:4(S:0-1)`, features such as `a100_80gb`, and megabytes of memory; the last two are optional. A node in
several partitions is counted once, in the first one. GPU names are site-specific and often lack the memory size: every
guess is reported to the user and written into the file as a comment.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.sizes.gpu_catalogue import by_name

COMMAND = ["sinfo", "--noheader", "--Node", "--format", "%N|%P|%G|%f|%m"]
GRES = re.compile(r"gpu:(?:([A-Za-z0-9_.-]+):)?(\d+)")
MAKER = re.compile(r"^(?:nvidia|tesla|geforce|quadro)[-_ ]+|[-_ ](?:sxm\d?|hbm\w*|nvl)(?=[-_ ]|$)")
SIZE = re.compile(r"(?:^|[^0-9.])(\d{1,3})\s*g(?:i?b)?$")
SLICE = re.compile(r"\dg\.\d+gb")  # A MIG instance.
# GPUs with more than one memory size; the first one is the default.
MEMORIES = {
    "a100": {80: "a100-80", 40: "a100-40"},
    "v100": {32: "v100-32", 16: "v100-16"},
    "v100s": {32: "v100-32"},
    "gh200": {96: "gh200-96", 144: "gh200-144"},
    "h100": {80: "h100-80"},
    "3090": {24: "rtx3090"},
    "4090": {24: "rtx4090"},
}


def ask() -> str:
    """Run sinfo on this machine."""
    try:
        return subprocess.run(COMMAND, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        raise RuntimeFailure(
            "sinfo is not installed here",
            hint=f"run {' '.join(COMMAND)!r} on the cluster, and use --from FILE",
        ) from None
    except subprocess.CalledProcessError as error:
        raise RuntimeFailure(f"sinfo failed: {str(error.stderr).strip() or error}") from None
    except subprocess.SubprocessError as error:
        raise RuntimeFailure(f"sinfo failed: {error}") from None


def read(path: Path) -> str:
    """Read saved output of sinfo."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None


def nodes(text: str) -> list[dict[str, Any]]:
    """The `[[nodes]]` tables, one for each partition and type of GPU; `guessed` describes a guess."""
    seen: set[str] = set()
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        fields = line.strip().split("|")
        if len(fields) not in (3, 5):
            raise UserError(
                f"line {number} is not output of sinfo: {line.strip()[:60]}",
                hint=f"save the output of {' '.join(COMMAND)}",
            )
        name, partition, gres = fields[:3]
        features, memory = fields[3:] if len(fields) == 5 else ("", "")
        for kind, count in GRES.findall(gres):
            if name in seen:
                continue
            seen.add(name)
            gpu, guessed = _gpu(kind or "gpu", features)
            key = (partition.rstrip("*"), kind or "gpu", gpu, int(count))
            entry = found.setdefault(key, _entry(partition.rstrip("*"), kind or "gpu", gpu, int(count), guessed))
            entry["count"] += 1
            if memory.rstrip("+").isdigit():
                host = round(int(memory.rstrip("+")) / 1024, 1)
                entry["host_gib"] = min(host, entry.get("host_gib", host))
    if not found:
        raise UserError(
            "the output of sinfo lists no node with GPUs",
            hint="check with sinfo -o '%N %G' that GPUs are configured as gres",
        )
    types = [entry["type"] for entry in found.values()]
    for entry in found.values():
        if types.count(entry["type"]) > 1:
            entry["type"] = f"{entry['type']}-{entry['partition']}-{entry['gpus']}"
    names = [entry["type"] for entry in found.values()]
    for number, entry in enumerate(found.values()):  # Still not unique: append GPU and number.
        if names.count(entry["type"]) > 1:
            entry["type"] = f"{entry['type']}-{entry['gpu']}-{number}"
    return list(found.values())


def _gpu(kind: str, features: str) -> tuple[str, str | None]:
    """The catalogue name of a GPU from its Slurm name, or the Slurm name itself; and a description of a guess."""
    name, hints = kind.lower(), [hint.lower() for hint in re.split(r"[,&|]", features)]
    if SLICE.search(name):
        return name, f"{kind} is a MIG instance, which runs with several ranks cannot use"
    bare = MAKER.sub("", MAKER.sub("", name))
    family = re.split(r"[-_. ]", bare)[0]
    if "h100" in (family, bare) and any("pcie" in hint for hint in (name, *hints)):
        return "h100-pcie", None
    sizes = [int(size) for hint in (bare, *hints) if (size := "".join(SIZE.findall(hint)))]
    choices = MEMORIES.get(family)
    if choices is None:
        spellings = (bare.replace("_", "-"), bare, re.sub(r"[-_ ]", "", bare), family)
        known = next((gpu for spelling in spellings if (gpu := by_name(spelling)) is not None), None)
        return (known.name if known else name), None
    reported = next((choices[size] for size in sizes if size in choices), None)
    if reported is not None or len(choices) == 1:
        return reported or next(iter(choices.values())), None
    guess = next(iter(choices.values()))
    others = ", ".join(other for other in choices.values() if other != guess)
    return guess, f"Slurm reports {kind} without its memory size: assumed {guess}; otherwise write {others}"


def _entry(partition: str, kind: str, gpu: str, gpus: int, guessed: str | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "type": re.sub(r"[^A-Za-z0-9._-]+", "-", kind.lower()),
        "count": 0,
        "gpu": gpu,
        "gpus": gpus,
        "partition": partition,
        "gres": f"gpu:{kind}:{gpus}" if kind != "gpu" else f"gpu:{gpus}",
    }
    return entry | ({"guessed": guessed} if guessed else {})


def guesses(found: list[dict[str, Any]]) -> list[str]:
    """The guesses in a cluster file that the user should check."""
    found_guesses = [f"nodes {entry['type']}: {entry['guessed']}" for entry in found if "guessed" in entry]
    unknown = [entry for entry in found if by_name(entry["gpu"]) is None]
    found_guesses += [
        f"nodes {entry['type']}: {entry['gpu']} is not in the catalogue; define it in a [[gpus]] table, or write "
        "its name in the catalogue"
        for entry in unknown
    ]
    return [
        *found_guesses,
        "links: 12.5 GB/s over RDMA between all nodes is a guess; Slurm does not report the network",
    ]


def as_toml(found: list[dict[str, Any]]) -> str:
    """The cluster file as TOML, to be completed by the user."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("From sinfo. Fill in what it does not report: price_hour, intra_GBps, and the links."))
    tables = tomlkit.aot()
    for entry in found:
        table = tomlkit.table()
        table.update({key: value for key, value in entry.items() if key != "guessed"})
        if by_name(entry["gpu"]) is None:
            table.add(tomlkit.comment(f"{entry['gpu']} is not in the catalogue: define it in a [[gpus]] table"))
        if "guessed" in entry:
            table.add(tomlkit.comment(f"a guess: {entry['guessed']}"))
        tables.append(table)
    document.add("nodes", tables)
    links = tomlkit.aot()
    link = tomlkit.table()
    link.update({"between": ["*", "*"], "GBps": 12.5, "latency_us": 5.0, "transport": "rdma"})
    link.add(tomlkit.comment('a guess: 100 Gbit/s InfiniBand, per node and direction; sockets: transport = "tcp"'))
    links.append(link)
    document.add("links", links)
    return tomlkit.dumps(document)
