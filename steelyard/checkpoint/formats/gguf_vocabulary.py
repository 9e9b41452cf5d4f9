"""The tokenizer of a model as settings of a GGUF file.

llama.cpp has its own tokenizers, chosen by `tokenizer.ggml.model`:

    gpt2     byte-level BPE with merges; `tokenizer.ggml.pre` names the rule that splits text into words
    llama    SentencePiece BPE with scores
    t5       SentencePiece Unigram with scores and the compiled character map

A tokenizer that none of them runs is refused, because it would give other ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from steelyard.checkpoint.formats.gguf_tokenizer import SPLITS
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.text.tokenizer import Tokenizer, load_tokenizer
from steelyard.text.tokenizer.json_file import JsonTokenizer
from steelyard.text.tokenizer.sentencepiece_model import SentencePieceTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ADDED_SCORE, UNUSED_SCORE = -1000.0, -10000.0
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
HINT = "pass another tokenizer with --tokenizer, or convert to hf"


def settings_of(tokenizer: Tokenizer, vocab: int, metadata: dict[str, Any]) -> dict[str, Any]:
    """The settings after `tokenizer.`"""
    inner: Tokenizer = tokenizer
    if isinstance(tokenizer, JsonTokenizer) and not _is_byte_level(tokenizer):
        inner = _sentencepiece_beside(tokenizer)
    if isinstance(inner, SentencePieceTokenizer):
        settings = _of_sentencepiece(inner, tokenizer, vocab)
    else:
        assert isinstance(inner, JsonTokenizer)
        settings = _of_byte_bpe(inner, vocab)
    return {f"ggml.{key}": value for key, value in settings.items()} | _special(tokenizer, vocab, metadata)


def _is_byte_level(tokenizer: JsonTokenizer) -> bool:
    rules = json.loads(tokenizer.inner.to_str())
    return rules["model"]["type"] == "BPE" and "ByteLevel" in json.dumps(rules["pre_tokenizer"])


def _sentencepiece_beside(tokenizer: JsonTokenizer) -> SentencePieceTokenizer:
    models = (Path(tokenizer.source).with_name(name) for name in ("tokenizer.model", "spiece.model"))
    model = next((model for model in models if model.is_file()), None)
    inner = load_tokenizer(model) if model is not None else None
    if not isinstance(inner, SentencePieceTokenizer):
        raise UserError(
            "the tokenizer is not a byte-level BPE, and there is no SentencePiece model with its scores",
            where=tokenizer.source,
            hint="add tokenizer.model to the folder, or pass it with --tokenizer",
        )
    return inner


def _of_byte_bpe(tokenizer: JsonTokenizer, vocab: int) -> dict[str, Any]:
    rules = json.loads(tokenizer.inner.to_str())
    tokens, kinds = _tokens(tokenizer, vocab)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in rules["model"]["merges"]]
    return {
        "model": "gpt2", "pre": _split_rule(rules, tokenizer.source), "tokens": tokens, "token_type": kinds,
        "merges": merges,
    }  # fmt: skip


def _tokens(tokenizer: JsonTokenizer, vocab: int) -> tuple[list[str], list[int]]:
    tokens, kinds = [f"[PAD{number}]" for number in range(vocab)], [UNUSED] * vocab
    for token, number in tokenizer.inner.get_vocab(with_added_tokens=True).items():
        if number < vocab:
            tokens[number], kinds[number] = token, NORMAL
    for number, added in tokenizer.inner.get_added_tokens_decoder().items():
        if number < vocab:
            kinds[number] = CONTROL if added.special else USER_DEFINED
    return tokens, kinds


def _split_rule(rules: dict[str, Any], where: str) -> str:
    """The name that llama.cpp has for the pre-tokenizer."""
    before = rules["pre_tokenizer"]
    steps = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    kinds = [step["type"] for step in steps]
    last, normalizer = steps[-1], rules["normalizer"]
    if normalizer is not None and normalizer["type"] != "NFC":  # llama.cpp applies no NFC, also not for Qwen.
        raise UserError(f"the tokenizer's normalizer {normalizer['type']} is not in llama.cpp", where=where, hint=HINT)
    if last["type"] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and last.get("use_regex", True):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True):
            pattern = steps[0]["pattern"].get("Regex")
            name = next((name for name, known in SPLITS.items() if known == pattern), None)
            if name is not None and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
                return name
    raise UserError(
        f"llama.cpp has no name for the tokenizer's pre-tokenizer ({', '.join(kinds)})", where=where, hint=HINT
    )


def _of_sentencepiece(tokenizer: SentencePieceTokenizer, outer: Tokenizer, vocab: int) -> dict[str, Any]:
    inner = tokenizer.inner
    tokens, kinds = [f"[PAD{number}]" for number in range(vocab)], [UNUSED] * vocab
    scores = [UNUSED_SCORE] * vocab
    for number in range(min(vocab, inner.get_piece_size())):
        piece = inner.id_to_piece(number)
        tokens[number], scores[number] = piece, inner.get_score(number)
        tests = (
            (inner.is_unknown, UNKNOWN),
            (inner.is_control, CONTROL),
            (inner.is_unused, UNUSED),
            (inner.is_byte, BYTE),
        )
        kinds[number] = next((kind for test, kind in tests if test(number)), NORMAL)
        if piece in tokenizer.symbols:
            kinds[number] = USER_DEFINED
    if isinstance(outer, JsonTokenizer):
        for number, added in outer.inner.get_added_tokens_decoder().items():
            if number < vocab and kinds[number] in (NORMAL, UNUSED):
                tokens[number], scores[number] = added.content, ADDED_SCORE
                kinds[number] = CONTROL if added.special else USER_DEFINED
    character_map, prefix, single_spaces = tokenizer.normalizer
    settings = {
        "tokens": tokens, "scores": scores, "token_type": kinds, "pre": "default", "add_space_prefix": prefix,
    }  # fmt: skip
    if tokenizer.kind == "SentencePiece Unigram":
        if tokenizer.has_bytes:
            console.warn("llama.cpp's Unigram uses no byte pieces: characters outside the vocabulary become unknown")
        spaces = {"remove_extra_whitespaces": single_spaces}
        return {"model": "t5", **settings, **spaces, "precompiled_charsmap": character_map}
    if tokenizer.kind != "SentencePiece BPE":
        raise UserError("llama.cpp has no tokenizer of this kind", where=tokenizer.source, hint=HINT)
    if character_map or single_spaces:
        console.warn(
            f"{tokenizer.source} normalizes text, but llama.cpp's SentencePiece BPE does not: other ids are possible"
        )
    return {"model": "llama", **settings}


def _special(tokenizer: Tokenizer, vocab: int, metadata: dict[str, Any]) -> dict[str, Any]:
    ids: dict[str, int | None] = {role: tokenizer.special_id(name) for role, name in ROLES.items()}
    ids["unknown"] = ids["unknown"] if ids["unknown"] is not None else tokenizer.model_unknown_id()
    for role, key in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        given = metadata.get(key)
        numbers = given if isinstance(given, list) else [given]
        ids[role] = numbers[0] if numbers[0] is not None else ids[role]
        if role == "eos" and len(numbers) > 1:  # The end of a turn, at which generation stops too.
            ids["eot"] = numbers[1]
    found = {f"ggml.{role}_token_id": number for role, number in ids.items() if number is not None and number < vocab}
    first = tokenizer.framed("a")[:1]
    settings: dict[str, Any] = {**found, "ggml.add_bos_token": first == [ids["bos"]], "ggml.add_eos_token": False}
    template = tokenizer.chat_template()
    return settings | ({"chat_template": template} if template is not None else {})
