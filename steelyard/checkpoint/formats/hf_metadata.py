"""Metadata of a model besides weights and config: special tokens, generation settings, the class in transformers.

The `hf_metadata` of a source may have these keys:

    bos_token_id, eos_token_id, pad_token_id    an id, or several
    positions                                   the maximum sequence length of the model
    generation_config                           Hugging Face's generation_config.json, unchanged
    architecture                                the class in transformers, if several classes compute the same
    dropout                                     dropout probabilities of training, by Hugging Face's names

Hugging Face stores this in config.json and generation_config.json, Steelyard in state.json. Megatron has no field for
it, so Steelyard writes a small file next to the iterations, which Megatron ignores:

    steelyard.json    {"extra": {...}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.files import inside
from steelyard.core.safe_parse import read_json_object
from steelyard.text.tokenizer import Tokenizer

BESIDE_MEGATRON = "steelyard.json"
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout")
ROLES = {"bos_token_id": "bos_token", "eos_token_id": "eos_token"}


def validated(table: object) -> dict[str, Any]:
    """The valid entries of an untrusted table."""
    given = table if isinstance(table, dict) else {}
    metadata: dict[str, Any] = {key: given[key] for key in SPECIAL if _ids(given.get(key))}
    positions = given.get("positions")
    if type(positions) is int and 0 < positions <= 10**8:
        metadata["positions"] = positions
    if isinstance(given.get("generation_config"), dict):
        metadata["generation_config"] = given["generation_config"]
    if isinstance(given.get("architecture"), str):
        metadata["architecture"] = given["architecture"]
    dropout = given.get("dropout")
    if isinstance(dropout, dict):
        metadata["dropout"] = {
            key: dropout[key] for key in DROPOUT if isinstance(dropout.get(key), (int, float)) and 0 <= dropout[key] < 1
        }
    return metadata


def write(metadata: dict[str, Any], folder: Path) -> None:
    """Write `metadata` next to Megatron's iterations, unless it is empty."""
    if metadata:
        files.write_json(folder / BESIDE_MEGATRON, {"extra": metadata})


def read(folder: Path) -> dict[str, Any]:
    """The `metadata` next to Megatron's iterations, empty if there is no such file."""
    path = folder / BESIDE_MEGATRON
    return validated(read_json_object(inside(path)).get("extra")) if path.is_file() else {}


def with_tokenizer(metadata: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """`metadata` with the BOS and EOS ids of the tokenizer, if it has none."""
    ids = {key: tokenizer.special_id(role) for key, role in ROLES.items()}
    return {**{key: number for key, number in ids.items() if number is not None}, **metadata}


def of_another_vocabulary(metadata: dict[str, Any]) -> dict[str, Any]:
    """`metadata` without token ids, for use with another tokenizer."""
    without_ids = {key: value for key, value in metadata.items() if key not in SPECIAL}
    if "generation_config" in without_ids:
        without_ids["generation_config"] = {
            key: each for key, each in without_ids["generation_config"].items() if key not in SPECIAL
        }
    return without_ids


def end_ids(metadata: dict[str, Any]) -> list[int]:
    """The EOS ids; like transformers, from the generation settings first."""
    eos = (metadata.get("generation_config") or {}).get("eos_token_id")
    if eos is None:
        eos = metadata.get("eos_token_id")
    return [eos] if isinstance(eos, int) else [number for number in eos or () if isinstance(number, int)]


def disagreement(metadata: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    """A message if a model and its tokenizer have different EOS tokens."""
    end, eos = tokenizer.end_id, end_ids(metadata)
    if end is None or end in eos:
        return None
    own = f"{tokenizer.special('eos_token')} ({end})"
    if not eos:
        return f"the config has no EOS token, so generation in transformers will not stop; the tokenizer's is {own}"
    return f"the EOS token of the config is {', '.join(map(str, eos))}, but that of the tokenizer is {own}"


def _ids(value: object) -> bool:
    numbers = value if isinstance(value, list) and value else [value]
    return all(type(number) is int and number >= 0 for number in numbers)
