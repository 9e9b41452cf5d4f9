"""The base of all model families: embedding, layers, final norm and head.

A model may be built as one pipeline stage: some of the layers, the embedding only on the first stage, the final norm
and head only on the last.
Parameter names are those of the whole model, so weight initialization and checkpoints do not depend on stages.

Tensor suffixes: B batch, L length, D hidden, V vocabulary, N documents per row, K loss positions per row.
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
from steelyard.model.modules import Linear, at_positions


@dataclass(frozen=True)
class StageSpec:
    """The layers of a stage, and whether it has the embedding (`first`) and the norm and head (`last`)."""

    layers: range
    first: bool = True
    last: bool = True


class LayerInputs(NamedTuple):
    """The inputs of a layer other than the residual stream. The same for all layers, except where noted."""

    rotation: tuple[Tensor, Tensor] | None = None
    mask: Tensor | CuSeqlens | None = None
    sample_ids_B: Tensor | None = None
    row_positions_BL: Tensor | None = None
    cache: LayerCache | None = None
    """The cache of this layer."""
    loss_positions_BK: Tensor | None = None
    """Set for the last layer only: after attention it computes only these positions."""


class TransformerLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    recompute_fn: Callable[..., Tensor] | None = None
    """Calls `compute` with activation checkpointing; set by `parallel/activation_checkpoint.py`."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: Callable[[], nn.Module], drop: float) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.attention_dropout = make_norm(), attention, Dropout(drop)
        self.mlp_norm, self.mlp, self.mlp_dropout = make_norm(), mlp, Dropout(drop)

    def forward(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        if self.recompute_fn is None:
            return self.compute(x_BLD, inputs)
        return self.recompute_fn(self.compute, x_BLD, inputs)

    def compute(self, x_BLD: Tensor, inputs: LayerInputs) -> Tensor:
        """Compute the layer. With activation checkpointing the backward pass runs all of this again."""
        dropout_keys = inputs.sample_ids_B, inputs.row_positions_BL
        x_BLD = x_BLD + self.attention_dropout(self.attention(self.attention_norm(x_BLD), inputs), *dropout_keys)
        if inputs.loss_positions_BK is not None:
            x_BLD = at_positions(inputs.loss_positions_BK, x_BLD)
        x_BLD = x_BLD + self.mlp_dropout(self.mlp(self.mlp_norm(x_BLD)), *dropout_keys)
        return x_BLD


class LanguageModel(nn.Module):
    """Maps a `Batch` to logits, or with labels to the summed loss (1,). A stage without head returns hidden states."""

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
        """A norm of the family, for the layers and before the head."""
        raise NotImplementedError

    def rotation(self, position_ids_BL: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine of the rotary embedding, if the family uses it."""
        return None

    def embedded(self, tokens_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
        """The input of the first layer."""
        assert self.embed is not None
        embedded: Tensor = self.embed(tokens_BL)
        return embedded

    def tie(self) -> None:
        """Share one parameter between head and embedding, if the config ties them and this stage has both."""
        if self.config.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight

    def seed_dropout(self, seed: int) -> None:
        """Set the salt of each dropout from the seed and the name of the module."""
        for name, module in self.named_modules():
            if hasattr(module, "salt"):
                module.salt = salt_of(seed, name)

    def forward(self, batch: Batch | Tensor, x_BLD: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Compute a batch. `x_BLD` is the output of the previous stage; the first stage has none.

        A tensor in place of the batch holds token ids, or for a later stage the output of the previous one.
        With a cache the tokens continue the cached ones.
        """
        if isinstance(batch, Tensor):
            x_BLD = batch if self.embed is None else None
            batch = Batch(batch if x_BLD is None else batch.new_empty(batch.shape[:2], dtype=torch.long))
        position_ids_BL = batch.position_ids_BL
        if position_ids_BL is None:
            seen = 0 if cache is None else cache.length
            position_ids_BL = torch.arange(seen, seen + batch.tokens_BL.shape[1], device=batch.tokens_BL.device)[None]
        inputs = self._layer_inputs(batch, position_ids_BL)
        if self.embed is not None:
            x_BLD = self.embedded(batch.tokens_BL, position_ids_BL).to(self.dtype)
            x_BLD = self.embed_dropout(x_BLD, inputs.sample_ids_B, inputs.row_positions_BL)
        loss_positions_BK = batch.loss_positions_BK
        selects_early = loss_positions_BK is not None and batch.labels_BL is not None and self._can_select_early()
        if selects_early and batch.tokens_BL.is_cuda:  # Compiles the last layer once for any number of positions.
            torch._dynamo.maybe_mark_dynamic(loss_positions_BK, 1)
        for number, layer in self.layers.items():
            if cache is not None:
                inputs = inputs._replace(cache=cache.of(number))
            if selects_early and int(number) == self.config.layers - 1:
                inputs = inputs._replace(loss_positions_BK=loss_positions_BK)
            x_BLD = layer(x_BLD, inputs)
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
                x_BLD = x_BLD if selects_early else at_positions(loss_positions_BK, x_BLD)
                labels_BL = labels_BL.gather(1, loss_positions_BK)
                loss_weights_BL = None if loss_weights_BL is None else loss_weights_BL.gather(1, loss_positions_BK)
            loss = self.loss(x_BLD, self.head.weight, labels_BL, loss_weights_BL, self.config.vocab, self.vocabulary)
            # A pipeline concatenates the outputs of micro-batches, so no scalar; a view would make FSDP warn.
            return torch.stack([loss])
        # Drop the logits of padding ids, which are never labels.
        logits: Tensor = self.head(x_BLD)[..., : self.config.vocab]
        return logits

    def _layer_inputs(self, batch: Batch, position_ids_BL: Tensor) -> LayerInputs:
        """What all layers get besides the residual stream."""
        device, row_positions_BL = batch.tokens_BL.device, batch.row_positions_BL
        if row_positions_BL is None and batch.sample_ids_B is not None:
            row_positions_BL = torch.arange(position_ids_BL.shape[1], device=device)[None]
        mask: Tensor | CuSeqlens | None = None if batch.documents_BL is None else self.mask_of(batch.documents_BL)
        if batch.document_starts_BN is not None:
            mask = cu_seqlens_of(batch.document_starts_BN, position_ids_BL.shape[1], device)
        return LayerInputs(self.rotation(position_ids_BL), mask, batch.sample_ids_B, row_positions_BL)

    def _can_select_early(self) -> bool:
        """Whether the last layer may compute loss positions alone: it is here, rows are whole, nothing is dropped."""
        is_here = self.head is not None and bool(self.layers)
        return is_here and not self.config.dropout and not self.vocabulary.by_sequence
