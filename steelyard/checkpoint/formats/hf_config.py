"""Convert between Hugging Face's config.json and Steelyard's model config. Families have their own fields."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import ValidationError

from steelyard.checkpoint.formats.hf_metadata import DROPOUT, SPECIAL, validated
from steelyard.checkpoint.formats.source import first_problem
from steelyard.core.errors import UserError
from steelyard.core.recipe.families import FAMILIES, architectures, of_architecture
from steelyard.core.recipe.families.llama import MISTRAL
from steelyard.core.recipe.hf_fields import HfFields
from steelyard.core.recipe.hf_rotary import positions_of as rotary_positions
from steelyard.core.recipe.model_section import ModelConfig, RotaryConfig


def config_from_hf(hf: dict[str, Any], where: str) -> ModelConfig:
    """The model config of a config.json."""
    name = _architecture(hf)
    family = of_architecture(name)
    if family is None:
        raise UserError(
            f"the architecture {name or 'unnamed'} is not supported",
            where=where,
            hint=f"supported are {', '.join(architectures())}",
        )
    fields = HfFields(hf, where)
    try:
        config = family.from_hf(fields)
    except KeyError as error:
        raise UserError(f"the key {error} is missing", where=where) from None
    except (ValidationError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise UserError(f"it does not describe a valid model: {first_problem(error)}", where=where) from None
    fields.finish()
    return config


def _architecture(hf: dict[str, Any]) -> str | None:
    named = hf.get("architectures")
    if named and not isinstance(named, list):
        return None
    return next((name for each in FAMILIES.values() if (name := each.architecture_of(hf)) is not None), None)


def metadata_of(hf: dict[str, Any], generation: dict[str, Any] | None) -> dict[str, Any]:
    """The settings of a config.json that the model config does not have."""
    named = _architecture(hf)
    usual = dict.fromkeys(DROPOUT[:3], 0.1) if named == "GPT2LMHeadModel" else {}  # The default of transformers.
    return validated(
        {
            **hf,
            "positions": hf.get("max_position_embeddings"),
            "generation_config": generation,
            "architecture": named if named == MISTRAL else None,
            "dropout": {key: hf.get(key, usual.get(key)) for key in DROPOUT},
        }
    )


def config_to_hf(config: ModelConfig, dtype: torch.dtype, metadata: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model config. `metadata` has the rest: positions, special tokens, dropout, architecture."""
    special = {key: metadata[key] for key in SPECIAL if metadata.get(key) is not None}
    return config.to_hf(metadata) | {
        "torch_dtype": str(dtype).removeprefix("torch."),
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "use_cache": True,
        # Without these keys transformers would use default ids.
        **{key: special.get(key) for key in SPECIAL},
    }


def positions_of(config: ModelConfig, metadata: dict[str, Any]) -> int:
    """The maximum sequence length of the model."""
    if config.blocks.positions is not None:
        return config.blocks.positions
    assert isinstance(config, RotaryConfig)
    return rotary_positions(config, metadata)
