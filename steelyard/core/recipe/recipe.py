"""The recipe: all sections and the checks between them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from steelyard.core.recipe import validators
from steelyard.core.recipe.checkpoint_section import CheckpointSection
from steelyard.core.recipe.data_section import DataSection
from steelyard.core.recipe.eval_section import EvalSection
from steelyard.core.recipe.families import Model
from steelyard.core.recipe.finetune_section import FinetuneSection
from steelyard.core.recipe.log_section import LogSection
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.core.recipe.parallel_section import ParallelSection
from steelyard.core.recipe.section import Section, refuse_secrets
from steelyard.core.recipe.site_section import SiteSection
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.core.recipe.train_section import TrainSection


class Recipe(Section):
    """The description of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    description: str = ""
    model: Model
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optim: OptimSection = OptimSection()
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()
    sparsity: SparsitySection | None = None
    finetune: FinetuneSection | None = None
    site: SiteSection | None = None

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    def where(self, key: str) -> str:
        """File, line and name of a key, for error messages."""
        place = self._places.get(key)
        return f"{place}: {key}" if place else key

    def settings(self) -> dict[str, Any]:
        """The recipe as nested dicts, without keys whose value is None."""
        return self.model_dump(exclude_none=True)

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        steps = validators.steps(self.train, self.data.sequence_length)
        if steps != self.train.steps:
            self.__dict__["train"] = self.train.model_copy(update={"steps": steps})
        if not self.eval.batches:
            batches = validators.validation_batches(self.train.global_batch)
            self.__dict__["eval"] = self.eval.model_copy(update={"batches": batches})
        validators.pipeline(self.model, self.parallel, self.train)
        validators.tensor(self.model, self.parallel, self.data.sequence_length)
        validators.batch(self.train, self.parallel)
        validators.experts(self.model, self.parallel)
        validators.gradients(self.optim, self.train, self.finetune, self.sparsity)
        validators.sequence(self.model, self.data.sequence_length)
        if self.sparsity is not None:
            validators.experts_sparsity(self.model, self.sparsity)
            validators.sparsity(self.model, self.sparsity, self.parallel, self.train)
        if self.finetune is not None:
            validators.experts_finetune(self.model, self.finetune)
            validators.base_precision(self.model, self.finetune, self.parallel, self.train)
        refuse_secrets(self)
        return self
