"""`state.json` of a checkpoint: counters, the checksums of all other files, and a checksum of itself.

    {"format": 2, "steelyard": "0.1.0", "step": 100, "samples": 800, ..., "files": {NAME: SHA-256}, "checksum": SHA-256}

`checksum` covers everything else in the file, as compact JSON with sorted keys, in this and all later formats. A file
without `format` and `checksum` has format 1: it is read, but only its keys, types and ranges can be checked. A file of
a newer format is rejected with a message that names the version of Steelyard that wrote it.

A file that cannot be read is not considered damaged: the disk or the network may recover. Reading is retried a few
times, and then an input/output error is raised.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from steelyard import __version__
from steelyard.core import files
from steelyard.core.errors import CorruptFileError, RuntimeFailure, UserError

NAME = "state.json"
FORMAT = 2
MOST_BYTES = 64 << 20  # A rank adds about 100 bytes.
FILE_NAME = re.compile(r"(?!\.{1,2}$|state\.json$)[\w.-]{1,255}", re.ASCII)
SECONDS_BETWEEN_TRIES = (0.1, 0.5, 2.0)
COUNTERS = ("samples", "tokens", "loss_tokens", "skipped", "nonfinite", "streak", "schedule_steps", "schedule_samples")
NEEDED_TO_RESUME = ("samples", "tokens", "schedule_steps", "schedule_samples")
LARGEST = 1e308

Result = TypeVar("Result")


def write(folder: Path, state: dict[str, Any], sums: dict[str, str]) -> None:
    """Write the state of a checkpoint whose other files have these checksums."""
    own = {"format": FORMAT, "steelyard": __version__, "files": dict(sorted(sums.items()))}
    assert not {*own, "checksum"} & state.keys(), "these keys are reserved"
    # Convert to JSON and back, because a reader computes the checksum of the parsed file.
    content = json.loads(json.dumps(own | state))
    files.write_json(folder / NAME, {**content, "checksum": _checksum(content)})


def read(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The state, validated, and the checksums of the other files."""
    path = folder / NAME
    content = _parsed(path, retried(path, lambda: _text(path)))
    if "format" in content or "checksum" in content:
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            raise damaged(folder, f"{NAME} does not match its own checksum")
        version, writer = content.pop("format", None), content.pop("steelyard", None)
        if not isinstance(version, int) or version > FORMAT:
            raise UserError(
                f"checkpoint {folder} has format {version}, but Steelyard {__version__} reads formats up to {FORMAT}",
                hint=f"install Steelyard {writer or 'of the version that wrote it'} or newer",
            )
    sums = content.pop("files", None)
    if not isinstance(sums, dict) or not sums or not all(FILE_NAME.fullmatch(name) for name in sums):
        raise damaged(folder, f"{NAME} lists no files with checksums")
    problems = _problems(content)
    if problems:
        raise damaged(folder, f"{NAME}: {problems[0]}")
    return content, sums


def damaged(folder: Path, why: str) -> CorruptFileError:
    """The error for a damaged checkpoint."""
    return CorruptFileError(f"checkpoint {folder} is damaged: {why}")


def retried(path: Path, action: Callable[[], Result]) -> Result:
    """Call `action`, which reads `path`, and retry it after input/output errors."""
    for seconds in (*SECONDS_BETWEEN_TRIES, None):
        try:
            return action()
        except (FileNotFoundError, NotADirectoryError):
            raise damaged(path.parent, f"{path.name} is missing") from None
        except OSError as error:
            if seconds is None or isinstance(error, PermissionError):
                raise RuntimeFailure(
                    f"{path} cannot be read: {error.strerror or error}",
                    hint="check the disk, the network and the permissions, then run the same command again",
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


def _problems(state: dict[str, Any]) -> list[str]:
    """Errors in the counters. A converted checkpoint has only a step; a checkpoint of a run has all counters."""
    required = ("step", *(NEEDED_TO_RESUME if any(name in state for name in COUNTERS) else ()))
    problems = [f"{name} is missing" for name in required if name not in state]
    for name in ("step", *COUNTERS):
        value = state.get(name, 0)
        if type(value) is not int or not 0 <= value < 1 << 63:
            problems.append(f"{name} is {value!r:.40}, not a count")
    numbers: dict[str, Any] = {name: state[name] for name in ("loss_sum", "valid_loss") if name in state}
    scale = state.get("loss_scale", {})
    if isinstance(scale, dict):
        numbers |= {f"loss_scale.{name}": value for name, value in scale.items()}
    else:
        problems.append(f"loss_scale is {scale!r:.40}, not a table")
    for name, value in numbers.items():
        if type(value) not in (int, float) or not -LARGEST < value < LARGEST:
            problems.append(f"{name} is {value!r:.40}, not a finite number")
    return problems
