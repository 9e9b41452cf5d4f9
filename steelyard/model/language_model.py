"""The model: embedding, layers, final norm and head.

A model may be built as one pipeline stage: some of the layers, the embedding only on the first stage, the final norm
and head only on the last.
Parameter names are those of the whole model, so weight initialization and checkpoints do not depend on stages.

Tensor suffixes: B batch, L length, D hidden, V vocabulary, N documents per row, K loss positions per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from steelyard.core.recipe.blocks import ExpertsBlock, Rope
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.model.attention import CuSeqlens, KeysUpTo, cu_seqlens_of, within_documents
from steelyard.model.batch import Batch
from steelyard.model.dropout import Dropout, salt_of
from steelyard.model.kv_cache import Cache
from steelyard.model.loss import VocabHead, linear_cross_entropy, softcapped
from steelyard.model.modules import Linear, at_positions
from steelyard.model.rope import Rotation, rope_cos_sin
from steelyard.model.transformer import LayerInputs, TransformerLayer, norm_of


@dataclass(frozen=True)
class StageSpec:
    """The layers of a stage, and whether it has the embedding (`first`) and the norm and head (`last`)."""

    layers: range
    first: bool = True
    last: bool = True


class LanguageModel(nn.Module):
    """Maps a `Batch` to logits, or with labels to the summed loss (1,). A stage without head returns hidden states."""

    embed: nn.Embedding | None
    head: Linear | None

    def __init__(self, config: ModelConfig, stage_spec: StageSpec | None = None) -> None:
        super().__init__()
        self.config, self.blocks = config, config.blocks
        blocks = self.blocks
        self.stage_spec = stage_spec or StageSpec(range(config.layers))
        self.dtype = torch.float32
        self.mask_of: Callable[[Tensor], Tensor] = within_documents
        self.vocabulary = VocabHead()
        self.loss: Callable[..., Tensor] = linear_cross_entropy
        self.embed_dropout = Dropout(config.dropout)
        self.embed = nn.Embedding(config.padded_vocab, config.hidden) if self.stage_spec.first else None
        drops = config.dropout, config.attention_dropout
        self.layers = nn.ModuleDict(
            {str(number): TransformerLayer(blocks.layers[number], *drops) for number in self.stage_spec.layers}
        )
        self.norm = norm_of(blocks.norm) if self.stage_spec.last else None
        self.head = Linear(config.hidden, config.padded_vocab, bias=False) if self.stage_spec.last else None
        self.positions = (
            nn.Embedding(blocks.positions, config.hidden) if blocks.positions and self.stage_spec.first else None
        )
        self.tie()

    def rotations(self, position_ids_BL: Tensor) -> dict[Rope | None, Rotation]:
        """Cosine and sine of all rotary positions of the layers."""
        ropes = {self.blocks.layers[int(number)].attention.rope for number in self.layers}
        return {rope: rope_cos_sin(rope, position_ids_BL) for rope in ropes if rope is not None}

    def embedded(self, tokens_BL: Tensor, position_ids_BL: Tensor) -> Tensor:
        """The input of the first layer."""
        assert self.embed is not None
        embedded: Tensor = self.embed(tokens_BL)
        if self.blocks.embed_scale is not None:
            embedded = embedded * self.blocks.embed_scale
        return embedded if self.positions is None else embedded + self.positions(position_ids_BL)

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
        if position_ids_BL is None and cache is not None and cache.slot is not None:
            position_ids_BL = cache.slot.position_1[None]
        elif position_ids_BL is None:
            seen = 0 if cache is None else cache.length
            position_ids_BL = torch.arange(seen, seen + batch.tokens_BL.shape[1], device=batch.tokens_BL.device)[None]
        inputs, rotations = self._layer_inputs(batch, position_ids_BL), self.rotations(position_ids_BL)
        if cache is not None and cache.slot is not None:
            inputs = inputs._replace(mask=KeysUpTo(cache.slot.position_1))
        if self.embed is not None:
            x_BLD = self.embedded(batch.tokens_BL, position_ids_BL).to(self.dtype)
            x_BLD = self.embed_dropout(x_BLD, inputs.sample_ids_B, inputs.row_positions_BL)
        loss_positions_BK = batch.loss_positions_BK
        selects_early = loss_positions_BK is not None and batch.labels_BL is not None and self._can_select_early()
        if selects_early and batch.tokens_BL.is_cuda:  # Compiles the last layer once for any number of positions.
            torch._dynamo.maybe_mark_dynamic(loss_positions_BK, 1)
        # Generation alone keeps only the last logits; it adds a layer's output together with the next layer's norm.
        infers, branch_BLD = batch.logits_to_keep is not None and not self.training, None
        for number, layer in self.layers.items():
            if cache is not None:
                inputs = inputs._replace(cache=cache.of(number))
            if selects_early and int(number) == self.config.layers - 1:
                inputs = inputs._replace(loss_positions_BK=loss_positions_BK)
            assert x_BLD is not None
            inputs = inputs._replace(rotation=rotations.get(self.blocks.layers[int(number)].attention.rope))
            assert isinstance(layer, TransformerLayer)
            if infers:
                x_BLD, branch_BLD = layer.infer(x_BLD, branch_BLD, inputs)
            else:
                x_BLD = layer(x_BLD, inputs)
        assert x_BLD is not None
        if branch_BLD is not None:
            x_BLD = x_BLD + branch_BLD
        if cache is not None and cache.slot is None:
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
            loss = self.loss(x_BLD, self.head.weight, labels_BL, loss_weights_BL, self.config.vocab, self.vocabulary,
                             self.blocks.logit_softcap, self.config.z_loss if self.training else 0.0)  # fmt: skip
            # A pipeline concatenates the outputs of micro-batches, so no scalar; a view would make FSDP warn.
            return torch.stack([loss])
        # Drop the logits of padding ids, which are never labels.
        logits: Tensor = self.head(x_BLD)[..., : self.config.vocab]
        return logits if self.blocks.logit_softcap is None else softcapped(logits, self.blocks.logit_softcap)

    def _layer_inputs(self, batch: Batch, position_ids_BL: Tensor) -> LayerInputs:
        """What all layers get besides the residual stream."""
        device, row_positions_BL = batch.tokens_BL.device, batch.row_positions_BL
        if row_positions_BL is None and batch.sample_ids_B is not None:
            row_positions_BL = torch.arange(position_ids_BL.shape[1], device=device)[None]
        mask: Tensor | CuSeqlens | None = None if batch.documents_BL is None else self.mask_of(batch.documents_BL)
        if batch.document_starts_BN is not None:
            mask = cu_seqlens_of(batch.document_starts_BN, position_ids_BL.shape[1], device)
        return LayerInputs(None, mask, batch.sample_ids_B, row_positions_BL)

    def _can_select_early(self) -> bool:
        """Whether the last layer may compute loss positions alone: it is here, rows are whole, nothing is dropped."""
        is_here = self.head is not None and bool(self.layers)
        has_experts = isinstance(self.blocks.layers[-1].mlp, ExpertsBlock)  # They balance the load of whole sequences.
        return is_here and not has_experts and not self.config.dropout and not self.vocabulary.by_sequence
