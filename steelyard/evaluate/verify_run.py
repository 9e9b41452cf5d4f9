"""Verifies a run folder and the files its recipe names: records, checkpoints, token files, masks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import RuntimeFailure, SteelyardError
from steelyard.core.recipe import Recipe
from steelyard.core.run import MANIFEST, METRICS, RECIPE, SESSIONS, Run
from steelyard.core.safe_parse import loads
from steelyard.evaluate.verify_checkpoint import VerifyFindings, check_checkpoints, check_one
from steelyard.sparsity.mask_file import MaskFile
from steelyard.tokens import inspect
from steelyard.tokens.samples import expand_sources

OBJECTS = ("launch.json", "hosts/*.json", "launch/*.json")
RECORDS = (METRICS, SESSIONS, "verdicts.jsonl", "scheduler.jsonl", "timeline/*.jsonl", "logs/*.gpu")
EVENTS = "events.out.tfevents.*"


def verify_run(path: Path) -> VerifyFindings:
    """Check a run folder."""
    run, findings = Run.open(path), VerifyFindings(path)
    findings.without_checksum += [str(path / name) for name in (MANIFEST, RECIPE) if (path / name).is_file()]
    findings.checked["files by their form"] += 1  # The manifest, which was read when the run was opened.
    for pattern in OBJECTS:
        for file in sorted(path.glob(pattern)):
            with findings.attempt(str(file)):
                loads(file.read_bytes())
                findings.checked["files by their form"] += 1
    for pattern in RECORDS:
        for file in sorted(path.glob(pattern)):
            findings.without_checksum.append(str(file))
            with findings.attempt(str(file)):
                _check_records(file, findings)
    for file in sorted(path.rglob(EVENTS)):
        _check_events(file, findings)
    for leftover in sorted(path.glob(f"**/{files.TEMPORARY}*")):
        findings.not_checked.append(f"{leftover}, left by a killed command")
    check_checkpoints(run.checkpoints, findings)
    if (path / "hf").is_dir():
        check_one(path / "hf", findings)
    with findings.attempt(str(path / RECIPE)):
        recipe = run.recipe()
        findings.checked["files by their form"] += 1
        _check_token_files(recipe, findings)
        _check_masks(recipe, findings)
    return findings


def _check_records(file: Path, findings: VerifyFindings) -> None:
    """Every line must be a JSON object. A last line without a newline was being written when the writer was killed."""
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                record: Any = loads(line)
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict) and (file.name != METRICS or isinstance(record.get("step"), int)):
                findings.checked["records"] += 1
            elif line.endswith(b"\n"):
                findings.problems.append(f"{file}: line {number} is not a record")
            else:
                findings.not_checked.append(f"{file}: line {number}, left incomplete by a killed writer")


def _check_events(file: Path, findings: VerifyFindings) -> None:
    """Compare TensorBoard's records with their checksums: u64 length, its masked CRC-32C, the record, its CRC-32C."""
    try:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c  # type: ignore[import-untyped]
    except ImportError:
        findings.not_checked.append(f"{file}, since TensorBoard is not installed")
        return
    with findings.attempt(str(file)), open(file, "rb") as events:
        size = file.stat().st_size
        while head := events.read(12):
            length = int.from_bytes(head[:8], "little")
            if len(head) < 12 or events.tell() + length + 4 > size:
                findings.not_checked.append(f"{file}: the last record, which is incomplete")
                return
            record, crc = events.read(length), events.read(4)
            for part, expected in ((head[:8], head[8:]), (record, crc)):
                if masked_crc32c(part) != int.from_bytes(expected, "little"):
                    findings.problems.append(f"{file}: a record before byte {events.tell()} does not match its CRC-32C")
                    return
            findings.checked["events by checksum"] += 1


def _check_token_files(recipe: Recipe, findings: VerifyFindings) -> None:
    for prefix in _prefixes(recipe, findings):
        with findings.attempt(prefix):
            try:
                found = inspect.verify(prefix, recipe.model.vocab)
            except RuntimeFailure:
                raise
            except SteelyardError as error:  # One of the two files does not exist here.
                findings.not_checked.append(f"{prefix}: {error.message}")
                continue
            findings.checked["token files"] += 1
            if not found["checksums"]:
                findings.without_checksum.append(prefix)


def _prefixes(recipe: Recipe, findings: VerifyFindings) -> Iterator[str]:
    """The token files that a recipe names. They may be on another machine, which is not an error."""
    for key in ("train", "valid", "test"):
        sources = getattr(recipe.data, key)
        try:
            yield from (each.prefix for each in expand_sources(sources, recipe, f"data.{key}")) if sources else ()
        except SteelyardError as error:
            findings.not_checked.append(f"data.{key}: {error.message}")


def _check_masks(recipe: Recipe, findings: VerifyFindings) -> None:
    sparsity = recipe.sparsity
    for name in (sparsity.mask, sparsity.prior) if sparsity else ():
        if name is None or name == "weights":
            continue
        if not Path(name).is_file():
            findings.not_checked.append(f"{name}: the file does not exist here")
            continue
        with findings.attempt(name):
            findings.checked["masks by checksum"] += len(MaskFile(name).names())
