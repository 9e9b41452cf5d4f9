"""What a model says of itself beyond weights and shape: special tokens, settings of generation, the class it goes by.

A source's `extra` may hold

    bos_token_id, eos_token_id, pad_token_id    an id, or several
    positions                                   how long a text the model is meant for
    generation_config                           Hugging Face's generation_config.json, as it was
    architecture                                the class of transformers', where several compute the same
    dropout                                     shares dropped in training, by Hugging Face's names

Hugging Face keeps this in config.json and generation_config.json, our own checkpoints in state.json. Megatron has no
place for it, so that a small file of ours lies beside its iterations, which Megatron does not look at:

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


def sound(table: object) -> dict[str, Any]:
    """What of a table that anybody may have written is as it should be."""
    found = table if isinstance(table, dict) else {}
    extra: dict[str, Any] = {key: found[key] for key in SPECIAL if _ids(found.get(key))}
    positions = found.get("positions")
    if type(positions) is int and 0 < positions <= 10**8:
        extra["positions"] = positions
    if isinstance(found.get("generation_config"), dict):
        extra["generation_config"] = found["generation_config"]
    if isinstance(found.get("architecture"), str):
        extra["architecture"] = found["architecture"]
    dropout = found.get("dropout")
    if isinstance(dropout, dict):
        extra["dropout"] = {
            key: dropout[key] for key in DROPOUT if isinstance(dropout.get(key), (int, float)) and 0 <= dropout[key] < 1
        }
    return extra


def keep(extra: dict[str, Any], folder: Path) -> None:
    """Write it beside Megatron's iterations, where there is something to keep."""
    if extra:
        files.write_json(folder / BESIDE_MEGATRON, {"extra": extra})


def kept(folder: Path) -> dict[str, Any]:
    """What was written beside Megatron's iterations, if it was."""
    path = folder / BESIDE_MEGATRON
    return sound(read_json_object(inside(path)).get("extra")) if path.is_file() else {}


def with_tokenizer(extra: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """The same, with the tokenizer's first and last ids where nothing else names them."""
    reported = {key: tokenizer.special_id(role) for key, role in ROLES.items()}
    return {**{key: number for key, number in reported.items() if number is not None}, **extra}


def of_another_vocabulary(extra: dict[str, Any]) -> dict[str, Any]:
    """The same without any ids, for a tokenizer that takes the place of the one they were meant for."""
    left = {key: value for key, value in extra.items() if key not in SPECIAL}
    if "generation_config" in left:
        left["generation_config"] = {key: each for key, each in left["generation_config"].items() if key not in SPECIAL}
    return left


def end_ids(extra: dict[str, Any]) -> list[int]:
    """The ids that end a text; transformers asks the settings of generation first."""
    named = (extra.get("generation_config") or {}).get("eos_token_id")
    if named is None:
        named = extra.get("eos_token_id")
    return [named] if isinstance(named, int) else [number for number in named or () if isinstance(number, int)]


def disagreement(extra: dict[str, Any], tokenizer: Tokenizer) -> str | None:
    """What is wrong if a model and its tokenizer end texts differently."""
    end, named = tokenizer.end_id, end_ids(extra)
    if end is None or end in named:
        return None
    own = f"{tokenizer.special('eos_token')} ({end})"
    if not named:
        return f"the configuration names no end token, so that transformers will not stop; the tokenizer's is {own}"
    return f"the configuration ends texts at {', '.join(map(str, named))}, and the tokenizer at {own}"


def _ids(value: object) -> bool:
    numbers = value if isinstance(value, list) and value else [value]
    return all(type(number) is int and number >= 0 for number in numbers)
