"""A cluster file from what Slurm knows: `sinfo` gives partitions, nodes and their GPUs; links and prices it does not.

Read is the output of `sinfo --noheader --Node --format "%N|%P|%G"`: node, partition, generic resources such as
`gpu:a10:4(S:0-1)`. A node that is in several partitions is counted once, in the first that is named.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from steelyard.core.errors import Fault, UserError
from steelyard.sizes.gpus import by_name

COMMAND = ["sinfo", "--noheader", "--Node", "--format", "%N|%P|%G"]
GRES = re.compile(r"gpu:(?:([A-Za-z0-9_.-]+):)?(\d+)")
# What administrators call GPUs, beside the catalogue's own names.
NAMES = {
    "v100": "v100-32",
    "v100s": "v100-32",
    "a100": "a100-80",
    "a100_80": "a100-80",
    "h100": "h100-80",
    "3090": "rtx3090",
}


def ask() -> str:
    """The output of sinfo on this machine."""
    try:
        return subprocess.run(COMMAND, capture_output=True, text=True, timeout=60, check=True).stdout
    except FileNotFoundError:
        raise Fault(
            "sinfo is not installed here", mend=f"run {' '.join(COMMAND)!r} on the cluster, and name the file"
        ) from None
    except subprocess.SubprocessError as error:
        raise Fault(f"sinfo failed: {error}") from None


def read(path: Path) -> str:
    """The output of sinfo, saved to a file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None


def nodes(text: str) -> list[dict[str, Any]]:
    """The `[[nodes]]` of a cluster, one for each partition and kind of GPU."""
    seen: set[str] = set()
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        fields = line.strip().split("|")
        if len(fields) != 3:
            raise UserError(
                f"line {number} is not what sinfo prints: {line.strip()[:60]}",
                mend=f"save the output of {' '.join(COMMAND)}",
            )
        name, partition, gres = fields
        for kind, count in GRES.findall(gres):
            if name in seen:
                continue
            seen.add(name)
            partition = partition.rstrip("*")
            key = (partition, kind or "gpu", int(count))
            entry = found.setdefault(key, _entry(*key))
            entry["count"] += 1
    if not found:
        raise UserError("no node with GPUs is in this output", mend="are GPUs configured as gres? see sinfo -o '%N %G'")
    types = [entry["type"] for entry in found.values()]
    for entry in found.values():
        if types.count(entry["type"]) > 1:
            entry["type"] = f"{entry['type']}-{entry['partition']}-{entry['gpus']}"
    return list(found.values())


def _entry(partition: str, kind: str, gpus: int) -> dict[str, Any]:
    name = kind.lower()
    known = by_name(NAMES.get(name, name)) or by_name(name.replace("_", "-"))
    return {
        "type": re.sub(r"[^A-Za-z0-9._-]+", "-", name),
        "count": 0,
        "gpu": known.name if known else name,
        "gpus": gpus,
        "partition": partition,
        "gres": f"gpu:{kind}:{gpus}" if kind != "gpu" else f"gpu:{gpus}",
    }


def as_toml(found: list[dict[str, Any]]) -> str:
    """A cluster file to fill in."""
    import tomlkit

    document = tomlkit.document()
    document.add(tomlkit.comment("From sinfo. Fill in what it does not know: price_hour, intra_GBps, and the links."))
    tables = tomlkit.aot()
    for entry in found:
        table = tomlkit.table()
        table.update(entry)
        if by_name(entry["gpu"]) is None:
            table.add(tomlkit.comment(f"{entry['gpu']} is not in the catalogue: describe it in a [[gpus]] table"))
        tables.append(table)
    document.add("nodes", tables)
    links = tomlkit.aot()
    link = tomlkit.table()
    link.update({"between": ["*", "*"], "GBps": 12.5, "latency_us": 5.0})
    link.add(tomlkit.comment("a guess: 100 Gbit/s InfiniBand, per node and direction"))
    links.append(link)
    document.add("links", links)
    return tomlkit.dumps(document)
