"""How a Megatron checkpoint is spread over files, and which layers name its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from steelyard.checkpoint.formats.key_mapping import groups_of
from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import MlpBlock
from steelyard.core.recipe.model_section import ModelConfig


@dataclass(frozen=True)
class MegatronLayout:
    """The number of tensor and pipeline ranks; `partition` has the number of layers of each stage."""

    tensor: int = 1
    pipeline: int = 1
    partition: tuple[int, ...] | None = None
    engine: bool = False
    """Whether tensors have the names of Transformer Engine's layers."""
    grouped: bool = False
    """Whether experts have the names of Transformer Engine's grouped layer."""

    def stages(self, config: ModelConfig) -> list[range]:
        """The layers of each pipeline stage."""
        counts = self.partition or (config.layers // self.pipeline,) * self.pipeline
        if len(counts) != self.pipeline or sum(counts) != config.layers:
            written = "-".join(map(str, counts)) if self.partition else f"{self.pipeline} equal stages"
            raise UserError(
                f"{written} cannot hold the {config.layers} layers of the model on {self.pipeline} pipeline ranks",
                hint=f"give --partition {self.pipeline} numbers that sum to {config.layers}",
            )
        starts = [sum(counts[:stage]) for stage in range(self.pipeline)]
        return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]

    def check(self, config: ModelConfig) -> None:
        """Raise if the tensor parallel size does not divide heads, key-value heads and widths of MLPs and experts."""
        counts = {"key-value heads": groups_of(config), "heads": config.heads}
        for layer in config.blocks.layers:
            if isinstance(layer.mlp, MlpBlock):
                counts["MLP columns (ffn)"] = layer.mlp.ffn
                continue
            counts["columns of an expert (expert_ffn)"] = layer.mlp.ffn
            if layer.mlp.shared_ffn is not None:
                counts["columns of the shared expert (shared_ffn)"] = layer.mlp.shared_ffn
        for what, number in counts.items():
            if number % self.tensor:
                raise UserError(
                    f"{number} {what} cannot be divided among {self.tensor} tensor ranks",
                    hint="choose another --tensor",
                )
        if self.grouped and not (self.engine and config.blocks.has_experts):
            raise UserError(
                "only experts with layers of Transformer Engine can be grouped",
                hint="add --layers transformer-engine, or remove --grouped-experts",
            )
