"""Steelyard's own checkpoints: of a run, or a separate folder whose state.json has the model config."""

from __future__ import annotations

from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from steelyard.checkpoint import folder
from steelyard.checkpoint.formats import hf_metadata
from steelyard.checkpoint.formats.huggingface import tokenizer_files, tokenizer_in
from steelyard.checkpoint.formats.mapped_tensors import widest
from steelyard.checkpoint.formats.source import CheckpointSource, first_problem, is_own
from steelyard.checkpoint.sharded_tensor import TensorShard
from steelyard.core.errors import UserError
from steelyard.core.recipe.families import Model

PREFIX = "model."
TOKENIZER = "tokenizer"


def opened(path: Path) -> CheckpointSource | None:
    """The checkpoint at a path, or the newest of a run."""
    return SteelyardSource(folder.source(path)) if is_own(path) else None


class SteelyardSource(CheckpointSource):
    """A Steelyard checkpoint of any layout."""

    format = "steelyard"

    def __init__(self, saved: folder.Checkpoint) -> None:
        self.saved, self.path, self.step = saved, saved.path, saved.step
        self.hf_metadata, self.tokenizer_files = {}, []
        if saved.state.get("sparsity", {}).get("method") == "learned":
            raise UserError(
                f"{saved.path} contains only masks, not the weights they belong to",
                hint="steelyard mask export --format hf writes the masked weights",
            )
        sparsity = saved.state.get("sparsity", {})
        if sparsity.get("method") == "joint" and not sparsity.get("finished"):
            self.remark = (
                f"{saved.path} was saved before the masked weights of joint training were zero, and these are the "
                "weights as they were; steelyard mask export --format hf writes the sparse model"
            )
        if sparsity.get("method") == "sr-ste":
            self.remark = (
                f"{saved.path} was trained with SR-STE, which computes with the largest weights of each group, but "
                "these are the dense weights; steelyard mask export --format hf writes the sparse model"
            )
        if "model" in saved.state:
            try:
                self.config = TypeAdapter(Model).validate_python(saved.state["model"])
            except ValidationError as error:
                raise UserError(
                    f"its model is not valid: {first_problem(error)}", where=str(saved.path / folder.STATE)
                ) from None
            self.hf_metadata = hf_metadata.validated(saved.state.get("extra"))
            self.tokenizer_files = tokenizer_files(saved.path / TOKENIZER)
            self.tokenizer = tokenizer_in(saved.path / TOKENIZER)
        else:
            recipe = saved.run.recipe()
            self.config, self.tokenizer = recipe.model, recipe.data.tokenizer
            self.hf_metadata = {"positions": recipe.data.sequence_length}
        saved_tensors = saved.tensors()
        self._sizes = {
            name.removeprefix(PREFIX): size for name, (size, _) in saved_tensors.items() if name.startswith(PREFIX)
        }
        self.dtype = widest({dtype for name, (_, dtype) in saved_tensors.items() if name.startswith(PREFIX)}, self.path)
        self.layout = {"files": len(list(saved.path.glob("*.distcp")))}

    def names(self) -> list[str]:
        return list(self._sizes)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._sizes)

    def tensor(self, name: str) -> Tensor:
        dtype = self.saved.tensors()[PREFIX + name][1]
        tensor = torch.empty(self._sizes[name], dtype=dtype)
        folder.load(self.saved, {PREFIX + name: TensorShard.whole(tensor)})
        return tensor
