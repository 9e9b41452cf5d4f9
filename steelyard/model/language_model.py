"""What the families share: where the stream of tokens begins, the layers it passes, the head it ends at.

A model may be built as a slice of itself, for one stage of a pipeline: without the embedding, with some of the layers,
without norm and head. Names stay those of the whole model, so initial weights and checkpoints do not know of stages.

Tensor suffixes: B batch, L length, D hidden, V vocabulary, N documents of a row, K places of a row that are learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from steelyard.core.recipe.model_section import GptConfig, LlamaConfig
from steelyard.model.attention import CuSeqlens, cu_seqlens_of, within_documents
from steelyard.model.batch import Batch
from steelyard.model.dropout import Dropout, salt_of
from steelyard.model.kv_cache import Cache, LayerCache
from steelyard.model.loss import VocabHead, linear_cross_entropy
from steelyard.model.modules import Linear, at_places


@dataclass(frozen=True)
class StageSpec:
    """Which layers of a model to build, and whether it begins with the embedding and ends with norm and head."""

    layers: range
    first: bool = True
    last: bool = True


class Context(NamedTuple):
    """What every layer needs beside the stream: the same for all layers of a forward pass, but where that is said."""

    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | CuSeqlens | None = None
    sample_ids_B: Tensor | None = None
    row_positions_BL: Tensor | None = None
    cache: LayerCache | None = None
    """Each layer's own."""
    loss_positions_BK: Tensor | None = None
    """For the last layer only: the places that the loss looks at; beyond attention no other need be computed."""


class TransformerLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    checkpoint: Callable[..., Tensor] | None = None
    """Calls `compute` so that the backward pass computes it again; set by `parallel/activation_checkpoint.py`."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: Callable[[], nn.Module], drop: float) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.attention_dropout = make_norm(), attention, Dropout(drop)
        self.mlp_norm, self.mlp, self.mlp_dropout = make_norm(), mlp, Dropout(drop)

    def forward(self, x_BLD: Tensor, context: Context) -> Tensor:
        if self.checkpoint is None:
            return self.compute(x_BLD, context)
        return self.checkpoint(self.compute, x_BLD, context)

    def compute(self, x_BLD: Tensor, context: Context) -> Tensor:
        """The layer itself; a subclass may prepare something first, which is then done again in the backward pass."""
        noise = context.sample_ids_B, context.row_positions_BL
        x_BLD = x_BLD + self.attention_dropout(self.attention(self.attention_norm(x_BLD), context), *noise)
        if context.loss_positions_BK is not None:
            x_BLD = at_places(context.loss_positions_BK, x_BLD)
        x_BLD = x_BLD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BLD)), *noise)
        return x_BLD


class LanguageModel(nn.Module):
    """A `Batch` in, logits out; with labels, the summed loss (1,). A slice takes and gives the stream instead."""

    embed: nn.Embedding | None
    head: Linear | None

    def __init__(self, config: GptConfig | LlamaConfig, part: StageSpec | None) -> None:
        super().__init__()
        self.config = config
        self.part = part or StageSpec(range(config.layers))
        self.dtype = torch.float32
        self.mask_of: Callable[[Tensor], Tensor] = within_documents
        self.vocabulary = VocabHead()
        self.loss: Callable[..., Tensor] = linear_cross_entropy
        self.embed_dropout = Dropout(config.dropout)
        self.embed = nn.Embedding(config.padded_vocab, config.hidden) if self.part.first else None
        self.layers = nn.ModuleDict({str(number): self.make_layer() for number in self.part.layers})
        self.norm = self.make_norm() if self.part.last else None
        self.head = Linear(config.hidden, config.padded_vocab, bias=False) if self.part.last else None
        self.tie()

    def make_layer(self) -> nn.Module:
        """One layer of the family."""
        raise NotImplementedError

    def make_norm(self) -> nn.Module:
        """The norm before the head."""
        raise NotImplementedError

    def rotation(self, position_ids_BL: Tensor) -> tuple[Tensor, Tensor] | None:
        """What turns queries and keys by their position, if the family does that."""
        return None

    def embedded(self, tokens_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
        """The stream's beginning."""
        assert self.embed is not None
        embedded: Tensor = self.embed(tokens_BL)
        return embedded

    def tie(self) -> None:
        """Let head and embedding be one parameter, where the shape says so and both are here."""
        if self.config.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def seed_dropout(self, seed: int) -> None:
        """Tell each dropout who it is."""
        for name, module in self.named_modules():
            if hasattr(module, "salt"):
                module.salt = salt_of(seed, name)

    def forward(self, batch: Batch | Tensor, x_BLD: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Compute a batch. `x_BLD` is the output of the stage before, for all stages but the first.

        A tensor in place of the batch is token ids, or the output of the stage before, and nothing else is known of it.
        With a cache the tokens continue those that it has seen.
        """
        if isinstance(batch, Tensor):
            x_BLD = batch if self.embed is None else None
            batch = Batch(batch if x_BLD is None else batch.new_empty(batch.shape[:2], dtype=torch.long))
        position_ids_BL = batch.position_ids_BL
        if position_ids_BL is None:
            seen = 0 if cache is None else cache.length
            position_ids_BL = torch.arange(seen, seen + batch.tokens_BL.shape[1], device=batch.tokens_BL.device)[None]
        context = self._context(batch, position_ids_BL)
        if self.embed is not None:
            x_BLD = self.embedded(batch.tokens_BL, position_ids_BL).to(self.dtype)
            x_BLD = self.embed_dropout(x_BLD, context.sample_ids_B, context.row_positions_BL)
        loss_positions_BK = batch.loss_positions_BK
        picks_early = loss_positions_BK is not None and batch.labels_BL is not None and self._picks_early()
        if picks_early and batch.tokens_BL.is_cuda:  # So the last layer is compiled once for any number of them.
            torch._dynamo.maybe_mark_dynamic(loss_positions_BK, 1)
        for number, layer in self.layers.items():
            if cache is not None:
                context = context._replace(cache=cache.of(number))
            if picks_early and int(number) == self.config.layers - 1:
                context = context._replace(loss_positions_BK=loss_positions_BK)
            x_BLD = layer(x_BLD, context)
        assert x_BLD is not None
        if cache is not None:
            cache.length += batch.tokens_BL.shape[1]
        if self.norm is None or self.head is None:
            return x_BLD
        if batch.logits_to_keep is not None:
            x_BLD = x_BLD[:, -batch.logits_to_keep :]
        x_BLD = self.vocabulary.enter(self.norm(x_BLD))
        labels_BL, loss_weights_BL = batch.labels_BL, batch.loss_weights_BL
        if labels_BL is not None:
            if loss_positions_BK is not None:  # Every other position has weight 0, so the head can skip it.
                x_BLD = x_BLD if picks_early else at_places(loss_positions_BK, x_BLD)
                labels_BL = labels_BL.gather(1, loss_positions_BK)
                loss_weights_BL = None if loss_weights_BL is None else loss_weights_BL.gather(1, loss_positions_BK)
            loss = self.loss(x_BLD, self.head.weight, labels_BL, loss_weights_BL, self.config.vocab, self.vocabulary)
            # A pipeline joins the outputs of micro-batches, which it could not do with scalars; a view makes FSDP warn.
            return torch.stack([loss])
        # Rows that only pad the vocabulary are cut off: they are never predicted and never trained.
        logits: Tensor = self.head(x_BLD)[..., : self.config.vocab]
        return logits

    def _context(self, batch: Batch, position_ids_BL: Tensor) -> Context:
        """What all layers share in a forward pass."""
        device, row_positions_BL = batch.tokens_BL.device, batch.row_positions_BL
        if row_positions_BL is None and batch.sample_ids_B is not None:
            row_positions_BL = torch.arange(position_ids_BL.shape[1], device=device)[None]
        mask: Tensor | CuSeqlens | None = None if batch.documents_BL is None else self.mask_of(batch.documents_BL)
        if batch.document_starts_BN is not None:
            mask = cu_seqlens_of(batch.document_starts_BN, position_ids_BL.shape[1], device)
        return Context(self.rotation(position_ids_BL), mask, batch.sample_ids_B, row_positions_BL)

    def _picks_early(self) -> bool:
        """Whether the last layer may go on with learned places alone: it is here, has whole rows, and drops nothing."""
        is_here = self.head is not None and bool(self.layers)
        return is_here and not self.config.dropout and not self.vocabulary.by_sequence
