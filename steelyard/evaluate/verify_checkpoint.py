"""Verifies a checkpoint of any format: every checksum, every tensor's name and size, every value.

A checkpoint from elsewhere may have no checksums. It is then read completely, which finds files that are truncated,
missing or unreadable, and weights that are not finite. A flipped bit that leaves a finite number is not found. So the
result lists the files without a checksum.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard.checkpoint import folder as folders
from steelyard.checkpoint import state_file, step_folders
from steelyard.checkpoint.formats import open_source, safetensors
from steelyard.checkpoint.formats.native import SteelyardSource
from steelyard.checkpoint.formats.source import CheckpointSource, holds_adapters, misfits
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core import sha256sums
from steelyard.core.console import console
from steelyard.core.errors import SteelyardError, UserError
from steelyard.core.run import MANIFEST
from steelyard.core.safe_parse import read_json_object
from steelyard.sparsity.mask_file import MaskFile, is_mask_file

ADAPTER = "adapter_config.json"
OF_A_MODEL = {".safetensors", ".bin", ".pt", ".distcp", ".json", ".model", ".jinja"}  # SHA256SUMS must list them.
NAMED = 5  # Up to this many files without a checksum are listed by name.


@dataclass
class VerifyFindings:
    """The result of a verification."""

    path: Path
    problems: list[str] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    without_checksum: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def attempt(self, what: str = "") -> Iterator[None]:
        """Turn any exception in the block into a problem: a damaged file can make its reader fail in any way."""
        try:
            yield
        except SteelyardError as error:
            self._add(error.where or "", " ".join(line.strip() for line in error.message.splitlines()))
        except Exception as error:
            self._add(what, (str(error).splitlines() or [type(error).__name__])[0])

    def _add(self, where: str, message: str) -> None:
        line = f"{where}: {message}" if where else message
        if line not in self.problems:  # A recipe is read for each checkpoint.
            self.problems.append(line)

    def as_dict(self) -> dict[str, Any]:
        """The result for `--json`."""
        return {
            "path": str(self.path),
            "valid": not self.problems,
            "problems": self.problems,
            "checked": dict(self.checked),
            "without_checksum": self.without_checksum,
            "not_checked": self.not_checked,
        }

    def as_text(self) -> str:
        """One line per problem, or a summary."""
        if self.problems:
            return "\n".join(self.problems)
        checked = ", ".join(f"{count:,} {kind}" for kind, count in self.checked.items()) or "nothing to check"
        lines = [f"{self.path}: no problems found; checked: {checked}"]
        lines += [f"no checksum: {_listed(self.without_checksum)}"] if self.without_checksum else []
        return "\n".join([*lines, *(f"not checked: {line}" for line in self.not_checked)])


def verify_checkpoint(path: Path) -> VerifyFindings:
    """Verify a checkpoint, all checkpoints of a run, or a single file of weights or masks."""
    findings = VerifyFindings(path)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    if (path / MANIFEST).is_file():
        check_checkpoints(path / "checkpoints", findings)
    else:
        check_one(path, findings)
    return findings


def check_checkpoints(folder: Path, findings: VerifyFindings) -> None:
    """Verify all checkpoints of a run."""
    for path in step_folders.by_age(folder):
        check_one(path, findings)
    for path in step_folders.by_age(folder / step_folders.DAMAGED):
        findings.not_checked.append(f"{path}, which was found damaged earlier")


def check_one(path: Path, findings: VerifyFindings) -> None:
    """Verify one checkpoint or one file."""
    if (path / folders.STATE).is_file():
        _check_own(path, findings)
        return
    is_file = path.is_file()
    _check_sums(path, findings)
    if (is_file and path.suffix == ".safetensors") or (path / ADAPTER).is_file():
        for file in [path] if is_file else sorted(path.glob("*.safetensors")):
            with findings.attempt(str(file)):
                _check_safetensors(file, findings)
        return
    with findings.attempt(str(path)):
        source = open_source(path)
        _check_source(source, findings)
        if source.tokenizer is not None:
            source.load_tokenizer()
            findings.checked["tokenizers"] += 1


def _check_own(path: Path, findings: VerifyFindings) -> None:
    """A Steelyard checkpoint, whose state.json has checksums of itself and of the other files."""
    with findings.attempt():
        state, sums = state_file.read(path)
        wrong = sha256sums.mismatches(path, sums, folders.STATE)
        findings.problems += wrong
        findings.checked["files by checksum"] += len(sums) - len(wrong)
        own = set(sums)
        if "checksum" in read_json_object(path / folders.STATE):
            own.add(folders.STATE)
            findings.checked["files by checksum"] += 1
        _check_sums(path, findings, own)
        if wrong:
            return
        saved = folders.Checkpoint(path, state)
        _check_values(saved.tensors(), lambda name: _loaded(saved, name), path, findings)
        if "model" not in state and not (path.resolve().parents[1] / MANIFEST).is_file():
            findings.not_checked.append(f"{path}: its tensor names, since it is not inside its run")
        elif state.get("sparsity", {}).get("method") != "learned":
            _check_names(SteelyardSource(saved), findings)


def _loaded(saved: folders.Checkpoint, name: str) -> Tensor:
    size, dtype = saved.tensors()[name]
    tensor = torch.empty(size, dtype=dtype)
    folders.load(saved, {name: TensorShard.whole(tensor)})
    return tensor


def _check_sums(path: Path, findings: VerifyFindings, own: Iterable[str] = ()) -> None:
    """Compare with SHA256SUMS of the folder or of its parent. Files in `own` have another checksum."""
    listed: dict[Path, str] = {}
    for base in (path, path.parent) if path.is_dir() else (path.parent,):
        with findings.attempt():
            sums = sha256sums.read(base) or {}
            inside = {name: sum_ for name, sum_ in sums.items() if path == base / name or path in (base / name).parents}
            wrong = sha256sums.mismatches(base, {name: sum_ for name, sum_ in inside.items() if name not in own})
            findings.problems += wrong
            findings.checked["files by checksum"] += len(inside) - len(wrong)
            listed = {base / name: sum_ for name, sum_ in inside.items()}
        if listed or (base / sha256sums.NAME).is_file():
            break
    here = [path / name for name in sha256sums.files_in(path)] if path.is_dir() else [path]
    covered = {*listed, *(path / name for name in own)}
    unlisted = [file for file in here if file not in covered and not is_mask_file(file)]
    missing = [file for file in unlisted if listed and file.suffix in OF_A_MODEL]
    findings.problems += [f"{file} is not listed in {base / sha256sums.NAME}" for file in missing]
    findings.without_checksum += [str(file) for file in unlisted if file not in missing]


def _check_safetensors(file: Path, findings: VerifyFindings) -> None:
    if is_mask_file(file):
        findings.checked["masks by checksum"] += len(MaskFile(file).names())
        return
    extents = safetensors.extents(file)
    _check_values(extents, lambda name: extents[name].read(), file, findings)


def _check_source(source: CheckpointSource, findings: VerifyFindings) -> None:
    if _check_names(source, findings):
        _check_values(source.names(), source.tensor, source.path, findings)


def _check_names(source: CheckpointSource, findings: VerifyFindings) -> bool:
    """Whether the checkpoint has all tensors of the model and no others."""
    wrong = [] if holds_adapters(source) else misfits(source, source.config)
    findings.problems += [f"{source.path}: {line}" for line in wrong]
    return not wrong


def _check_values(names: Iterable[str], read: Callable[[str], Tensor], path: Path, findings: VerifyFindings) -> None:
    names = list(names)
    with console.progress("values", len(names), "tensors") as progress:
        for name in names:
            with findings.attempt(f"{path}: {name}"):
                tensor = read(name)
                bad = math.prod(tensor.shape) - int(torch.isfinite(tensor).sum()) if tensor.is_floating_point() else 0
                if bad:
                    findings.problems.append(f"{path}: {name}: {bad:,} of {tensor.numel():,} values are not finite")
                findings.checked["tensors"] += 1
            progress.advance(1)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
