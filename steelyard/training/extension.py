"""What may be added to training without a second loop: masks, adapters, another loss.

An extension is told what happens in this order: `transform` for each stage, while it has no weights; `assembled`, when
it has memory; `start` or `resumed`; then for each step `begin_step`, and for each record `metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from steelyard.checkpoint import TensorShard
from steelyard.model import Batch, LanguageModel
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.param_shards import ParamShard
from steelyard.parallel.world import World
from steelyard.training import initial_weights
from steelyard.training.optimizer import ParamGroupOptions

if TYPE_CHECKING:
    from steelyard.training.engine import Engine


class Extension:
    """Training as it is. A subclass changes what it needs to."""

    needs_samples = False
    """Whether layers must know which samples they see: `Context.sample_ids_B`."""

    is_likelihood = True
    """Whether the loss is that of predicting tokens, so that a perplexity can be told of it."""

    def transform(self, model: LanguageModel) -> None:
        """Change a model, or a stage of it, before it is cut and sharded; it has no weights yet."""

    def assembled(self, stages: dict[int, LanguageModel], parts: list[ParamShard], mesh: Mesh) -> None:
        """Know what this rank holds, and its place among the others."""

    def initial_std(self, part: ParamShard) -> float | None:
        """The deviation of a parameter's initial values, where it is not the model's."""
        return None

    def pace(self, part: ParamShard) -> ParamGroupOptions:
        """How a parameter moves beside the others."""
        return ParamGroupOptions()

    def start(self, engine: Engine, world: World) -> str:
        """Give a new run its weights, which are at their initial values; says where they came from."""
        return initial_weights.from_recipe(engine, world)

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """Set what a checkpoint does not hold; what it does hold is in place."""

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Prepare for a step, counted from 1, of so many samples, whose loss is multiplied by `loss_scale`.

        Called again for a step that was skipped and is recomputed (`training/nonfinite.py`).
        """

    def forward(self, model: LanguageModel, batch: Batch) -> Tensor:
        """The loss of a micro-batch in training, as a tensor of one element; not called in a pipeline."""
        loss: Tensor = model(batch)
        return loss

    def weigh(self, engine: Engine, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Change a rank's rows before they are computed, for a step or for validation.

        Where the loss is not the weighted sum that the model computes, its sum over this rank's rows comes along; all
        ranks but those along the tensor axis add theirs.
        """
        return batch, None

    def loss(self, stage: LanguageModel) -> Tensor | None:
        """A loss that a stage adds to every micro-batch, in nats for the whole step, from its own weights."""
        return None

    def metrics(self) -> dict[str, float]:
        """What to add to each record. All ranks ask at the same steps."""
        return {}

    def saves(self, part: ParamShard) -> bool:
        """Whether a checkpoint holds this parameter."""
        return True

    def pieces(self) -> dict[str, TensorShard]:
        """What a checkpoint holds beside parameters and optimizer."""
        return {}

    def state(self) -> dict[str, Any]:
        """What the state of a checkpoint says beside the counters."""
        return {}
