"""The optimizer of a rank's parameter shards: steps without device synchronisation, and its state for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from typing import NamedTuple

import torch
from torch import Tensor

from steelyard.checkpoint import TensorShard
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.param_shards import ParamShard
from steelyard.training.optimizers import OptimParam, build
from steelyard.training.optimizers.sgd_sai import SgdSai

ALONE = MeshAxis(0, 1, None)


class ParamGroupOptions(NamedTuple):
    """Options of a parameter: a factor on the learning rate, and its own weight decay (None: the recipe's)."""

    rate: float = 1.0
    weight_decay: float | None = None


class Optimizer:
    """Updates the parameter shards of a rank from their gradients.

    It works on the local tensors of the shards, or on copies in host memory if the state is offloaded.
    """

    def __init__(
        self,
        param_shards: list[ParamShard],
        optim: OptimSection,
        on_host: bool,
        options_of: Callable[[ParamShard], ParamGroupOptions] = lambda shard: ParamGroupOptions(),
        stage: MeshAxis = ALONE,
    ) -> None:
        trained = [shard for shard in param_shards if shard.parameter.requires_grad]
        self.param_shards = [shard for shard in trained if shard.tensor.numel()]
        self.on_host = on_host
        self.tensors = [_host_copy(shard.tensor) if on_host else shard.tensor for shard in self.param_shards]
        for tensor in self.tensors:
            tensor.grad_dtype = None  # `optim.gradients` may be smaller than the weights.
        tensor_of = dict(zip(self.param_shards, self.tensors, strict=True))
        params = [_param(shard, tensor_of.get(shard, shard.tensor), optim, options_of(shard)) for shard in trained]
        self.torch = build(params, optim, stage) if params else None
        self._loading: dict[ParamShard, dict[str, Tensor]] = {}
        self.device = params[0].tensor.device if params else torch.device("cpu")

    def step(self, rate: float, grad_scale: Tensor, found_inf: Tensor, ratios: dict[ParamShard, Tensor] | None) -> None:
        """One step with gradients divided by `grad_scale`, skipped if `found_inf` is 1. Gradients are freed."""
        if self.torch is None:
            return
        for shard, tensor in zip(self.param_shards, self.tensors, strict=True):
            gradient = shard.gradient
            # Zero-bubble gradients may have other strides, but a fused step assumes those of the tensor.
            tensor.grad = gradient.to(tensor.device).contiguous() if gradient is not None else None
        for group in self.torch.param_groups:
            group["lr"] = rate * group["rate"]
        self.torch.grad_scale = grad_scale.to(self.device, torch.float32)  # type: ignore[attr-defined]
        self.torch.found_inf = found_inf.to(self.device, torch.float32)  # type: ignore[attr-defined]
        if ratios is not None and isinstance(self.torch, SgdSai):
            self.torch.start(
                {t: ratios[p].to(self.device) for p, t in zip(self.param_shards, self.tensors, strict=True)}
            )
        self.torch.step()
        for shard, tensor in zip(self.param_shards, self.tensors, strict=True):
            shard.parameter.grad = tensor.grad = None
            if self.on_host:
                shard.tensor.copy_(tensor)

    @property
    def needs_ratios(self) -> bool:
        """Whether SGD-SaI has not seen its first gradient."""
        return isinstance(self.torch, SgdSai) and self.torch.needs_ratios

    def make_state(self) -> None:
        """Create the state, so that a checkpoint can be loaded into it: one step that updates nothing."""
        if self.torch is None:
            return
        self.torch.grad_scale = torch.ones((), device=self.device)  # type: ignore[attr-defined]
        self.torch.found_inf = torch.ones((), device=self.device)  # type: ignore[attr-defined]
        for tensor in self.tensors:
            tensor.grad = torch.zeros_like(tensor)
        getattr(self.torch, "make_state", self.torch.step)()
        for tensor in self.tensors:
            tensor.grad = None

    def state_shards(self, for_saving: bool, saves: Callable[[ParamShard], bool]) -> dict[str, TensorShard]:
        """The state as `optimizer.<parameter>.<entry>`. The copy of a tied parameter is loaded but not saved."""
        if self.torch is None:
            return {}
        state = self.torch.state
        stored: Callable[[Tensor], dict[str, Tensor]] = getattr(
            self.torch, "checkpoint_state", lambda tensor: state.get(tensor, {})
        )
        entries = {
            shard: stored(tensor)
            for shard, tensor in zip(self.param_shards, self.tensors, strict=True)
            if saves(shard) and not (for_saving and shard.is_twin)
        }
        if not for_saving:
            self._loading = entries
        return {
            f"optimizer.{shard.name}.{entry}": _tensor_shard(shard, value)
            for shard, values in entries.items()
            for entry, value in values.items()
        }

    def finish_loading(self) -> None:
        """Take over what a checkpoint was loaded into: state that is stored in another form, and copies on the host."""
        load = getattr(self.torch, "load_checkpoint_state", None)
        for shard, tensor in zip(self.param_shards, self.tensors, strict=True):
            if load is not None and shard in self._loading:
                load(tensor, self._loading[shard])
        self._loading = {}
        self.copy_weights_to_host()

    def copy_weights_to_host(self) -> None:
        """Update the copies in host memory after the weights were set directly."""
        if self.on_host:
            for shard, tensor in zip(self.param_shards, self.tensors, strict=True):
                tensor.copy_(shard.tensor)


def _param(shard: ParamShard, tensor: Tensor, optim: OptimSection, options: ParamGroupOptions) -> OptimParam:
    """A parameter with its options: weight decay on matrices, none on norms, biases and `optim.no_decay`."""
    is_decayed = len(shard.shape) >= 2 and not any(fnmatch(shard.name, name) for name in optim.no_decay)
    default = optim.weight_decay if is_decayed else 0.0
    return OptimParam(shard, tensor, default if options.weight_decay is None else options.weight_decay, options.rate)


def _host_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


def _tensor_shard(shard: ParamShard, value: Tensor) -> TensorShard:
    return (
        TensorShard(value, shard.shape, shard.offset) if value.shape == shard.tensor.shape else TensorShard.whole(value)
    )
