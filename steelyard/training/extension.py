"""Hooks that change training without a second training loop: masks, adapters, another loss.

The hooks are called in this order: `transform` for each stage, while it has no weights; `parallelized`, when all
weights are allocated; `start` or `resumed`; then for each step `begin_step`, `before_update` and `after_update`, and
for each record `metrics`.
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
    """The default hooks, which change nothing. A subclass overrides those it needs."""

    needs_samples = False
    """Whether layers need the sample ids of their rows: `LayerInputs.sample_ids_B`."""

    is_likelihood = True
    """Whether the loss is a cross-entropy over tokens, so that it has a perplexity."""

    def transform(self, model: LanguageModel) -> None:
        """Change a model, or a stage of it, before tensor parallelism and FSDP; it has no weights yet."""

    def parallelized(self, stages: dict[int, LanguageModel], param_shards: list[ParamShard], mesh: Mesh) -> None:
        """Receive the stages and parameter shards of this rank, and its mesh."""

    def initial_std(self, shard: ParamShard) -> float | None:
        """The standard deviation of a parameter's initial values; None for the model's."""
        return None

    def param_group_options(self, shard: ParamShard) -> ParamGroupOptions:
        """The param-group options of a parameter."""
        return ParamGroupOptions()

    def start(self, engine: Engine, world: World) -> str:
        """Load the weights of a new run over their initial values; returns their origin as text."""
        return initial_weights.from_recipe(engine, world)

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """Set the state that the checkpoint does not hold; the checkpoint is already loaded."""

    def begin_step(self, step: int, batch: int, loss_scale: float) -> None:
        """Prepare for a step, counted from 1, of `batch` samples, whose loss is multiplied by `loss_scale`.

        Called again for a step that was skipped and is recomputed (`training/nonfinite.py`).
        """

    def before_update(self, engine: Engine) -> None:
        """Read the gradients of a step, which are summed over ranks, before the optimizer's update."""

    def after_update(self, engine: Engine) -> None:
        """Change the weights after the optimizer's update of a step, also of a skipped one."""

    def forward(self, model: LanguageModel, batch: Batch) -> Tensor:
        """The loss of a micro-batch in training, as a tensor of one element; not called with a pipeline."""
        loss: Tensor = model(batch)
        return loss

    def weigh(self, engine: Engine, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Change a rank's rows before the forward pass, for a step or for validation.

        If the loss is not the weighted sum that the model computes, returns its sum over this rank's rows too. These
        sums are added over all ranks, except along the tensor axis.
        """
        return batch, None

    def loss(self, stage: LanguageModel) -> Tensor | None:
        """A loss that a stage adds to every micro-batch, in nats for the whole step, from its own weights."""
        return None

    def metrics(self) -> dict[str, float]:
        """Fields to add to each record. Called on all ranks at the same steps."""
        return {}

    def saves(self, shard: ParamShard) -> bool:
        """Whether a checkpoint holds this parameter."""
        return True

    def state_shards(self) -> dict[str, TensorShard]:
        """Further tensors of a checkpoint, besides parameters and optimizer state."""
        return {}

    def state(self) -> dict[str, Any]:
        """Further entries of a checkpoint's train state, besides the counters."""
        return {}
