"""The load of experts during a step: its metrics, and the bias that balances it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from steelyard.core.recipe import Recipe
from steelyard.core.recipe.blocks import ExpertsBlock
from steelyard.model import LanguageModel
from steelyard.model.experts import AUX, DROPPED, ENTROPY, TOKENS, Experts
from steelyard.parallel.mesh import Mesh


class ExpertBalance:
    """The layers with experts on this rank; none in a dense model."""

    def __init__(self, recipe: Recipe, stages: dict[int, LanguageModel], mesh: Mesh, device: torch.device) -> None:
        self.blocks, self.mesh, self.device = recipe.model.blocks, mesh, device
        # Fine-tuning keeps the balance of the base: most of its tokens may be padding, which has one favourite expert.
        self.is_active = recipe.finetune is None
        self.experts = {
            int(number): layer.mlp
            for stage in stages.values()
            for number, layer in stage.layers.items()
            if isinstance(layer.mlp, Experts)
        }

    def begin(self, loss_scale: float, tokens: int) -> None:
        """Start a step of `tokens` tokens on all ranks. Every tensor rank computes the whole loss of a router."""
        for experts in self.experts.values():
            experts.stats.zero_()
            experts.loss_scale.fill_(loss_scale / tokens / self.mesh.tensor.size if self.is_active else 0.0)

    def finish(self, skipped: Tensor) -> None:
        """Move each bias against the load of its expert in this step. A frozen router keeps its bias."""
        trained = [experts for experts in self.experts.values() if experts.router.weight.requires_grad]
        balanced = [experts for experts in trained if experts.router.balance is not None]
        if not balanced or not self.is_active:
            return
        load = torch.stack([experts.stats[:TOKENS] for experts in balanced])
        for axis in (self.mesh.data, self.mesh.context):
            if axis.size > 1:
                dist.all_reduce(load, group=axis.group)
        direction = torch.sign(load.mean(1, keepdim=True) - load) * ~skipped
        for experts, each in zip(balanced, direction, strict=True):
            rate = experts.block.routing.bias_rate
            assert experts.router.balance is not None
            assert rate is not None
            experts.router.balance.data.add_(each, alpha=rate)

    def metrics(self) -> dict[str, float]:
        """The routing of the last step. All ranks call this at the same steps, also those without such layers."""
        blocks = {n: layer.mlp for n, layer in enumerate(self.blocks.layers) if isinstance(layer.mlp, ExpertsBlock)}
        if not blocks:
            return {}
        width = max(block.routing.experts for block in blocks.values()) - TOKENS
        stats = torch.zeros(len(blocks), width, dtype=torch.float64, device=self.device)
        for row, number in zip(stats, blocks, strict=True):
            if number in self.experts:
                row.copy_(self.experts[number].stats)
        if self.mesh.world.size > 1:
            dist.all_reduce(stats)
        counts, tokens = stats[:, :TOKENS], stats[:, TOKENS].clamp(min=1)
        loads = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
        sums = {
            "expert_load": loads.max(),
            "expert_load_mean": loads.mean(),
            "experts_dropped": stats[:, DROPPED].sum() / counts.sum().clamp(min=1),
            "router_entropy": (stats[:, ENTROPY] / tokens).mean(),
            "router_loss": (stats[:, AUX] / tokens).sum(),
        }
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
