"""One optimizer step on any mesh: micro-batches, gradient reduction, clipping, weight update.

A step never synchronises with the device: losses and norms stay tensors until they are logged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steelyard import model as models
from steelyard.checkpoint import TensorShard
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.model import Batch, LanguageModel
from steelyard.model.attention import has_varlen_attention
from steelyard.parallel import context_parallel, fsdp
from steelyard.parallel.gradients import Gradients
from steelyard.parallel.mesh import Mesh
from steelyard.parallel.parallelize import parallelize
from steelyard.tokens.dataloader import Rows, documents_in, loss_positions_in, starts_of
from steelyard.training import device as devices
from steelyard.training import fp8
from steelyard.training.expert_balance import ExpertBalance
from steelyard.training.extension import Extension
from steelyard.training.optimizer import Optimizer
from steelyard.training.step_graph import StepGraph
from steelyard.training.timeline import Timeline

BALANCE = "router.balance"  # changed by ExpertBalance, not by a gradient
FIELDS = {field.name for field in dataclasses.fields(Batch)}


class Engine:
    """This rank's part of a model in training, with its gradients and optimizer."""

    def __init__(
        self, recipe: Recipe, mesh: Mesh, device: torch.device, extension: Extension, end_of_document: int | None
    ) -> None:
        self.recipe, self.mesh, self.device, self.extension = recipe, mesh, device, extension
        self.end_of_document = end_of_document
        self.timeline = Timeline(device)

        def transform(model: LanguageModel) -> None:
            extension.transform(model)
            if recipe.train.precision == "fp8":
                fp8.convert(model, recipe.train.fp8_scaling)

        compiled = devices.compiles(recipe, device)
        dtype = devices.compute_dtype(recipe.train.precision, device)
        self.parallel_model = parallelize(recipe, mesh, device, dtype, compiled, transform)
        self.param_shards = self.parallel_model.param_shards
        self.micro_losses: list[Tensor] = []
        """The losses of the last step's micro-batches that this rank computes."""
        self.gradients = Gradients(self.param_shards, mesh, device)
        options_of, stage = extension.param_group_options, mesh.stage
        self.optimizer = Optimizer(self.param_shards, recipe.optim, recipe.optim.offload, options_of, stage)
        self.before_update: Callable[[], None] = lambda: None
        """Called before the optimizer changes the weights, so that a copy of them can end."""
        self.graph = self._step_graph()
        self.balance = ExpertBalance(recipe, self.parallel_model.stages, mesh, device)
        extension.parallelized(self.parallel_model.stages, self.param_shards, mesh)

    def initialise(self) -> None:
        """Initialise all trainable weights: each shard draws its rows of the whole parameter."""
        config, seed = self.recipe.model, self.recipe.train.seed
        with torch.no_grad():
            for shard in self.param_shards:
                if not shard.parameter.requires_grad and not shard.name.endswith(BALANCE):
                    continue
                _, *row_shape = shard.shape
                own = self.extension.initial_std(shard)
                std = config.init_std if own is None else own
                rows = models.initial(shard.name, shard.rows, row_shape, seed, std, config.layers)
                for dim in range(1, rows.ndim):
                    rows = rows.narrow(dim, shard.offset[dim], shard.tensor.shape[dim])
                shard.tensor.copy_(rows)
        self.optimizer.copy_weights_to_host()

    def state_shards(self, for_saving: bool, with_optimizer: bool = True) -> dict[str, TensorShard]:
        """Weights and optimizer state of this rank for a checkpoint, by name."""
        weights = {
            f"model.{shard.name}": TensorShard(shard.tensor, shard.shape, shard.offset)
            for shard in self.param_shards
            if shard.tensor.numel() and self.extension.saves(shard) and not (for_saving and shard.is_twin)
        }
        if not with_optimizer:
            return weights
        return weights | self.optimizer.state_shards(for_saving, self.extension.saves) | self.extension.state_shards()

    def step(
        self, rows: Rows, first_sample: int, rate: float, labels: int, loss_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step on this rank's rows; `labels` is the number of tokens that the whole step predicts.

        Returns the summed loss of the whole step, the gradient norm before clipping, and whether the step was skipped
        because that norm is not finite. All are tensors that the device may still be computing.
        """
        batch = self.batch_of(rows, first_sample)
        batch, other_loss = self.extension.weigh(self, batch)
        self.balance.begin(loss_scale, batch.tokens_BL.numel() * self.mesh.data.size * self.mesh.context.size)
        loss = self.forward_and_backward(batch, loss_scale / labels)
        self.add_stage_losses(batch, loss_scale / labels)
        if other_loss is not None:
            loss = other_loss
        self.timeline.mark("gradients")
        self.gradients.finish()
        scaled_norm, sums = self.gradients.norm_with(self._share_of_sum(loss)[None])
        norm = scaled_norm / loss_scale
        skipped = ~torch.isfinite(norm)
        clip = self.recipe.optim.clip
        grad_scale = loss_scale * ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.full_like(norm, loss_scale)
        self.timeline.mark("optimizer")
        ratios = None
        if self.optimizer.needs_ratios:
            if skipped.item():  # The first gradient that counts is the first finite one.
                self.drop_gradients()
                return sums[0], norm, skipped
            ratios = self.gradients.signal_to_noise(grad_scale, self.recipe.optim.eps)
        self.before_update()
        self.extension.before_update(self)
        self.optimizer.step(rate, grad_scale, skipped, ratios)
        self.balance.finish(skipped)
        self.extension.after_update(self)
        return sums[0], norm, skipped

    def evaluate(self, rows: Rows) -> Tensor:
        """The summed loss of rows over all data-parallel ranks."""
        for model in self.parallel_model.stages.values():
            model.eval()
        batch, loss = self.extension.weigh(self, self.batch_of(rows))
        if loss is None:
            loss = self._losses(batch, self.recipe.train.micro_batch).sum()
        for model in self.parallel_model.stages.values():
            model.train()
        loss = self._share_of_sum(loss)
        if self.mesh.world.size > 1:
            torch.distributed.all_reduce(loss)
        return loss

    def row_losses(self, batch: Batch) -> Tensor:
        """The loss of each row, without a gradient, on all ranks that share the rows.

        The loss of a row must be the same bit for bit in any batch, so nothing here may depend on other rows.
        """
        losses = self._losses(batch.replace(loss_positions_BK=None), 1)
        for axis in (self.mesh.context, self.mesh.pipeline):
            if axis.size > 1:
                torch.distributed.all_reduce(losses, group=axis.group)
        return losses

    @torch.no_grad()
    def _losses(self, batch: Batch, size: int) -> Tensor:
        """This rank's contribution to the loss of every `size` rows."""
        micro_batches = batch.micro_batches(size)
        if self.parallel_model.pipeline is not None:
            return torch.stack(self.parallel_model.pipeline.evaluate(micro_batches))
        return torch.stack([self.parallel_model.model(micro).double().sum() for micro in micro_batches])

    def forward_and_backward(self, batch: Batch, scale: float) -> Tensor:
        """Accumulate the gradients of this rank's rows and return the sum of their losses."""
        factor = torch.full((), scale, device=self.device)
        count = len(batch) // self.recipe.train.micro_batch
        if self.parallel_model.pipeline is not None:
            self.parallel_model.pipeline.timers = self.timeline if self.timeline.is_wanted else None
            loss = self.parallel_model.pipeline.train(batch, count, factor)
            self.micro_losses = self.parallel_model.pipeline.losses
            return loss.double()
        model, self.micro_losses = self.parallel_model.model, []
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, micro in enumerate(batch.micro_batches(self.recipe.train.micro_batch)):
            fsdp.before_micro_batch(model, self.recipe.parallel.zero, is_last=number == count - 1)
            # A recomputation with deterministic kernels watches the passes, and so does a timeline.
            is_watched = self.timeline.is_wanted or torch.are_deterministic_algorithms_enabled()
            passes = self._passes if self.graph is None or is_watched else self.graph
            self.timeline.mark("forward", 0, number)
            self.micro_losses.append(passes(micro, factor))
            total += self.micro_losses[-1]
        return total

    def _passes(self, micro: Batch, factor: Tensor) -> Tensor:
        """The loss of a micro-batch; its gradients are accumulated."""
        loss = self.extension.forward(self.parallel_model.model, micro).sum()
        self.timeline.mark("backward", 0, len(self.micro_losses))
        (loss * factor).backward()
        return loss.detach()

    def _step_graph(self) -> StepGraph | None:
        if not self.recipe.train.cuda_graph or self.device.type != "cuda":
            return None
        if self.mesh.world.size > 1:
            raise UserError(
                "train.cuda_graph supports one rank",
                where=self.recipe.where("train.cuda_graph"),
                hint="remove the key: with several ranks the host is rarely the limit",
            )
        return StepGraph(self._passes, [shard.parameter for shard in self.param_shards], self.device)

    def add_stage_losses(self, batch: Batch, scale: float) -> None:
        """Add losses that an extension computes from weights alone, once for all micro-batches of the step.

        Gradients are already summed over data-parallel ranks here, so each rank scales the loss by their number.
        """
        factor = scale * (len(batch) // self.recipe.train.micro_batch)
        for model in self.parallel_model.stages.values():
            loss = self.extension.loss(model)
            if loss is not None:
                (loss * factor * self.mesh.data.size).backward()

    def batch_of(self, rows: Rows, first_sample: int | None = None) -> Batch:
        """The model's input on its device; with context parallelism, this rank's part of each row.

        Document starts stay on the host, which computes `cu_seqlens` from them.
        """
        vocab, data = self.recipe.model.vocab, self.recipe.data
        largest = max(rows["tokens_BL"].max(), rows["labels_BL"].max())
        if largest >= vocab:
            raise UserError(f"the data contains token id {largest}, but model.vocab is {vocab}")
        number, length = rows["tokens_BL"].shape
        positions = np.broadcast_to(np.arange(length), (number, length))
        batch = dict(rows)
        if self.mesh.world.size > 1:
            batch.setdefault("position_ids_BL", positions)
        if self.end_of_document is not None and "documents_BL" not in rows:
            documents = documents_in(rows["tokens_BL"], self.end_of_document)
            if data.mask_documents:
                batch["documents_BL"] = documents.number
            if data.reset_positions:
                batch["position_ids_BL"] = documents.position
        if "documents_BL" in batch and self._uses_varlen_attention():
            batch["document_starts_BN"] = starts_of(batch.pop("documents_BL"))
        drops = self.recipe.model.dropout or self.recipe.model.attention_dropout
        if first_sample is not None and (drops or self.extension.needs_samples):
            batch["sample_ids_B"] = np.arange(first_sample, first_sample + number)
            batch["row_positions_BL"] = positions
        if self.mesh.context.size > 1:
            here = context_parallel.positions_of(length, self.mesh.context).numpy()
            for name in ("tokens_BL", "labels_BL", "loss_weights_BL", "position_ids_BL", "row_positions_BL"):
                if name in batch:
                    batch[name] = batch[name][:, here]
        if "loss_weights_BL" in batch:
            loss_positions = loss_positions_in(batch["loss_weights_BL"])
            if loss_positions.shape[1] < batch["loss_weights_BL"].shape[1]:
                batch["loss_positions_BK"] = loss_positions
        on_host = {name: torch.from_numpy(batch.pop(name)) for name in ("document_starts_BN",) if name in batch}
        tensors = {name: self._to_device(value) for name, value in batch.items()} | on_host
        extra = {name: tensors.pop(name) for name in set(tensors) - FIELDS}
        return Batch(**tensors, extra=extra)  # type: ignore[arg-type]

    def _uses_varlen_attention(self) -> bool:
        """Whether attention takes document starts (varlen), which skips the token pairs between documents."""
        config = self.recipe.model
        if self.mesh.context.size > 1 or config.attention_dropout:
            return False
        dtype = devices.compute_dtype(self.recipe.train.precision, self.device)
        return has_varlen_attention(self.device, dtype, getattr(config, "head_dim", config.hidden // config.heads))

    def dense_attention(self) -> str | None:
        """Why attention on a GPU uses a dense mask in 16 bits, if it does."""
        if self.device.type != "cuda" or self.recipe.train.precision == "fp32":
            return None
        from steelyard.model.windowed_attention import has_window_kernels  # imports the compiler

        config, attentions = self.recipe.model, [layer.attention for layer in self.recipe.model.blocks.layers]
        if config.attention_dropout:
            return "model.attention_dropout has no kernel"
        if self.end_of_document is not None and self.recipe.data.mask_documents and not self._uses_varlen_attention():
            across = (
                "with context parallelism" if self.mesh.context.size > 1 else "on this GPU with heads of this width"
            )
            return f"data.mask_documents has no kernel {across}"
        if any((each.window or each.softcap) and not has_window_kernels(each.head_dim) for each in attentions):
            return "windows and soft caps have no kernel on this GPU with heads of this width"
        return None

    def _to_device(self, array: npt.NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.require(array, requirements=("C", "W")))  # torch warns about read-only arrays.
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _share_of_sum(self, loss: Tensor) -> Tensor:
        """A rank's share of the loss in a sum over the world: tensor-parallel ranks all have the same loss."""
        return loss.double() / self.mesh.tensor.size

    def drop_gradients(self) -> None:
        """Free the gradients without a step."""
        for shard in self.param_shards:
            shard.parameter.grad = None
