"""The tokenizer of a GGUF file: byte-level BPE with the pre-tokenizer that the file names."""

from __future__ import annotations

from typing import Any

from steelyard.core.errors import UserError
from steelyard.text.tokenizer.json_file import JsonTokenizer

CONTROL, USER_DEFINED = 3, 4
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "qwen2": QWEN2}


def from_settings(settings: dict[str, Any], where: str) -> JsonTokenizer:
    """The tokenizer that the settings of a file describe."""
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE

    kind = settings.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise UserError(
            f"its tokenizer model is {kind}, which is not supported", where=where, hint="pass another tokenizer"
        )
    tokens, kinds = settings["tokenizer.ggml.tokens"], settings.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ", 1)) for merge in settings.get("tokenizer.ggml.merges", [])]
    try:
        inner = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    except Exception as error:
        raise UserError(f"its vocabulary cannot be used: {error}", where=where) from None
    inner.pre_tokenizer = _splitting(str(settings.get("tokenizer.ggml.pre", "default")), where)
    inner.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, USER_DEFINED)]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return JsonTokenizer(inner, where, _config(settings, tokens))


def _splitting(name: str, where: str) -> Any:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    if name in ("default", "gpt-2"):
        return ByteLevel(add_prefix_space=False)
    if name in SPLITS:
        split = Split(Regex(SPLITS[name]), "isolated", invert=False)
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise UserError(f"its pre-tokenizer is {name}, which is not supported", where=where, hint="pass another tokenizer")


def _config(settings: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """The content of a tokenizer_config.json: special tokens and the chat template."""
    config: dict[str, Any] = {}
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for theirs, ours in names.items():
        number = settings.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(number, int) and 0 <= number < len(tokens):
            config[ours] = tokens[number]
    if isinstance(settings.get("tokenizer.chat_template"), str):
        config["chat_template"] = settings["tokenizer.chat_template"]
    return config
