"""A job that writes token files: its options, and the signature by which it is resumed.

While it runs, `<prefix>.tokenize/` has its finished chunks and its signature; when it is finished,
`<prefix>.tokenize.json` has the signature (`.sample` for `data sample`). A job with another input, tokenizer or option
has another signature, so it is never resumed or reused by mistake.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.safe_parse import loads
from steelyard.text.corpus import PIECE_BYTES, DocumentMode
from steelyard.tokens.indexed_dataset import bin_path, idx_path

KINDS = ("tokenize", "sample")


class TokenJob:
    """A job that writes token files chunk by chunk; `kind` names what it keeps beside them."""

    kind: ClassVar[str]
    prefix: str
    keys: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The folder of finished chunks."""
        return Path(f"{self.prefix}.{self.kind}")

    @property
    def record(self) -> Path:
        """The record of a finished job."""
        return Path(f"{self.prefix}.{self.kind}.json")

    def output(self, key: str) -> str:
        """The prefix of the pair of files of one key."""
        return f"{self.prefix}_{key}_document"


@dataclass(frozen=True)
class TokenizeJob(TokenJob):
    """The inputs and options of a job."""

    kind = "tokenize"
    inputs: tuple[str, ...]
    tokenizer: str
    prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    document: DocumentMode = "line"
    on_bad_line: Literal["stop", "skip"] = "stop"
    fixed_length: int | None = None
    piece_bytes: int = PIECE_BYTES


def signature(job: TokenizeJob, paths: list[Path], fingerprint: str) -> dict[str, Any]:
    """Everything that the result depends on."""
    inputs = {str(path): [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
    options = {k: v for k, v in asdict(job).items() if k not in ("inputs", "tokenizer", "prefix")}
    return as_json({"inputs": inputs, "tokenizer": fingerprint, **options})


def as_json(signature: dict[str, Any]) -> dict[str, Any]:
    """The signature as it is read back from its file."""
    return json.loads(json.dumps(signature))  # type: ignore[no-any-return]


def finished(job: TokenJob, signature: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The result of an earlier run of the same job. Raises if the files belong to another job, unless `overwrite`."""
    outputs = [path(job.output(key)) for key in job.keys for path in (bin_path, idx_path)]
    existing = [path for path in outputs if path.exists()]
    if not existing or overwrite:
        return None
    if not job.record.is_file():
        if (job.folder / "job.json").is_file():
            return None  # Killed while joining or just after: the chunks exist, and are joined again.
        raise UserError(f"{existing[0]} already exists, from another source", hint="pass --overwrite to replace it")
    record = loads(job.record.read_text(encoding="utf-8"))
    if record["made_of"] != signature:
        raise UserError(_changes(job, record["made_of"], signature), hint="pass --overwrite to create it again")
    result: dict[str, Any] = record["result"]
    return result if len(existing) == len(outputs) else None


def begin(job: TokenJob, signature: dict[str, Any], overwrite: bool) -> None:
    """Start a job, or resume one with the same signature."""
    path = job.folder / "job.json"
    if path.is_file() and not overwrite:
        earlier = loads(path.read_text(encoding="utf-8"))
        if earlier != signature:
            raise UserError(_changes(job, earlier, signature), hint="pass --overwrite to start over")
        console.say(f"{job.prefix}: resuming an earlier run")
        return
    for leftover in job.folder.glob("0*"):
        leftover.unlink()
    for kind in KINDS:  # The record of another kind of job is of the files that this one replaces.
        Path(f"{job.prefix}.{kind}.json").unlink(missing_ok=True)
    files.write_json(path, signature)


def _changes(job: TokenJob, before: dict[str, Any], now: dict[str, Any]) -> str:
    changed = [key for key in now if before.get(key) != now[key]]
    names = [
        f"{key} {path}" if key == "inputs" else key
        for key in changed
        for path in (sorted(_different(before.get(key, {}), now[key])) if key == "inputs" else [""])
    ]
    return f"{job.prefix} was started with other inputs or options; changed since: {', '.join(names)}"


def _different(before: dict[str, Any], now: dict[str, Any]) -> set[str]:
    return {path for path in before.keys() | now.keys() if before.get(path) != now.get(path)}
