"""Direct preference optimization (DPO) as an extension of the training loop.

For a pair, let m be how much more the model prefers the chosen answer than the reference does:
m = (log p(chosen) - log r(chosen)) - (log p(rejected) - log r(rejected)). The loss is -log sigmoid(beta m). Its
gradient is that of a weighted sum of log probabilities, with weight beta sigmoid(-beta m) for the tokens of the chosen
answer and the negative of it for the rejected one. So a step runs a forward pass without gradient, sets these loss
weights, and then is an ordinary step on any layout. Dropout is a hash, so both passes drop the same elements.

The reference is the model before the first step. Its log probabilities are computed once and saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from steelyard.checkpoint import TensorShard
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.finetuning.encoding import Encoded
from steelyard.finetuning.packed_samples import Row, row_of
from steelyard.model import Batch
from steelyard.parallel.mesh import MeshAxis
from steelyard.parallel.world import World
from steelyard.tokens.dataloader import Rows, read
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

REFERENCE = "reference_B"
Pair = tuple[Encoded, Encoded]
ROWS_AT_ONCE = 16


class PairSamples:
    """Two rows for each pair, chosen and rejected; pairs are shuffled each epoch."""

    def __init__(self, pairs: Sequence[Pair], length: int, samples: int, seed: int | None) -> None:
        self.pairs, self.length = pairs, length
        self.reference = torch.zeros(2 * len(pairs), dtype=torch.float64)
        """The reference's log probability of each answer. Set before the first step."""
        number = samples // 2
        if seed is None:
            self.order = np.arange(number) % max(1, len(pairs))
            self.is_real = np.arange(number) < len(pairs)
        else:
            random = np.random.RandomState(seed)
            epochs = -(-number // len(pairs))
            self.order = np.concatenate([random.permutation(len(pairs)) for _ in range(epochs)])[:number]
            self.is_real = np.ones(number, dtype=np.bool_)
        # A pair counts as one label.
        self.counts: npt.NDArray[np.int64] = np.stack([self.is_real, np.zeros(number)], axis=1).reshape(-1).astype(int)

    @property
    def per_epoch(self) -> int:
        """Samples in one epoch."""
        return 2 * len(self.pairs)

    def __len__(self) -> int:
        return 2 * len(self.order)

    def __getitem__(self, number: int) -> Row:
        pair, side = int(self.order[number // 2]), number % 2
        row = self._row(pair, side)
        row[REFERENCE] = np.asarray(self.reference[2 * pair + side].item())
        if not self.is_real[number // 2]:
            row["loss_weights_BL"][:] = 0
        return row

    def in_order(self) -> Iterator[Row]:
        """Every answer once, in the order of `reference`."""
        for pair in range(len(self.pairs)):
            for side in (0, 1):
                yield self._row(pair, side)

    def _row(self, pair: int, side: int) -> Row:
        return row_of([self.pairs[pair][side]], self.length)


class DpoExtension(Extension):
    """Adds the DPO loss to another extension, which selects the trainable parameters."""

    is_likelihood = False

    def __init__(self, inner: Extension, beta: float, samples: list[PairSamples]) -> None:
        self.beta, self.samples = beta, samples
        self.margin = torch.zeros(3, dtype=torch.float64)
        self.data: MeshAxis | None = None
        for name in (
            "transform",
            "parallelized",
            "initial_std",
            "param_group_options",
            "begin_step",
            "forward",
            "loss",
            "saves",
            "state",
        ):
            setattr(self, name, getattr(inner, name))
        self.inner = inner
        self.needs_samples = inner.needs_samples

    def start(self, engine: Engine, world: World) -> str:
        """Load the weights, and compute the reference log probabilities with them."""
        how = self.inner.start(engine, world)
        engine.optimizer.copy_weights_to_host()
        for samples in self.samples:
            compute_reference(samples, engine)
        return how

    def resumed(self, engine: Engine, world: World, state: dict[str, Any]) -> None:
        """The reference log probabilities are in the checkpoint."""
        self.inner.resumed(engine, world, state)

    def state_shards(self) -> dict[str, TensorShard]:
        """The reference log probabilities, besides the tensors of the inner extension."""
        own = {f"reference.{n}": TensorShard.whole(samples.reference) for n, samples in enumerate(self.samples)}
        return self.inner.state_shards() | own

    def weigh(self, engine: Engine, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Set each token's loss weight from the margin of its pair."""
        reference = batch.extra[REFERENCE].double()
        gained = -engine.row_losses(batch) - reference
        margins = gained[0::2] - gained[1::2]
        weights_BL = batch.loss_weights_BL
        assert weights_BL is not None
        is_real = weights_BL.flatten(1).any(dim=1)
        if engine.mesh.context.size > 1:
            flags = is_real.to(torch.int32)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=engine.mesh.context.group)
            is_real = flags.bool()
        real = is_real[0::2].double()
        weight = self.beta * torch.sigmoid(-self.beta * margins)
        signed = torch.stack([weight, -weight], dim=1).flatten().to(weights_BL.dtype)
        batch = batch.replace(loss_weights_BL=weights_BL * signed[:, None])
        sharing = engine.mesh.context.size * engine.mesh.pipeline.size
        self.data = engine.mesh.data
        self.margin = torch.stack([(margins * real).sum(), ((margins > 0) * real).sum(), real.sum()])
        return batch, (-F.logsigmoid(self.beta * margins) * real).sum() / sharing

    def metrics(self) -> dict[str, float]:
        """The mean reward margin of the last batch, and the share of pairs with a positive margin."""
        sums = self.margin.clone()
        if self.data is not None and self.data.size > 1:
            dist.all_reduce(sums, group=self.data.group)
        margin, ahead, pairs = sums.tolist()
        rewards = {"reward_margin": self.beta * margin / pairs, "reward_accuracy": ahead / pairs} if pairs else {}
        return self.inner.metrics() | rewards


@torch.no_grad()
def compute_reference(samples: PairSamples, engine: Engine) -> None:
    """Compute each answer's log probability with the current weights; data-parallel ranks share the work."""
    rows, mesh = list(samples.in_order()), engine.mesh
    log_probs = torch.zeros(len(rows), dtype=torch.float64, device=engine.device)
    # All ranks run the same number of forward passes, since each gathers weight shards; surplus results are dropped.
    share = -(-len(rows) // mesh.data.size)
    first = mesh.data.index * share
    mine = [rows[min(number, len(rows) - 1)] for number in range(first, first + share)]
    for model in engine.parallel_model.stages.values():
        model.eval()
    with console.progress("reference", share, "answers") as progress:
        for start in range(0, share, ROWS_AT_ONCE):
            number = min(ROWS_AT_ONCE, share - start)
            losses = engine.row_losses(engine.batch_of(read(_Listed(mine), start, number)))
            target = log_probs[first + start : first + start + number]
            target.copy_(-losses[: len(target)])
            progress.advance(number)
    for model in engine.parallel_model.stages.values():
        model.train()
    if mesh.data.size > 1:
        dist.all_reduce(log_probs, group=mesh.data.group)
    samples.reference.copy_(log_probs)


class _Listed:
    """A list of rows with the interface of samples."""

    counts = None

    def __init__(self, rows: list[Rows]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Rows:
        return self.rows[number]


def refuse_odd(batch: int, ranks: int, where: str) -> None:
    """Refuse a batch that would split a pair over ranks."""
    if batch % (2 * ranks):
        raise UserError(
            f"a batch of {batch} rows cannot be split into whole pairs (two rows each) on {ranks} data-parallel ranks",
            where=where,
            hint=f"choose a multiple of {2 * ranks}",
        )
