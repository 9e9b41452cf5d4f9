"""`[optim]`: the optimizer and its learning-rate schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from steelyard.core.recipe.optimizers import OPTIMIZERS
from steelyard.core.recipe.section import NonNegativeInt, PositiveInt, Section, contradiction

Beta = Annotated[float, Field(ge=0, lt=1)]
UNITS = ("steps", "samples", "tokens")
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class OptimSection(Section):
    """Optimizer, learning rate, schedule and weight decay."""

    name: OptimizerName = "adamw"
    learning_rate: PositiveFloat = Field(3e-4, description="muon: of the weight matrices of layers")
    adamw_learning_rate: PositiveFloat | None = Field(
        None, description="muon: of all other parameters, which AdamW updates; default: learning_rate"
    )
    min_learning_rate: NonNegativeFloat = 0.0
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="length of the warm-up as a fraction of the run"
    )
    warmup_samples: PositiveInt | None = Field(None, description="length of the warm-up in samples")
    warmup_tokens: PositiveInt | None = Field(None, description="length of the warm-up in tokens")
    decay_steps: PositiveInt | None = Field(None, description="length of the schedule in steps; default: of the run")
    decay_samples: PositiveInt | None = Field(None, description="the same in samples")
    decay_tokens: PositiveInt | None = Field(None, description="the same in tokens")
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="wsd: the fraction of the schedule in which the learning rate decays"
    )
    weight_decay: NonNegativeFloat = Field(0.1, description="applied to matrices, not to norms and biases")
    no_decay: list[str] = Field([], description='further parameters without decay, as patterns: "embed.*"')
    betas: list[Beta] = Field([0.9, 0.95], min_length=2, max_length=2, description="of adamw, also beside muon")
    state: Literal["fp32", "bf16", "int8"] = Field(
        "fp32", description="adamw: how its moments are stored; int8 has a scale for every 256 numbers"
    )
    gradients: Literal["fp32", "bf16"] = Field(
        "fp32", description="how gradients are summed over micro-batches and ranks; bf16 needs precision bf16 or fp8"
    )
    momentum: Beta = Field(0.9, description="of sgd and sgd-sai")
    muon_momentum: Beta = 0.95
    muon_nesterov: bool = True
    muon_scale: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw", description="factor on an update: max(1, rows/columns)^0.5 or 0.2 max(rows, columns)^0.5"
    )
    muon_extra_scale_factor: PositiveFloat = Field(1.0, description="a further factor on the updates of muon")
    muon_ns_steps: Annotated[int, Field(ge=1, lt=100)] = Field(5, description="Newton-Schulz iterations")
    muon_precision: Literal["bf16", "fp32"] = Field("bf16", description="of the Newton-Schulz iterations")
    eps: PositiveFloat = 1e-8
    clip: NonNegativeFloat = Field(1.0, description="largest gradient norm; 0 turns clipping off")
    offload: bool = Field(False, description="keep optimizer state in host memory and run the optimizer on the CPU")

    @model_validator(mode="after")
    def _keys_agree(self) -> OptimSection:
        if self.min_learning_rate > self.learning_rate:
            raise contradiction(
                "optim.min_learning_rate",
                f"{self.min_learning_rate} is above optim.learning_rate = {self.learning_rate}",
                "the learning rate decays from learning_rate to min_learning_rate",
            )
        if self.name == "muon" and self.offload:
            raise contradiction(
                "optim.offload",
                'optim.name is "muon", whose matrix products would run on the CPU',
                "shard the state over more ranks instead: parallel.zero",
            )
        if self.state != "fp32" and (self.name != "adamw" or self.offload):
            raise contradiction(
                "optim.state",
                f'"{self.state}" is for optim.name = "adamw" without optim.offload',
                'set optim.state = "fp32"',
            )
        for length in ("warmup", "decay"):
            units = (*UNITS, "share") if length == "warmup" else UNITS
            given = [f"optim.{length}_{unit}" for unit in units if getattr(self, f"{length}_{unit}")]
            if len(given) > 1:
                hint = f"{', '.join(units[:-1])} or {units[-1]}: choose one"
                raise contradiction(given[1], f"{given[0]} is also set", hint)
        return self
