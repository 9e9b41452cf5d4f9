"""Pipeline parallelism: a rank holds one or several stages of the model, and micro-batches pass through them.

Schedules and point-to-point communication are PyTorch's. The fused head and loss run in the forward of the last stage,
so the loss function of a schedule only scales the output of that stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from steelyard.core.recipe.parallel_section import ParallelSection, Partition
from steelyard.model import Batch, LanguageModel, StageSpec
from steelyard.parallel.mesh import MeshAxis

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
ONE_STAGE = ("gpipe", "1f1b")


class Timers(Protocol):
    """A recorder of what a rank does over time. Each mark ends the interval before it."""

    def mark(self, name: str, stage: int, micro_batch: int) -> None:
        """Start an interval of this name."""


def stage_specs(partition: Partition, parallel: ParallelSection, axis: MeshAxis) -> dict[int, StageSpec]:
    """The specs of the stages that this rank holds, by stage number.

    The embedding belongs to the first stage, the final norm and head to the last. A stage may have no layers, so that
    a slow GPU can hold the embedding alone.
    """
    last = partition.stages - 1
    return {
        stage: StageSpec(partition.layers_of(stage), first=stage == 0, last=stage == last)
        for stage in range(axis.index, partition.stages, parallel.pipeline)
    }


class Stage(PipelineStage):
    """A pipeline stage that marks its intervals in `timers`.

    Zero bubble computes weight gradients later. In torch 2.11 nothing keeps the graph node of a
    `torch.autograd.Function`, such as the fused head and loss, alive until then. So the stage keeps a reference to the
    nodes of its outputs.
    """

    timers: Timers | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._output_nodes: dict[int, list[Any]] = {}

    def _mark(self, name: str, micro_batch: int) -> None:
        if self.timers is not None:
            self.timers.mark(name, self.stage_index, micro_batch)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called when the schedule receives the activations of a micro-batch."""
        self._mark("receive", fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called when the schedule receives the gradients of a micro-batch."""
        self._mark("receive", bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Called when the schedule sends the activations of a micro-batch."""
        self._mark("send", fwd_chunk_id)
        return super().get_fwd_send_ops(fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Called when the schedule sends the gradients of a micro-batch."""
        self._mark("send", bwd_chunk_id)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def forward_maybe_with_nosync(self, x: Tensor, **fields: Tensor) -> Any:
        """Called with the tokens of a micro-batch or the output of the previous stage, and the fields of the batch."""
        batch = Batch(**fields)  # type: ignore[arg-type]
        return super().forward_maybe_with_nosync(batch, None if self.is_first else x)  # type: ignore[no-untyped-call]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Called for the forward pass of each micro-batch."""
        self._mark("forward", fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._mark("receive", fwd_chunk_id)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Called for the backward pass of each micro-batch."""
        self._mark("backward", bwd_chunk_id)
        if not kwargs.get("full_backward", True):
            self._output_nodes[bwd_chunk_id] = [output.grad_fn for output in self.fwd_cache[bwd_chunk_id][0]]
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._mark("receive", bwd_chunk_id)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Called for the weight gradients, which zero bubble computes later."""
        self._mark("backward", bwd_chunk_id)
        result = super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._output_nodes.pop(bwd_chunk_id, None)
        self._mark("receive", bwd_chunk_id)
        return result

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Called when all micro-batches of a stage are done."""
        self._mark("gradients", -1)
        return super().perform_reduce_grad(*args, **kwargs)


class Pipeline:
    """The stages of this rank and their schedules."""

    def __init__(
        self, models: dict[int, LanguageModel], parallel: ParallelSection, axis: MeshAxis, device: torch.device
    ) -> None:
        self.models, self.parallel, self.axis, self.device = models, parallel, axis, device
        self.scale = torch.ones((), device=device)
        self.losses: list[Tensor] = []
        self.timers: Timers | None = None
        self._schedules: dict[tuple[int, torch.Size], Any] = {}

    def train(self, batch: Batch, micro_batches: int, scale: Tensor) -> Tensor:
        """Run the forward and backward passes of a step; the loss is multiplied by `scale` before the backward pass.

        Returns the sum of the unscaled losses on the last stage, and zero on the others.
        """
        self.scale, self.losses = scale, []
        schedule = self._schedule(batch, micro_batches)
        inputs = (batch.tokens_BL,) if 0 in self.models else ()
        schedule.step(*inputs, target=batch.labels_BL, losses=[], **batch.tensors())
        return torch.stack(self.losses).sum() if self.losses else torch.zeros((), device=self.device)

    def evaluate(self, batches: Iterable[Batch]) -> list[Tensor]:
        """The loss of each batch on the last stage, and zero on the others. Runs the forward pass only."""
        losses = []
        for batch in batches:
            losses.append(torch.zeros((), dtype=torch.float64, device=self.device))
            for stage, model in self.models.items():
                x = None
                if stage > 0:
                    x = torch.empty(self._boundary(model, batch), dtype=model.dtype, device=self.device)
                    dist.recv(x, group=self.axis.group, group_src=(stage - 1) % self.axis.size)
                y = model(batch, x)
                if model.stage_spec.last:
                    losses[-1] += y.double().sum()
                else:
                    dist.send(y.contiguous(), group=self.axis.group, group_dst=(stage + 1) % self.axis.size)
        return losses

    def _schedule(self, batch: Batch, micro_batches: int) -> Any:
        """The schedule for this number of micro-batches and this shape, cached."""
        key = micro_batches, batch.tokens_BL.shape
        if key not in self._schedules:
            micro = next(batch.micro_batches(len(batch) // micro_batches))
            stages: Any = [self._stage(number, model, micro) for number, model in self.models.items()]
            kind = SCHEDULES[self.parallel.schedule]
            self._schedules[key] = kind(
                stages[0] if self.parallel.schedule in ONE_STAGE else stages,
                micro_batches,
                loss_fn=self._loss,
                scale_grads=False,
            )
        for stage in self._stages_of(self._schedules[key]):
            stage.timers = self.timers
        return self._schedules[key]

    def _stage(self, number: int, model: LanguageModel, micro: Batch) -> Stage:
        """One stage. Its input and output are given, so that torch does not infer their shapes with a forward pass."""
        boundary = torch.empty(self._boundary(model, micro), dtype=model.dtype, device="meta", requires_grad=True)
        inputs = micro.tokens_BL.to("meta") if model.stage_spec.first else boundary
        outputs = torch.empty(1, device="meta") if model.stage_spec.last else boundary
        return Stage(model, number, self.parallel.stages, self.device, inputs, outputs, group=self.axis.group)

    def _boundary(self, model: LanguageModel, batch: Batch) -> tuple[int, ...]:
        """The shape of the activations sent between stages."""
        rows, length = batch.tokens_BL.shape
        pieces = self.parallel.tensor if self.parallel.sequence_parallel else 1
        return rows, length // pieces, model.config.hidden

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.losses.append(output.detach().sum())
        return output.sum() * self.scale

    @staticmethod
    def _stages_of(schedule: Any) -> list[Stage]:
        return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)
