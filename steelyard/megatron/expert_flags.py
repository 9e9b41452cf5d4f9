"""The flags of mixtures of experts: `[model]` and `parallel.expert`.

Steelyard counts the load of an expert, for its loss and its capacity, per sequence. Megatron does so per micro-batch,
unless the loss is `seq_aux_loss`. This is reported where it makes a difference.
"""

from __future__ import annotations

import fnmatch
import re

from steelyard.megatron.flag_table import EXPERTS_NOT_CARRIED, EXPERTS_NOT_NEEDED, OF_EXPERTS
from steelyard.megatron.recipe_draft import DEFAULT, Draft

SEQUENCE = "seq_aux_loss"
LOSSES = {SEQUENCE: "sequence", "aux_loss": "micro-batch", "global_aux_loss": "global batch"}
KIND, COEFFICIENT, FREQUENCY = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-layer-freq"
POLICY = "--moe-token-drop-policy"
TERM = re.compile(r"\[([01](?:,[01])*),?\](?:\*(\d{1,5}))?|(\d{1,5})\*\[([01](?:,[01])*),?\]")
UNKNOWN = "Steelyard has no such setting, or the converter does not know it"


def experts(draft: Draft) -> None:
    """Convert the flags of experts. Family, widths, `parallel.tensor` and the batch are already set."""
    if draft.get("model.experts") is None:
        return
    given = draft.given
    top_k = given.whole("--moe-router-topk", "model.experts_per_token")
    draft.put_or("model.experts_per_token", top_k, 2)
    width = given.whole("--moe-ffn-hidden-size", "model.expert_ffn")
    draft.put_or("model.expert_ffn", width, draft.get("model.ffn"))
    shared = given.whole("--moe-shared-expert-intermediate-size", "model.shared_ffn")
    draft.put_or("model.shared_ffn", shared, None)
    _dense_layers(draft)
    _router(draft, draft.get("model.experts_per_token"))
    _aux_loss(draft)
    draft.put_or("model.router_z_loss", given.real("--moe-z-loss-coeff", "model.router_z_loss"), None)
    _capacity(draft)
    draft.put_or("parallel.expert", given.whole("--expert-model-parallel-size", "parallel.expert"), 1)
    _tensor_size(draft)
    _leave_others(draft)


def _dense_layers(draft: Draft) -> None:
    """`--moe-layer-freq`: N for experts in layers 0, N, 2N, ..., or a list such as ([0]*1+[1]*31)."""
    text, layers = draft.given.text(FREQUENCY, "model.dense_layers"), draft.get("model.layers")
    if text is None:
        return
    pattern = layer_pattern(text, layers)
    if len(pattern) != layers:
        reason = f"{FREQUENCY} is {text:.100}, which is not a pattern of {layers} layers"
        draft.reject("model.dense_layers", text, reason)
    draft.put("model.dense_layers", [number for number, has_experts in enumerate(pattern) if not has_experts])


def layer_pattern(text: str, layers: int) -> list[int]:
    """Whether each layer has experts; empty if the text is not understood."""
    text = re.sub(r"[\s()]", "", text)
    if text.isdecimal() and len(text) < 6 and int(text) > 0:
        return [int(number % int(text) == 0) for number in range(layers)]
    pattern: list[int] = []
    for term in text.split("+"):
        match = TERM.fullmatch(term)
        if match is None:
            return []
        pattern += [int(word) for word in (match[1] or match[4]).split(",")] * int(match[2] or match[3] or 1)
    return pattern


def _router(draft: Draft, top_k: int) -> None:
    given = draft.given
    score = given.text("--moe-router-score-function", "model.router_score")
    draft.put_or("model.router_score", score, "softmax")
    before = given.switch("--moe-router-pre-softmax", "model.router_normalize")
    # A softmax of the chosen logits sums to 1; sigmoid scores are normalized if there are several.
    draft.put("model.router_normalize", top_k > 1 if score == "sigmoid" else not before, "" if before else DEFAULT)
    scale = given.real("--moe-router-topk-scaling-factor", "model.router_scale")
    draft.put_or("model.router_scale", scale, None)
    rate = given.real("--moe-router-bias-update-rate", "model.router_bias_rate")
    if given.switch("--moe-router-enable-expert-bias", "model.router_bias_rate"):
        draft.put_or("model.router_bias_rate", rate, 1e-3)


def _aux_loss(draft: Draft) -> None:
    given, key = draft.given, "model.aux_loss"
    weights = given.numbers(COEFFICIENT, key)
    kinds = given.texts(KIND, key) or ["aux_loss"]
    if "sinkhorn" in kinds:
        given.carried.pop(KIND)
        given.leave(KIND, "this changes the model: routing by Sinkhorn's algorithm is not supported")
    weight = 0.0 if kinds == ["none"] else sum(weights)
    draft.put(key, weight, "" if weights else DEFAULT)
    others = [LOSSES.get(kind, kind) for kind in kinds if kind != SEQUENCE]
    is_equal = others == ["micro-batch"] and draft.get("train.micro_batch") == 1
    if weight and others and not is_equal:
        reason = "model.aux_loss has the weight, but counts the load of each sequence"
        given.note(f"the load-balancing loss of each {' and '.join(others)}", reason)


def _capacity(draft: Draft) -> None:
    given, key = draft.given, "model.capacity"
    factor = given.real("--moe-expert-capacity-factor", key)
    if factor is None or factor < 0:  # Megatron drops no token then.
        given.leave(POLICY, "no effect: no token is dropped", matters=False)
        return
    draft.put(key, factor)
    if draft.get("train.micro_batch") != 1:
        given.note("the capacity of an expert in each micro-batch", "model.capacity counts the tokens of each sequence")
    policy = given.text(POLICY, key) or "probs"
    if policy != "position":
        given.carried.pop(POLICY, None)
        reason = "the last tokens of a sequence are dropped, not those with the smallest weights"
        if given.has(POLICY):
            given.leave(POLICY, reason)
        else:
            given.note(f"{POLICY} {policy}, {DEFAULT}", reason)


def _tensor_size(draft: Draft) -> None:
    given, flag, tensor = draft.given, "--expert-tensor-parallel-size", draft.get("parallel.tensor")
    size = given.whole(flag, "parallel.tensor")
    given.carried.pop(flag, None)
    if size in (None, tensor):
        given.leave(flag, "equal to parallel.tensor", matters=False)
    given.leave(flag, f"experts are sharded over parallel.tensor = {tensor}, like other layers")


def _leave_others(draft: Draft) -> None:
    """Give every other flag of experts a reason: without this, they count as flags without effect."""
    given = draft.given
    for name in [name for name in given.flags if any(fnmatch.fnmatchcase(name, pattern) for pattern in OF_EXPERTS)]:
        reasons = (
            reason
            for reason, patterns in EXPERTS_NOT_NEEDED.items()
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )
        if (reason := next(reasons, None)) is not None:
            given.leave(name, reason, matters=False)
        else:
            given.leave(name, EXPERTS_NOT_CARRIED.get(name, UNKNOWN))
