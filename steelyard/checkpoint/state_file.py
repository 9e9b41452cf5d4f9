"""`state.json` of a checkpoint: counters, the checksums of all other files, and a checksum of itself.

    {"format": 2, "step": 100, "samples": 800, ..., "files": {NAME: SHA-256}, "checksum": SHA-256}

`checksum` is that of everything else in the file, as compact JSON with sorted keys. A file without `format` and
`checksum` is of format 1, which Steelyard 0.1 wrote: it is read, but only its types and ranges can be checked. A file
of a newer format is refused with the version of the format that it needs.

A file that cannot be read is not a damaged one: the disk or the network may be back in a moment. Reading is tried
again a few times, and then reported as an input/output error.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from steelyard.core import files
from steelyard.core.errors import Damaged, Fault, UserError

NAME = "state.json"
FORMAT = 2
MOST_BYTES = 64 << 20  # The largest known, of a run over 10,000 ranks, has 2 MiB.
SECONDS_BETWEEN_TRIES = (0.1, 0.5, 2.0)

Result = TypeVar("Result")


def write(folder: Path, state: dict[str, Any], sums: dict[str, str]) -> None:
    """Write the state of a checkpoint whose other files have these checksums."""
    content = {"format": FORMAT, **state, "files": dict(sorted(sums.items()))}
    files.write_json(folder / NAME, {**content, "checksum": _checksum(content)})


def read(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The state and the checksums of the other files, checked as far as the file itself allows."""
    path = folder / NAME
    content = _parsed(path, retried(path, lambda: _text(path)))
    if "format" in content or "checksum" in content:
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            raise damaged(folder, f"{NAME} does not match its own checksum")
        version = content.pop("format", None)
        if not isinstance(version, int) or version > FORMAT:
            raise UserError(
                f"checkpoint {folder} has format {version}, and this Steelyard reads formats up to {FORMAT}",
                mend="use the Steelyard that wrote it, or a newer one",
            )
    sums = content.pop("files", None)
    if (
        not isinstance(sums, dict)
        or not sums
        or not all(_is_plain_name(n) and isinstance(s, str) for n, s in sums.items())
    ):
        raise damaged(folder, f"{NAME} names no files with their checksums")
    for problem in _problems(content):
        raise damaged(folder, f"{NAME}: {problem}")
    return content, sums


def damaged(folder: Path, why: str) -> Damaged:
    """The error for a checkpoint that is not as it was written."""
    return Damaged(f"checkpoint {folder} is damaged: {why}")


def retried(path: Path, action: Callable[[], Result]) -> Result:
    """Read something of a file, again after errors that may pass."""
    for seconds in (*SECONDS_BETWEEN_TRIES, None):
        try:
            return action()
        except FileNotFoundError:
            raise damaged(path.parent, f"{path.name} is missing") from None
        except OSError as error:
            if seconds is None or isinstance(error, PermissionError):
                raise Fault(
                    f"{path} cannot be read: {error.strerror or error}",
                    mend="this is an error of the disk, the network or the permissions: the checkpoint may be whole",
                ) from error
            time.sleep(seconds)
    raise AssertionError("the last try returns or raises")


def _text(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(MOST_BYTES + 1)


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    if len(text) > MOST_BYTES:
        raise damaged(path.parent, f"{path.name} is larger than {MOST_BYTES >> 20} MiB")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path.parent, f"{path.name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise damaged(path.parent, f"{path.name} is not a JSON object")
    return content


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name and name != NAME


def _problems(state: dict[str, Any]) -> list[str]:
    """What is wrong with the counters. Every checkpoint has a step; one that is no run's may have nothing else."""
    problems = [] if "step" in state else ["step is missing"]
    for name in ("step", "samples", "tokens", "loss_tokens", "skipped", "nonfinite", "streak", "schedule_steps",
                 "schedule_samples"):  # fmt: skip
        value = state.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 63:
            problems.append(f"{name} is {value!r:.40}, not a count")
    for name in ("loss_sum", "valid_loss"):
        value = state.get(name, 0.0)
        if type(value) not in (int, float) or not math.isfinite(value):
            problems.append(f"{name} is {value!r:.40}, not a finite number")
    scale = state.get("loss_scale", {})
    if not isinstance(scale, dict) or any(
        type(value) not in (int, float) or not math.isfinite(value) or value < 0 for value in scale.values()
    ):
        problems.append(f"loss_scale is {scale!r:.80}")
    return problems
