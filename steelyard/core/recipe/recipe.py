"""The whole recipe."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from steelyard.core.recipe import agree
from steelyard.core.recipe.checkpoint import Checkpoint
from steelyard.core.recipe.data import Data
from steelyard.core.recipe.evaluation import Evaluation
from steelyard.core.recipe.finetune import Finetune
from steelyard.core.recipe.log import Log
from steelyard.core.recipe.model import Model
from steelyard.core.recipe.optim import Optim
from steelyard.core.recipe.parallel import Parallel
from steelyard.core.recipe.section import Section, refuse_secrets
from steelyard.core.recipe.site import Site
from steelyard.core.recipe.sparsity import Sparsity
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
    sparsity: Sparsity | None = None
    finetune: Finetune | None = None
    site: Site | None = None

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
        steps = agree.steps(self.train, self.data.sequence_length)
        if steps != self.train.steps:
            self.__dict__["train"] = self.train.model_copy(update={"steps": steps})
        agree.pipeline(self.model, self.parallel, self.train)
        agree.tensor(self.model, self.parallel, self.data.sequence_length)
        agree.batch(self.train, self.parallel)
        agree.sequence(self.model, self.data.sequence_length)
        if self.sparsity is not None:
            agree.sparsity(self.model, self.sparsity, self.parallel, self.train)
        refuse_secrets(self)
        return self
