"""Checks before a job is queued: a mistake should not cost hours in a queue.

Token files, tokenizer and `train.init_from` are opened as training will open them, and the predicted memory of each
rank is compared with its GPU. Nodes share the run folder's file system, so a file that is missing there is missing. A
path on another file system, inside a container or on the hub may be there for the nodes: it is named in a warning.
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
SAME = ("family", "layers", "hidden", "heads", "kv_heads", "ffn")  # of a checkpoint and the recipe


def check_files(request: SubmitRequest, run: Path) -> None:
    """Refuse files that training would refuse; warn of those that cannot be seen from this machine.

    A run that goes on from a checkpoint of its own reads no other.
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
    """The files of a job as the machine that submits it sees them."""

    def __init__(self, request: SubmitRequest, recipe: Recipe) -> None:
        site, self.recipe, self.is_here = request.site, recipe, not backends.load(request.on).is_remote
        self.workdir = Path(site.workdir).expanduser() if site.workdir else Path.cwd()
        self.shown: list[tuple[Path, Path]] | None = None  # inside a container, and outside
        if site.container.kind != "none":
            binds = [[*bind.split(":"), bind][:2] for bind in site.container.binds]
            own = [Path.home()] if site.container.kind in ("apptainer", "singularity") else []
            self.shown = [(Path(inside), Path(outside)) for outside, inside in binds]
            self.shown += [(each, each) for each in (self.workdir, *own)]

    def check_tokens(self, split: samples.Split) -> None:
        """Open the token files of a split that can be seen."""
        sources, key, _ = samples.sources_of(self.recipe, split)
        seen = []
        for source in sources:
            if self._sees(key, source.prefix, _token_files, f"there is no token file {idx_path(source.prefix)}"):
                seen.append(source.model_copy(update={"prefix": str(self._outside(source.prefix))}))
        if seen or not sources:
            samples.check_files(self.recipe, split, seen)

    def check(self, key: str, name: str | None, opened: Callable[[Path], Any] | None = None) -> None:
        """Open a file or folder, if one is named and can be seen."""
        if not name:
            return
        path = Path(name)
        if ON_THE_HUB.fullmatch(name) and not path.suffix and not (self.workdir / path.parts[0]).exists():
            console.warn(f"{key}: {name} is not here, so the job fetches it from the hub; it was not checked")
        elif self._sees(key, name, Path.exists, f"{key}: there is no {name}") and opened is not None:
            outside = self._outside(name)
            assert outside is not None
            opened(outside)

    def _outside(self, name: str) -> Path | None:
        """Where a path of the job is on this machine; None for one that only the image can have."""
        path = self.workdir / Path(name).expanduser()
        if self.shown is None:
            return path
        return next(
            (there / path.relative_to(inside) for inside, there in self.shown if path.is_relative_to(inside)), None
        )

    def _sees(self, key: str, name: str, is_there: Callable[[Path], bool], missing: str) -> bool:
        """Whether a file is here; one that must be and is not is a mistake."""
        path = self._outside(name)
        if path is not None and is_there(path):
            return True
        if path is not None and (self.is_here or _device(path) == _device(self.workdir)):
            raise UserError(missing, where=self.recipe.where(key), hint=f"relative paths start at {self.workdir}")
        console.warn(f"{key}: {name} cannot be seen from this machine and was not checked; every node needs it")
        return False


def _token_files(prefix: Path) -> bool:
    return prefix.is_dir() or bool(glob.glob(str(idx_path(prefix)))) or idx_path(prefix).is_file()


def _device(path: Path) -> int:
    """The file system that a path is on, or would be."""
    return next(each for each in (path, *path.parents) if each.exists()).stat().st_dev


def _refuse_another_model(recipe: Recipe) -> Callable[[Path], None]:
    def opened(path: Path) -> None:
        found, wanted = _model_in(str(path.resolve())), recipe.model.model_dump()
        for key in SAME:
            if key in found and key in wanted and found[key] != wanted[key]:
                raise UserError(
                    f"{recipe.train.init_from} has {key} {found[key]}, and model.{key} is {wanted[key]}",
                    where=recipe.where("train.init_from"),
                    hint="begin from a checkpoint of the same model",
                )

    return opened


@functools.cache
def _model_in(path: str) -> dict[str, Any]:
    """What the checkpoint's model is like, found out by a process of its own: this one does without torch."""
    command = [sys.executable, "-P", "-m", "steelyard", "checkpoint", "info", path, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_TO_OPEN)
    if done.returncode:
        message = done.stderr.strip().removeprefix("error: ") or f"it cannot be opened: exit code {done.returncode}"
        raise UserError(f"train.init_from: {message}")
    model: dict[str, Any] = json.loads(done.stdout)["model"]
    return model


def check_memory(recipe: Recipe | None, found: Sequence[NodeGroup]) -> None:
    """Refuse a layout that is predicted not to fit the GPUs that its ranks lie on."""
    if recipe is None or recipe.train.device == "cpu" or not any(group.gres for group in found):
        return
    gpus = [group.gpu for group in found for _ in range(group.nodes * group.ranks)]
    ranks, stages = world(found), recipe.parallel.pipeline
    rooms = []
    for number, memory in enumerate(memory_of(recipe, ranks)):
        here = gpus[number * ranks // stages : (number + 1) * ranks // stages]
        known = [gpu for gpu in here if gpu is not None and gpu.memory is not None]
        if len(known) < len(here):
            console.warn("memory was not checked: neither --cluster nor gres (gpu:TYPE:COUNT) says which GPUs they are")
            return
        smallest = min(known, key=lambda gpu: gpu.memory or 0)
        rooms.append(Room(number, memory, memory_fit.usable(smallest.memory or 0), smallest.name))
    reason = memory_fit.reason(rooms)
    if reason is not None:
        helpful = remedies(recipe, ranks, min(room.usable for room in rooms))
        tried = "; ".join(f"{change} would need {units.size(size)}" for change, size in helpful)
        raise UserError(reason, hint=f"{tried or 'use more ranks'}; --skip-checks submits it all the same")
