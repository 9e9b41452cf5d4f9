"""`[model]`: the family, the sizes and the vocabulary that the flags describe."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.megatron.cli_args import canonical
from steelyard.megatron.flag_table import REFUSED, VOCABULARIES
from steelyard.megatron.recipe_draft import Draft
from steelyard.megatron.shell import symbolic

Count = Callable[[str], int | None]
NEEDED = {"model.layers": "--num-layers", "model.hidden": "--hidden-size", "model.heads": "--num-attention-heads"}
PLACEHOLDERS = {"gpt": 50257}
OTHER_PLACEHOLDER = 32000
FAMILIES = "families: gpt, llama, qwen3, mixtral, qwen3-moe"
ROTARY = "--use-rotary-position-embeddings"


def model(draft: Draft, program: str) -> None:
    """Convert the flags of the model's family and sizes."""
    _refuse_other_kinds(draft, program)
    family = _with_experts(draft, _with_norms(draft, _family(draft)))
    draft.put("model.family", family)
    for key, flag in NEEDED.items():
        value = draft.given.whole(flag, key)
        if value is None and key not in draft.unsound:
            draft.reject(key, None, _missing(draft, flag))
        elif value is not None and value < 1:
            draft.reject(key, value, f"{flag} is {value}, which is not a valid size")
        draft.put(key, max(1, value or 1))
    if all(key in draft.unsound for key in NEEDED):
        unset = " ".join(left.flag for left in draft.given.left if left.flag.startswith("$"))
        hint = "also give the script or sourced file that sets it, or pass the script's arguments: -- ARGS"
        hint = f"{unset} is not set; {hint}" if unset else hint
        raise UserError(draft.unsound["model.layers"][1], where=draft.given.where, hint=hint)
    _widths(draft, family)
    _positions(draft, family)
    given = draft.given
    untied = given.switch("--untie-embeddings-and-output-weights", "model.tied")
    draft.put_or("model.tied", False if untied else None, True)
    draft.put_or("model.norm_eps", given.real("--layernorm-epsilon", "model.norm_eps"), 1e-5)
    _biases(draft, family)
    _attention(draft)


def _missing(draft: Draft, flag: str) -> str:
    known = [left for left in draft.given.left if canonical(left.flag) == flag]
    return f"{flag} is {known[-1].value or 'empty'}, which is not set" if known else f"{flag} is not given"


def _refuse_other_kinds(draft: Draft, program: str) -> None:
    for flag, what in REFUSED.items():
        if draft.given.has(flag):
            raise UserError(f"{flag} selects {what}, which no family supports", where=draft.given.where, hint=FAMILIES)
    if other := re.search(r"bert|t5|vision|vlm|mamba|retro|ict|multimodal", program.lower()):
        message = f"{program} trains a {other.group()} model, which no family supports"
        raise UserError(message, where=draft.given.where, hint=FAMILIES)


def _family(draft: Draft) -> str:
    """llama if the model has RoPE, RMSNorm and SwiGLU, gpt if it has none of them; else the nearest, as unsound."""
    given = draft.given
    kind = given.text("--position-embedding-type", "model.family")
    old = given.switch(ROTARY, "model.family")
    given.switch("--no-position-embedding", "model.family")
    norm = (given.text("--normalization", "model.family") or "LayerNorm").lower()
    gated = (given.text("--glu-activation", "model.family") or "").lower()
    signs = {
        "rotary positions": kind in ("rope", "rotary") or old,
        "--normalization RMSNorm": norm == "rmsnorm" or given.switch("--use-rms-norm", "model.family"),
        "--swiglu": given.switch("--swiglu", "model.family") or gated == "swiglu",
    }
    nearest = "llama" if sum(signs.values()) > 1 else "gpt"
    if kind not in (None, "rope", "rotary", "learned_absolute", "absolute") or norm not in ("layernorm", "rmsnorm"):
        draft.reject("model.family", nearest, f"no family has {kind or 'these'} positions with {norm}")
    elif gated not in ("", "swiglu"):
        draft.reject("model.family", nearest, f"no family has {gated}")
    elif len(set(signs.values())) > 1:
        there = " and ".join(sign for sign, here in signs.items() if here)
        missing = " and ".join(sign for sign, here in signs.items() if not here)
        families = "llama has all three, gpt (learned positions, LayerNorm, GELU) none"
        draft.reject("model.family", nearest, f"the model has {there} but not {missing}: {families}")
    return nearest


def _with_norms(draft: Draft, family: str) -> str:
    """The family with norms of queries and keys, if the model has them."""
    if family == "gpt":
        draft.given.leave("--qk-layernorm", "this changes the model: gpt has no norms of queries and keys")
        return family
    return "qwen3" if draft.given.switch("--qk-layernorm", "model.family") else family


def _with_experts(draft: Draft, family: str) -> str:
    """The family with experts, if the model has them. Megatron-DeepSpeed counts the experts of each layer."""
    given = draft.given
    if not given.has("--num-experts"):
        return family
    written = symbolic.shown(" ".join(given.flags["--num-experts"]))
    experts = given.numbers("--num-experts", "model.experts", int)
    if len(set(experts)) > 1:
        message = f"--num-experts {written} selects other numbers of experts in other layers, which no family supports"
        raise UserError(message, where=given.where, hint=FAMILIES)
    if experts and experts[0] <= 1:
        given.carried.pop("--num-experts", None)
        given.leave("--num-experts", "one expert is a dense model", matters=False)
        return family
    with_experts = "qwen3-moe" if family == "qwen3" else "mixtral"
    if not experts and "model.experts" not in draft.unsound:
        draft.reject("model.experts", None, f"--num-experts is {written}, which is not known")
    if family == "gpt":
        reason = "gpt has no experts: mixtral has them, with rotary positions, RMSNorm and SwiGLU"
        draft.reject("model.family", with_experts, reason)
    draft.put("model.family", with_experts)
    draft.put("model.experts", experts[0] if experts else 1)
    return with_experts


def _widths(draft: Draft, family: str) -> None:
    given, hidden, heads = draft.given, draft.get("model.hidden"), draft.get("model.heads")
    width = 4 * hidden if family == "gpt" else int(4 * hidden * 2 / 3 / 64) * 64
    draft.put_or(
        "model.ffn",
        given.whole("--ffn-hidden-size", "model.ffn"),
        None if "model.hidden" in draft.unsound else width,
    )
    head_dim = given.whole("--kv-channels", "model.head_dim")
    grouped = given.switch("--group-query-attention", "model.kv_heads")
    groups = given.whole("--num-query-groups", "model.kv_heads")
    if family != "gpt":
        draft.put_or(
            "model.kv_heads", groups or (1 if grouped else None), None if "model.heads" in draft.unsound else heads
        )
        # The default of qwen3 is not that of Megatron.
        draft.put_or("model.head_dim", head_dim, hidden // heads if family.startswith("qwen3") else None)
        return
    if (groups or (1 if grouped else heads)) != heads:
        reason = "gpt has as many key-value heads as heads, but --group-query-attention sets fewer"
        draft.reject("model.family", family, reason)
    if head_dim not in (None, hidden // heads):
        reason = f"--kv-channels is {head_dim}, but a head of gpt is hidden / heads = {hidden // heads}"
        draft.reject("model.family", family, reason)


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
    draft.put_or("model.rope_share", given.real("--rotary-percent", "model.rope_share"), 1.0)
    factor = given.real("--rope-scaling-factor", "model.rope_scaling")
    if given.switch("--use-rope-scaling", "model.rope_scaling"):
        scaling = {"factor": factor or 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
        draft.put("model.rope_scaling", scaling)


def _biases(draft: Draft, family: str) -> None:
    given = draft.given
    if family == "gpt":
        given.leave("--disable-bias-linear", "this changes the model: gpt has biases in its linear layers")
        for flag in ("--add-qkv-bias", "--use-bias"):
            given.leave(flag, "gpt always has these biases", matters=False)
        return
    given.leave("--use-bias", f"this changes the model: {family} has no biases")
    if not given.switch("--disable-bias-linear", "model.family") and not given.has("--use-rms-norm"):
        reason = f"--disable-bias-linear is not given, so the model has biases, {family} none"
        draft.reject("model.family", family, reason)
    if family != "llama":
        given.leave(
            "--add-qkv-bias", f"this changes the model: {family} has no biases of queries, keys and values alone"
        )
        return
    draft.put_or("model.qkv_bias", given.switch("--add-qkv-bias", "model.qkv_bias") or None, False)


def _attention(draft: Draft) -> None:
    """Windows and interpolation, which change the model unless they have no effect on these sequences."""
    given, length = draft.given, draft.get("data.sequence_length")
    window = _window(draft)
    given.carried.pop("--window-size", None)
    if window and max(window) >= length:
        given.leave("--window-size", "no effect: the window is not shorter than the sequence", matters=False)
    elif len(window) == 2 and window[1] == 0 and draft.get("model.family") != "gpt":
        draft.put("model.window", window[0] + 1)  # Megatron counts the tokens before the token itself.
        given.carry("--window-size", "model.window")
    given.leave("--window-size", "this changes the model: set model.window, counted with the token itself")
    factor = given.real("--rotary-seq-len-interpolation-factor", "model.rope_theta")
    given.carried.pop("--rotary-seq-len-interpolation-factor", None)
    if factor == 1:
        given.leave("--rotary-seq-len-interpolation-factor", "1 has no effect", matters=False)
    given.leave("--rotary-seq-len-interpolation-factor", "this changes the model: no position interpolation")


def _window(draft: Draft) -> list[int]:
    """The values of --window-size, such as (4095,0): tokens before and after."""
    flags = draft.given.flags
    if "--window-size" in flags:
        flags["--window-size"] = [text.strip("()") for text in flags["--window-size"]]
    return [int(value) for value in draft.given.numbers("--window-size", "model.window", int)]


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
    if given.has("--extra-vocab-size") and not size:
        _extended(draft, tokenizer)
        return
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
    if sizes := _named(kind, tokenizer):
        draft.put("model.vocab", sizes[0], f"guessed from the name {Path(tokenizer or kind).name}")
        draft.ask(
            f"model.vocab = {sizes[0]} is guessed from the name of the tokenizer, which is not on this machine: "
            "is it correct?"
        )
        return
    _ask_size(draft, family)


def _named(*names: str | None) -> tuple[int, int] | None:
    """The sizes of the vocabulary that a tokenizer's type, name or path names."""
    for name in names:
        text = (name or "").lower().replace("_", "-")
        sizes = next((sizes for pattern, sizes in VOCABULARIES.items() if re.search(pattern, text)), None)
        if sizes:
            return sizes
    return None


def _extended(draft: Draft, tokenizer: str | None) -> None:
    """Pai-Megatron-Patch: the vocabulary without added tokens plus --extra-vocab-size, and no other padding."""
    given = draft.given
    extra = given.whole("--extra-vocab-size", "model.vocab") or 0
    source = draft.given.text("--patch-tokenizer-type", "model.vocab")
    loaded = [*given.flags.get("--load", []), *given.flags.get("--pretrained-checkpoint", [])]
    sizes = _named(tokenizer, source, *loaded)
    if sizes is None:
        _ask_size(draft, draft.get("model.family"))
        draft.questions[-1] += f"; --extra-vocab-size {extra} is to be added to it"
    else:
        draft.put("model.vocab", sizes[1] + extra, f"{sizes[1]} of {source or tokenizer}, --extra-vocab-size {extra}")
        draft.ask(f"model.vocab = {sizes[1] + extra} is guessed from the tokenizer's name: is it correct?")
    draft.put("model.vocab_multiple", 1, "--extra-vocab-size is the padding")


def _ask_size(draft: Draft, family: str) -> None:
    size = PLACEHOLDERS.get(family, OTHER_PLACEHOLDER)
    draft.put("model.vocab", size, "A PLACEHOLDER: the tokenizer's number of ids is not given")
    draft.ask(f"how many ids does the tokenizer have? model.vocab = {size} is a placeholder")
