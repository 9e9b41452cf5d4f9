"""`[model]`: the family, the sizes and the vocabulary that the flags describe."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.megatron.flag_table import REFUSED, VOCABULARIES
from steelyard.megatron.recipe_draft import Draft

Count = Callable[[str], int | None]
NEEDED = {"model.layers": "--num-layers", "model.hidden": "--hidden-size", "model.heads": "--num-attention-heads"}
PLACEHOLDER = {"gpt": 50257, "llama": 32000}
ROTARY = "--use-rotary-position-embeddings"


def model(draft: Draft, program: str) -> None:
    """Convert the flags of the model's family and sizes."""
    _refuse_other_kinds(draft, program)
    family = _family(draft)
    draft.put("model.family", family)
    for key, flag in NEEDED.items():
        value = draft.given.whole(flag, key)
        if value is None:
            known = [left for left in draft.given.left if left.flag == flag]
            what = f"{flag} is {known[0].value or 'empty'}, which is not set" if known else f"{flag} is not given"
            unset = " ".join(left.flag for left in draft.given.left if left.flag.startswith("$"))
            hint = "also give the script or sourced file that sets it, or pass the script's arguments: -- ARGS"
            hint = f"{unset} is not set; {hint}" if unset and not known else hint
            raise UserError(what, where=draft.given.where, hint=hint)
        if value < 1:
            raise UserError(f"{flag} is {value}, which is not a valid size", where=draft.given.where)
        draft.put(key, value)
    _widths(draft, family)
    _positions(draft, family)
    given = draft.given
    untied = given.switch("--untie-embeddings-and-output-weights", "model.tied")
    draft.put_or("model.tied", False if untied else None, True)
    draft.put_or("model.norm_eps", given.real("--layernorm-epsilon", "model.norm_eps"), 1e-5)
    _biases(draft, family)


def _refuse_other_kinds(draft: Draft, program: str) -> None:
    for flag, what in REFUSED.items():
        if draft.given.has(flag):
            raise UserError(
                f"{flag} selects {what}, which no family supports", where=draft.given.where, hint="families: gpt, llama"
            )
    if other := re.search(r"bert|t5|vision|vlm|mamba|retro|ict|multimodal", program.lower()):
        message = f"{program} trains a {other.group()} model, which no family supports"
        raise UserError(message, where=draft.given.where, hint="families: gpt, llama")


def _family(draft: Draft) -> str:
    """llama if the model has RoPE, RMSNorm and SwiGLU, gpt if it has none of them; any other combination raises."""
    given = draft.given
    kind = given.text("--position-embedding-type", "model.family")
    old = given.switch(ROTARY, "model.family")
    given.switch("--no-position-embedding", "model.family")
    norm = given.text("--normalization", "model.family") or "LayerNorm"
    if kind not in (None, "rope", "learned_absolute") or norm not in ("LayerNorm", "RMSNorm"):
        message = f"no family has {kind} positions with {norm}"
        raise UserError(message, where=given.where, hint="families: gpt, llama")
    signs = {
        "rotary positions": kind == "rope" or old,
        "--normalization RMSNorm": norm == "RMSNorm",
        "--swiglu": given.switch("--swiglu", "model.family"),
    }
    if len(set(signs.values())) == 1:
        return "llama" if all(signs.values()) else "gpt"
    there = " and ".join(sign for sign, here in signs.items() if here)
    missing = " and ".join(sign for sign, here in signs.items() if not here)
    raise UserError(
        f"the model has {there} but not {missing}, and no family has this combination",
        where=given.where,
        hint="llama has all three, gpt (learned positions, LayerNorm, GELU) none",
    )


def _widths(draft: Draft, family: str) -> None:
    given, hidden, heads = draft.given, draft.get("model.hidden"), draft.get("model.heads")
    swiglu = int(4 * hidden * 2 / 3 / 64) * 64
    draft.put_or(
        "model.ffn", given.whole("--ffn-hidden-size", "model.ffn"), swiglu if family == "llama" else 4 * hidden
    )
    head_dim = given.whole("--kv-channels", "model.head_dim")
    grouped = given.switch("--group-query-attention", "model.kv_heads")
    groups = given.whole("--num-query-groups", "model.kv_heads")
    if family == "llama":
        draft.put_or("model.kv_heads", groups or (1 if grouped else None), heads)
        if head_dim is not None:
            draft.put("model.head_dim", head_dim)
        return
    if (groups or (1 if grouped else heads)) != heads:
        raise UserError(
            "gpt has as many key-value heads as heads, but --group-query-attention sets fewer", where=given.where
        )
    if head_dim not in (None, hidden // heads):
        raise UserError(
            f"--kv-channels is {head_dim}, but a head of gpt is hidden / heads = {hidden // heads}", where=given.where
        )


def _positions(draft: Draft, family: str) -> None:
    given = draft.given
    length = given.whole("--seq-length", "data.sequence_length")
    table = given.whole("--max-position-embeddings", "model.positions" if family == "gpt" else "data.sequence_length")
    if length is None:
        length = table or 1024
        draft.ask(f"--seq-length is not given: is data.sequence_length = {length} correct?")
    draft.put("data.sequence_length", length)
    if family == "gpt":
        draft.put("model.positions", table or length)
        return
    draft.put_or("model.rope_theta", given.real("--rotary-base", "model.rope_theta"), 10000.0)
    if given.real("--rotary-percent", "model.rope_theta") not in (None, 1.0):
        raise UserError("--rotary-percent is below 1, but partial RoPE is not supported", where=given.where)
    factor = given.real("--rope-scaling-factor", "model.rope_scaling")
    if given.switch("--use-rope-scaling", "model.rope_scaling"):
        scaling = {"factor": factor or 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
        draft.put("model.rope_scaling", scaling)


def _biases(draft: Draft, family: str) -> None:
    given = draft.given
    if family == "gpt":
        given.leave("--disable-bias-linear", "this changes the model: gpt has biases in its linear layers")
        given.leave("--add-qkv-bias", "gpt always has these biases", matters=False)
        return
    if not given.switch("--disable-bias-linear", "model.family"):
        draft.ask("--disable-bias-linear is not given, so this model has biases that llama lacks: is that intended?")
    draft.put_or("model.qkv_bias", given.switch("--add-qkv-bias", "model.qkv_bias") or None, False)


def vocabulary(draft: Draft, count: Count) -> None:
    """`model.vocab`, its padding, and `data.tokenizer`; `count` counts the ids of a tokenizer on this machine."""
    given, family = draft.given, draft.get("model.family")
    kind = given.text("--tokenizer-type", "model.vocab")
    tokenizer = _tokenizer(draft)
    if tokenizer:
        draft.put("data.tokenizer", tokenizer)
    divisor = given.whole("--make-vocab-size-divisible-by", "model.vocab_multiple") or 128
    multiple = divisor * (draft.get("parallel.tensor") or 1)
    size, padded = (
        given.whole("--vocab-size", "model.vocab"),
        given.whole("--padded-vocab-size", "model.vocab_multiple"),
    )
    if size is not None and kind == "NullTokenizer":
        size += 1  # Its end token.
    counted = count(tokenizer) if tokenizer else None
    if size or counted:
        draft.put("model.vocab", size or counted, "" if size else f"counted in {tokenizer}")
    elif padded:
        draft.put("model.vocab", padded)
        draft.ask(
            f"only the padded vocabulary is known: set model.vocab to the tokenizer's number of ids, at most {padded}"
        )
    else:
        _guess(draft, kind or "", tokenizer, family)
    draft.put("model.vocab_multiple", padded or multiple, "" if padded else f"Megatron pads to {divisor} x tensor")


def _tokenizer(draft: Draft) -> str | None:
    given = draft.given
    model_file = given.text("--tokenizer-model", "data.tokenizer")
    vocab, merges = given.text("--vocab-file", "data.tokenizer"), given.text("--merge-file", "data.tokenizer")
    if model_file:
        return model_file
    return f"{vocab},{merges}" if vocab and merges else vocab


def _guess(draft: Draft, kind: str, tokenizer: str | None, family: str) -> None:
    pair = draft.given.has("--merge-file") or any(left.flag == "--merge-file" for left in draft.given.left)
    if kind == "GPT2BPETokenizer" or (not kind and pair):
        draft.put("model.vocab", 50257, "GPT-2's vocabulary")
        return
    name = f"{kind} {tokenizer or ''}".lower().replace("llama2tokenizer", "llama-2").replace("_", "-")
    size = next((size for pattern, size in VOCABULARIES.items() if re.search(pattern, name)), None)
    if size:
        draft.put("model.vocab", size, f"guessed from the name {Path(tokenizer or kind).name}")
        draft.ask(
            f"model.vocab = {size} is guessed from the name of the tokenizer, which is not on this machine: "
            "is it correct?"
        )
        return
    draft.put("model.vocab", PLACEHOLDER[family], "A PLACEHOLDER: the tokenizer's number of ids is not given")
    draft.ask(f"how many ids does the tokenizer have? model.vocab = {PLACEHOLDER[family]} is a placeholder")
