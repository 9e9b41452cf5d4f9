"""`[parallel]`: the layout. `steelyard plan` writes this section, `steelyard train` applies it."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator, PositiveFloat
from pydantic_core import PydanticCustomError

from steelyard.core.errors import UserError
from steelyard.core.recipe.section import Degree, NonNegativeInt, Section


@dataclass(frozen=True)
class Partition:
    """Transformer layers per pipeline stage, written `0-11-8-8-5`.

    The embedding belongs to the first stage, the final norm and the head to the last. A stage may have zero layers.
    """

    counts: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Parse the text form; raises `ValueError`."""
        parts = text.split("-")
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(text)
        return cls(tuple(int(part) for part in parts))

    def __str__(self) -> str:
        return "-".join(str(count) for count in self.counts)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.counts)

    @property
    def total(self) -> int:
        """Layers of all stages."""
        return sum(self.counts)

    def layers_of(self, stage: int) -> range:
        """The layer indices of one stage."""
        first = sum(self.counts[:stage])
        return range(first, first + self.counts[stage])


def _partition(value: Any) -> Partition:
    if isinstance(value, Partition):
        return value
    try:
        return Partition.parse(value)
    except (ValueError, AttributeError):
        raise PydanticCustomError("partition", 'must be layer counts joined by dashes, like "0-11-8-8-5"') from None


PartitionField = Annotated[Partition, PlainValidator(_partition), PlainSerializer(str)]


class ParallelSection(Section):
    """Sizes of the mesh, the pipeline schedule and the sharding."""

    tensor: Degree = 1
    context: Degree = 1
    expert: Degree = Field(1, description="ranks that share the experts of a layer; divides data x context")
    pipeline: Degree = 1
    virtual: Degree = Field(1, description="stages per pipeline rank")
    data: Degree | None = Field(None, description="default: world size / (tensor x context x pipeline)")
    replicate: Degree = Field(1, description="replicas in hybrid sharding (HSDP)")
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="shards optimizer state (1), gradients too (2), parameters too (3)"
    )
    sequence_parallel: bool = False
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    partition: PartitionField | None = Field(None, description="default: layers are balanced by cost")
    placement: list[str] = Field([], description='nodes in rank order, like ["a100:1", "a10:7"]')
    recompute: Literal["none", "selective", "full", "auto"] | NonNegativeInt = Field(
        "none", description="activation checkpointing; a number: full, for this many layers per stage; auto: what fits"
    )
    timeout_minutes: PositiveFloat = Field(10.0, description="timeout of the process groups")

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def stages(self) -> int:
        """Pipeline stages of all ranks."""
        return self.pipeline * self.virtual

    @property
    def least_world(self) -> int:
        """The smallest world size for this layout."""
        return self.model_ranks * (self.data or self._least_data)

    @property
    def _least_data(self) -> int:
        """The smallest data-parallel size that the expert axis divides."""
        return self.expert // gcd(self.expert, self.context) * (self.replicate if self.zero and self.expert > 1 else 1)

    def data_for(self, world: int) -> int:
        """Data-parallel size for a world size."""
        data, left = divmod(world, self.model_ranks)
        if left or not data or self.data not in (None, data):
            sizes = f"tensor {self.tensor} x context {self.context} x pipeline {self.pipeline}"
            sizes += f" x data {self.data}" if self.data else ""
            needed = f"{self.least_world} ranks" if self.data else f"a multiple of {self.model_ranks} ranks"
            raise UserError(
                f"the plan ({sizes}) runs on {needed}, not on {world}",
                hint=f"start {needed}, or change the sizes in [parallel]" + (" or remove data" if self.data else ""),
            )
        return data
