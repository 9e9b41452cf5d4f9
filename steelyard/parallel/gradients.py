"""Gradients after the last micro-batch: the remaining reductions, and the norm over the mesh."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.parallel.mesh import Mesh
from steelyard.parallel.param_shards import ParamShard


class Gradients:
    """The gradients of a rank's param shards."""

    def __init__(self, param_shards: list[ParamShard], mesh: Mesh, device: torch.device) -> None:
        self.param_shards, self.mesh, self.device = param_shards, mesh, device
        self.counted = [shard for shard in param_shards if shard.parameter.requires_grad and not shard.is_twin]
        self.norms = torch.zeros(len(self.counted), device=device)
        """The gradient norm of each counted shard, from the last call of `norm_with`."""
        self.shares = torch.tensor([1 / shard.copies for shard in self.counted], dtype=torch.float64, device=device)

    def finish(self) -> None:
        """Reduce gradients that the backward pass did not: over parts of the sequence, and of a tied embedding."""
        partial = [
            gradient for shard in self.param_shards if shard.is_partial and (gradient := shard.gradient) is not None
        ]
        if partial:
            flat = torch.cat([gradient.flatten() for gradient in partial])
            dist.all_reduce(flat, group=self.mesh.tensor.group)
            for gradient, summed in zip(partial, flat.split([each.numel() for each in partial]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        for shard in self.param_shards:
            if shard.is_tied and (gradient := shard.gradient) is not None:
                dist.all_reduce(gradient, group=self.mesh.ends)

    def norm_with(self, others: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the whole model's gradient, and `others` summed over all ranks in the same all-reduce."""
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        gradients = [shard.gradient for shard in self.counted]
        if gradients:
            zero = torch.zeros(1, device=self.device)
            given = [zero if gradient is None else gradient for gradient in gradients]
            norms = torch._foreach_norm(given, 2, dtype=torch.float32)
            self.norms = torch.stack(norms)
            squares = (self.norms.double().square() * self.shares).sum()
        sums = torch.cat([squares[None], others.double()])
        if self.mesh.world.size > 1:
            dist.all_reduce(sums)
        return sums[0].sqrt(), sums[1:]

    def signal_to_noise(self, grad_scale: Tensor, eps: float) -> dict[ParamShard, Tensor]:
        """||g|| / (std(g) + eps) of each whole parameter, over the ranks that hold its shards, for SGD-SaI."""
        sums = torch.zeros(len(self.param_shards), 2, dtype=torch.float64, device=self.device)
        for row, shard in zip(sums, self.param_shards, strict=True):
            if (gradient := shard.gradient) is not None:
                scaled = gradient.double() / grad_scale
                row[0], row[1] = scaled.sum(), scaled.square().sum()
        for group, has in (
            (self.mesh.fsdp.group, lambda shard: not shard.is_expert),
            (self.mesh.expert_fsdp.group, lambda shard: shard.is_expert),
            (self.mesh.expert.group, lambda shard: shard.is_expert),
            (self.mesh.tensor.group, lambda shard: shard.is_tp_sharded),
        ):
            rows = [number for number, shard in enumerate(self.param_shards) if has(shard)]
            if group is not None and rows:
                of_group = sums[rows]
                dist.all_reduce(of_group, group=group)
                sums[rows] = of_group
        counts = torch.tensor(
            [math.prod(shard.shape) for shard in self.param_shards], dtype=torch.float64, device=self.device
        )
        variance = (sums[:, 1] - sums[:, 0].square() / counts).clamp(min=0) / (counts - 1).clamp(min=1)
        ratios = sums[:, 1].sqrt() / (variance.sqrt() + eps)
        return dict(zip(self.param_shards, ratios.float(), strict=True))
