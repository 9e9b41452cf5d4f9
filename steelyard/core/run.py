"""The run folder. Readers may open its files at any time.

    recipe.toml      the resolved recipe
    run.json         manifest: state, versions, host, git commit, seed, world size, start and end
    metrics.jsonl    one object per logged step; an incomplete last line is ignored
    sessions.jsonl   one object each time that the ranks started: the step, hosts and layout
    hosts/           one file per host with information about its ranks, written after the rendezvous
    logs/            the output of each host
    checkpoints/     step-00000100/ and so on, each complete
    report.html      written at the end, or by `steelyard report`

The folder is created by a rename, with its recipe and manifest in it. The process that writes to it holds `run.lock`,
which the kernel releases when that process dies. A run whose manifest says `running` and whose lock is free was killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import steelyard
from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.host import output_of
from steelyard.core.recipe import Recipe, load_recipe, to_toml
from steelyard.core.recipe.toml import leaves
from steelyard.core.safe_parse import json_objects, loads

MANIFEST, RECIPE, METRICS, LOCK = "run.json", "recipe.toml", "metrics.jsonl", "run.lock"
SESSIONS = "sessions.jsonl"
# Keys that may change when a run is resumed: its length, the steps it may skip, what it logs and saves, and the devices
# and layout, which change only rounding.
MAY_CHANGE = (
    "train.steps", "train.samples", "train.tokens", "train.max_hours", "train.micro_batch", "train.device",
    "train.compile",
    "train.nonfinite_limit", "train.max_skipped_fraction", "optim.offload", "parallel.", "log.", "checkpoint.",
    "eval.batches", "optim.state", "optim.gradients", "sparsity.base", "site.",
)  # fmt: skip
LIBRARIES = ("torch", "numpy", "pydantic", "tokenizers")


class Run:
    """One run folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repeated_steps = 0
        """Recorded steps that this attempt repeats."""

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open an existing run folder."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, not a run folder")
        if not path.is_dir():
            raise UserError(f"there is no run folder {path}", hint="steelyard train creates one in runs/")
        if not (path / MANIFEST).is_file():
            raise UserError(f"{path} is not a run folder: it has no {MANIFEST}", hint="give a folder in runs/")
        run = cls(path)
        run.manifest()
        return run

    def manifest(self) -> dict[str, Any]:
        """The content of `run.json`."""
        try:
            manifest: dict[str, Any] = loads((self.path / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path / MANIFEST} cannot be read: {error}") from None
        if not isinstance(manifest, dict) or "state" not in manifest:
            raise UserError(f"{self.path / MANIFEST} is not the manifest of a run")
        return manifest

    def follow(self, recipe: Recipe) -> None:
        """Continue the run with a recipe that differs only in keys that may change."""
        files.write_text(self.path / RECIPE, to_toml(recipe.settings()))

    def recipe(self) -> Recipe:
        """The resolved recipe of this run."""
        return load_recipe(self.path / RECIPE)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.resolve().name

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted, or killed: marked as running, but the lock is free."""
        state = str(self.manifest()["state"])
        return "killed" if state == "running" and not self._is_held() else state

    def update(self, **changes: Any) -> None:
        """Change entries of the manifest."""
        files.write_json(self.path / MANIFEST, self.manifest() | changes)

    def metrics(self) -> list[dict[str, Any]]:
        """All records so far, in order. Lines that a killed writer left incomplete are skipped."""
        try:
            lines = (self.path / METRICS).read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [record for record in json_objects(lines) if isinstance(record.get("step"), int)]

    def append(self, record: dict[str, Any]) -> None:
        """Add one record to the metrics."""
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the records of steps that a resumed run will repeat."""
        recorded = self.metrics()
        kept = [record for record in recorded if record["step"] <= step]
        self.repeated_steps = max([0, *(record["step"] - max(step, 0) for record in recorded)])
        files.write_text(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in kept))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock of the folder during the block; only one process may write to a run."""
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context(files.locked(self.path / LOCK))
            except BlockingIOError:
                owner = (self.path / LOCK).read_text(encoding="utf-8").strip() or "another process"
                hint = "wait until it ends, or give another --run"
                raise UserError(f"{self.path} is in use by {owner}", hint=hint) from None
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}")
            lock.flush()
            files.sweep_leftovers(self.path)
            files.sweep_leftovers(self.checkpoints)
            yield

    def _is_held(self) -> bool:
        try:
            with files.locked(self.path / LOCK):
                return False
        except BlockingIOError:
            return True
        except OSError:  # A read-only folder has no writer on this host.
            return False


def for_training(recipe: Recipe, path: Path | None = None, fresh: bool = False) -> Run:
    """The run folder to train in: an unfinished one of the same recipe, or a new one, always with `fresh`."""
    place, run = place_for_training(recipe, path, fresh)
    return run or _create(place, recipe)


def place_for_training(recipe: Recipe, path: Path | None = None, fresh: bool = False) -> tuple[Path, Run | None]:
    """The path of the run folder, and the existing run that would be resumed there, if any. Creates nothing."""
    first = path or Path("runs") / recipe.name
    number, candidate = 1, first
    while candidate.exists() and not _is_empty(candidate):
        run = Run.open(candidate)
        earlier = run.recipe()
        is_done = run.state == "finished" and recipe.train.steps <= earlier.train.steps
        if not is_done and not fresh:
            _refuse_changes(run, earlier, recipe)
            return candidate, run
        number += 1
        candidate = first.with_name(f"{first.name}-{number}")
    return candidate, None


def _create(path: Path, recipe: Recipe) -> Run:
    with files.atomic_folder(path) as folder:
        (folder / "logs").mkdir()
        (folder / "checkpoints").mkdir()
        files.write_text(folder / RECIPE, to_toml(recipe.settings()))
        files.write_json(folder / MANIFEST, {"state": "created", "name": recipe.name, "seed": recipe.train.seed})
    return Run(path)


def session(world_size: int) -> dict[str, Any]:
    """Manifest entries about the process that is about to write."""
    return {
        "state": "running",
        "world_size": world_size,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "versions": versions(),
        "git_commit": _git_commit(),
    }


def now() -> str:
    """The current time in the format of the manifest."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _refuse_changes(run: Run, earlier: Recipe, recipe: Recipe) -> None:
    before, after = dict(leaves(earlier.settings())), dict(leaves(recipe.settings()))
    changed = [
        key
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key != "description" and not key.startswith(MAY_CHANGE)
    ]
    if changed:
        lines = "\n".join(f"  {key}: {before.get(key, 'unset')} -> {after.get(key, 'unset')}" for key in changed)
        raise UserError(
            f"{run.path} is an unfinished run of another recipe:\n{lines}",
            hint="undo the change to resume it, give another --run, or remove the folder to start over",
        )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@functools.cache
def versions() -> dict[str, str]:
    """Versions of Steelyard, Python and the libraries."""
    from importlib import metadata

    versions = {"steelyard": steelyard.__version__, "python": platform.python_version()}
    for library in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[library] = metadata.version(library)
    return versions


def _git_commit() -> str | None:
    """The commit of the folder the command was started in, marked as dirty if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--match=", "--exclude=*"]
    return (output_of(command, 10) or "").strip() or None
