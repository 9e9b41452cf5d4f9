"""Checks before a job is queued, so that a mistake does not cost hours in a queue.

Token files, tokenizer and `train.init_from` are opened as in training, and the predicted memory of each rank is
compared with its GPU. Nodes share the file system of the run folder, so a missing file there is an error. A path on
another file system, inside a container or on the hub may exist on the nodes: it causes a warning.
"""

from __future__ import annotations

import functools
import glob
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.core import units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.launch import backends
from steelyard.launch.job_spec import NodeGroup, world
from steelyard.planning import memory_fit
from steelyard.planning.memory_fit import Room
from steelyard.sizes.memory import memory_of
from steelyard.sizes.memory_hints import remedies
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens import samples
from steelyard.tokens.indexed_dataset import idx_path

if TYPE_CHECKING:
    from steelyard.launch.submit import SubmitRequest

ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
SECONDS_TO_OPEN = 600  # a checkpoint, which imports torch
SAME = ("family", "layers", "hidden", "heads", "kv_heads", "ffn")  # must match between a checkpoint and the recipe


def check_files(request: SubmitRequest, run: Path) -> None:
    """Raise an error for files that training would reject. Warn about files that this machine cannot see.

    A run that resumes from its own checkpoint reads no other.
    """
    recipe = request.recipe
    if recipe is None:
        return
    files = _Files(request, recipe)
    if recipe.finetune is None:
        files.check_tokens("train")
        if recipe.data.valid:
            files.check_tokens("valid")
    for name in (recipe.data.tokenizer or "").split(","):
        files.check(
            "data.tokenizer", name, lambda path: tokenizers.load_tokenizer(path) if path.suffix != ".txt" else None
        )
    sparsity = recipe.sparsity
    if not any(run.glob("checkpoints/step-*")):
        opened = _refuse_another_model(recipe) if sparsity is None else None
        files.check("train.init_from", recipe.train.init_from, opened)
    if sparsity is not None:
        for key in ("base", "mask", "prior"):
            named = getattr(sparsity, key)
            files.check(f"sparsity.{key}", None if named == "weights" else named)


class _Files:
    """The files of a job as seen from the machine that submits it."""

    def __init__(self, request: SubmitRequest, recipe: Recipe) -> None:
        site, self.recipe, self.is_here = request.site, recipe, not backends.load(request.on).is_remote
        self.workdir = Path(site.workdir).expanduser() if site.workdir else Path.cwd()
        self.shown: list[tuple[Path, Path]] | None = None  # paths inside and outside the container
        if site.container.kind != "none":
            binds = [[*bind.split(":"), bind][:2] for bind in site.container.binds]
            own = [Path.home()] if site.container.kind in ("apptainer", "singularity") else []
            self.shown = [(Path(inside), Path(outside)) for outside, inside in binds]
            self.shown += [(each, each) for each in (self.workdir, *own)]

    def check_tokens(self, split: samples.Split) -> None:
        """Open the token files of a split that are visible here."""
        sources, key, _ = samples.sources_of(self.recipe, split)
        seen = []
        for source in sources:
            if self._sees(key, source.prefix, _token_files, f"there is no token file {idx_path(source.prefix)}"):
                seen.append(source.model_copy(update={"prefix": str(self._outside(source.prefix))}))
        if seen or not sources:
            samples.check_files(self.recipe, split, seen)

    def check(self, key: str, name: str | None, opened: Callable[[Path], Any] | None = None) -> None:
        """Open a file or folder, if one is named and visible here."""
        if not name:
            return
        path = Path(name)
        if ON_THE_HUB.fullmatch(name) and not path.suffix and not (self.workdir / path.parts[0]).exists():
            console.warn(f"{key}: {name} is not a local path, so the job downloads it from the hub; it was not checked")
        elif self._sees(key, name, Path.exists, f"{key}: there is no {name}") and opened is not None:
            outside = self._outside(name)
            assert outside is not None
            opened(outside)

    def _outside(self, name: str) -> Path | None:
        """The path on this machine for a path of the job; None if only the image can contain it."""
        path = self.workdir / Path(name).expanduser()
        if self.shown is None:
            return path
        return next(
            (there / path.relative_to(inside) for inside, there in self.shown if path.is_relative_to(inside)), None
        )

    def _sees(self, key: str, name: str, is_there: Callable[[Path], bool], missing: str) -> bool:
        """Whether a file is visible here. Raises an error if it must be and is not."""
        path = self._outside(name)
        if path is not None and is_there(path):
            return True
        if path is not None and (self.is_here or _device(path) == _device(self.workdir)):
            raise UserError(missing, where=self.recipe.where(key), hint=f"relative paths start at {self.workdir}")
        console.warn(f"{key}: {name} is not visible on this machine and was not checked; every node needs it")
        return False


def _token_files(prefix: Path) -> bool:
    return prefix.is_dir() or bool(glob.glob(str(idx_path(prefix)))) or idx_path(prefix).is_file()


def _device(path: Path) -> int:
    """The file system that a path is on, or would be created on."""
    return next(each for each in (path, *path.parents) if each.exists()).stat().st_dev


def _refuse_another_model(recipe: Recipe) -> Callable[[Path], None]:
    def opened(path: Path) -> None:
        found, wanted = _model_in(str(path.resolve())), recipe.model.model_dump()
        for key in SAME:
            if key in found and key in wanted and found[key] != wanted[key]:
                raise UserError(
                    f"{recipe.train.init_from} has {key} {found[key]}, but model.{key} is {wanted[key]}",
                    where=recipe.where("train.init_from"),
                    hint="start from a checkpoint of the same model",
                )

    return opened


@functools.cache
def _model_in(path: str) -> dict[str, Any]:
    """The model config of a checkpoint, read in a subprocess so that this process does not import torch."""
    command = [sys.executable, "-P", "-m", "steelyard", "checkpoint", "info", path, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_OPEN)
    if done.returncode:
        message = done.stderr.strip().removeprefix("error: ") or f"it cannot be opened: exit code {done.returncode}"
        raise UserError(f"train.init_from: {message}")
    model: dict[str, Any] = json.loads(done.stdout)["model"]
    return model


def check_memory(recipe: Recipe | None, found: Sequence[NodeGroup]) -> None:
    """Raise an error if a layout is predicted not to fit on the GPUs of its ranks."""
    if recipe is None or recipe.train.device == "cpu" or not any(group.gres for group in found):
        return
    gpus = [group.gpu for group in found for _ in range(group.nodes * group.ranks)]
    ranks, stages = world(found), recipe.parallel.pipeline
    rooms = []
    for number, memory in enumerate(memory_of(recipe, ranks)):
        here = gpus[number * ranks // stages : (number + 1) * ranks // stages]
        known = [gpu for gpu in here if gpu is not None and gpu.memory is not None]
        if len(known) < len(here):
            console.warn("memory was not checked: neither --cluster nor gres (gpu:TYPE:COUNT) gives the GPU types")
            return
        smallest = min(known, key=lambda gpu: gpu.memory or 0)
        rooms.append(Room(number, memory, memory_fit.usable(smallest.memory or 0), smallest.name))
    reason = memory_fit.reason(rooms)
    if reason is not None:
        helpful = remedies(recipe, ranks, min(room.usable for room in rooms))
        tried = "; ".join(f"{change} would need {units.size(size)}" for change, size in helpful)
        raise UserError(reason, hint=f"{tried or 'use more ranks'}; --skip-checks submits the job anyway")
