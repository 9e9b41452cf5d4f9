"""The whole recipe, and the contradictions that only show between sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from steelyard.core.recipe.checkpoint import Checkpoint
from steelyard.core.recipe.data import Data
from steelyard.core.recipe.evaluation import Evaluation
from steelyard.core.recipe.log import Log
from steelyard.core.recipe.model import GptModel, Model
from steelyard.core.recipe.optim import Optim
from steelyard.core.recipe.parallel import Parallel
from steelyard.core.recipe.section import Section, contradiction
from steelyard.core.recipe.train import Train


class Recipe(Section):
    """What to do."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    description: str = ""
    model: Model
    data: Data = Data()
    train: Train = Train()
    optim: Optim = Optim()
    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    eval: Evaluation = Evaluation()
    log: Log = Log()

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    def where(self, key: str) -> str:
        """File, line and name of a key, for an error about its value."""
        place = self._places.get(key)
        return f"{place}: {key}" if place else key

    def settings(self) -> dict[str, Any]:
        """The recipe as plain tables; keys without a value are left out."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        model, parallel, train = self.model, self.parallel, self.train
        partition = parallel.partition
        if partition is not None:
            stages = parallel.pipeline * parallel.virtual
            if partition.stages != stages:
                raise contradiction(
                    "parallel.partition",
                    f"{partition} has {partition.stages} stages, but parallel.pipeline x parallel.virtual is {stages}",
                    f"give {stages} numbers, or set parallel.pipeline to {partition.stages}",
                )
            if partition.total != model.layers:
                raise contradiction(
                    "parallel.partition",
                    f"{partition} holds {partition.total} layers, but model.layers is {model.layers}",
                    f"make the numbers sum to {model.layers}, or drop the key and let the layers be balanced by cost",
                )
        for name in ("heads", "kv_heads"):
            heads = getattr(model, name, model.heads)
            if heads % parallel.tensor:
                raise contradiction(
                    "parallel.tensor",
                    f"{parallel.tensor} ranks cannot share model.{name} = {heads} evenly",
                    f"choose a divisor of {heads}",
                )
        per_step = train.micro_batch * (parallel.data or 1)
        if train.global_batch % per_step:
            raise contradiction(
                "train.global_batch",
                f"{train.global_batch} is not a multiple of train.micro_batch x parallel.data = {per_step}",
                f"choose a multiple of {per_step}",
            )
        if isinstance(model, GptModel) and self.data.sequence_length > model.positions:
            raise contradiction(
                "data.sequence_length",
                f"{self.data.sequence_length} is longer than model.positions = {model.positions}",
                "shorten the sequences or give the model more positions",
            )
        return self
