"""Convert between Megatron's args for mixtures of experts and the blocks and keys of experts.

Megatron normalizes the weights of the chosen experts by the order of its operations: a softmax of the chosen logits
sums to 1, one of all logits (`moe_router_pre_softmax`) does not. Sigmoid scores are normalized if a token has several
experts.
"""

from __future__ import annotations

from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe.blocks import ExpertsBlock, Routing

BIAS_RATE = 1e-3
REFUSED = {
    "moe_shared_expert_gate": "a gate of the shared expert", "moe_router_group_topk": "routing limited to groups",
    "moe_router_topk_limited_devices": "routing limited to devices", "moe_latent_size": "latent projections of experts",
    "moe_apply_probs_on_input": "router weights applied to the input of experts",
}  # fmt: skip


def has_experts(args: dict[str, Any], where: str) -> bool:
    """Whether the args describe a mixture of experts. Megatron-DeepSpeed has a list, [1] without experts."""
    count = args.get("num_experts")
    if isinstance(count, list | tuple):
        if any(each not in (0, 1) for each in count):
            raise UserError(f"experts of Megatron-DeepSpeed (num_experts = {count}) are not supported", where=where)
        return False
    return bool(count)


def refuse_to_read(args: dict[str, Any], where: str) -> None:
    """Raise for a mixture of experts that no family has, or whose experts have a tensor parallel size of their own."""
    for key, what in REFUSED.items():
        if args.get(key):
            raise UserError(f"{what} ({key} = {args[key]}) is not supported", where=where)
    if "sinkhorn" in _listed(args.get("moe_router_load_balancing_type")):
        raise UserError("sinkhorn routing (moe_router_load_balancing_type) is not supported", where=where)
    if args.get("add_bias_linear"):
        raise UserError("biases of experts (add_bias_linear) are not supported", where=where)


def keys_from_args(args: dict[str, Any]) -> dict[str, Any]:
    """The keys of a family with experts."""
    top_k = args.get("moe_router_topk") or 2
    score = args.get("moe_router_score_function") or "softmax"
    has_bias = bool(args.get("moe_router_enable_expert_bias"))
    return {
        "experts": args["num_experts"],
        "experts_per_token": top_k,
        "expert_ffn": args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size") or 4 * args["hidden_size"],
        "shared_ffn": args.get("moe_shared_expert_intermediate_size"),
        "dense_layers": dense_layers(args.get("moe_layer_freq") or 1, args["num_layers"]),
        "router_score": score,
        "router_normalize": normalizes(score, top_k, bool(args.get("moe_router_pre_softmax"))),
        "router_scale": args.get("moe_router_topk_scaling_factor") or 1.0,
        "router_bias_rate": (args.get("moe_router_bias_update_rate") or BIAS_RATE) if has_bias else None,
        "aux_loss": _aux_loss(args),
        "router_z_loss": args.get("moe_z_loss_coeff") or 0.0,
        "capacity": args.get("moe_expert_capacity_factor"),
    }


def normalizes(score: str, top_k: int, pre_softmax: bool) -> bool:
    """Whether Megatron scales the weights of the chosen experts to a sum of 1."""
    return top_k > 1 if score == "sigmoid" else not pre_softmax


def dense_layers(frequency: int | list[int], layers: int) -> list[int]:
    """The layers without experts: all but every n-th from 0 on, or those with a 0 in a list."""
    pattern = frequency if isinstance(frequency, list) else [int(n % frequency == 0) for n in range(layers)]
    return [n for n, has_experts in enumerate(pattern) if not has_experts]


def _aux_loss(args: dict[str, Any]) -> float:
    """The sum of the weights of all load-balancing losses."""
    kinds, weights = _listed(args.get("moe_router_load_balancing_type")), _listed(args.get("moe_aux_loss_coeff"))
    return 0.0 if kinds == ["none"] else float(sum(weights))


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def not_writable(routing: Routing) -> str | None:
    """What Megatron's router cannot compute; None if it computes this routing."""
    if routing.score == "softmax" and routing.bias_rate is not None:
        return "model.router_bias_rate with softmax scores"
    if routing.top_k == 1 and routing.normalizes:
        return "model.router_normalize with one expert per token"
    if routing.score == "sigmoid" and routing.top_k > 1 and not routing.normalizes:
        return "sigmoid scores without model.router_normalize"
    return None


def args_of_experts(block: ExpertsBlock, has_experts: list[bool], tensor: int, grouped: bool) -> dict[str, Any]:
    """The args to save for experts in some layers. Steelyard's load-balancing loss is that of each sequence."""
    routing = block.routing
    return {
        "num_experts": routing.experts, "moe_router_topk": routing.top_k,
        "moe_ffn_hidden_size": block.ffn, "moe_shared_expert_intermediate_size": block.shared_ffn,
        "moe_layer_freq": 1 if all(has_experts) else [int(each) for each in has_experts],
        "moe_router_score_function": routing.score,
        "moe_router_pre_softmax": routing.score == "softmax" and not routing.normalizes,
        "moe_router_topk_scaling_factor": None if routing.scale == 1 else routing.scale,
        "moe_router_enable_expert_bias": routing.bias_rate is not None,
        "moe_router_bias_update_rate": routing.bias_rate or BIAS_RATE,
        "moe_router_load_balancing_type": "seq_aux_loss" if routing.aux_loss else "none",
        "moe_aux_loss_coeff": routing.aux_loss, "moe_z_loss_coeff": routing.z_loss or None,
        "moe_expert_capacity_factor": routing.capacity, "moe_token_drop_policy": "position",
        "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": grouped, "moe_router_dtype": "fp32",
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": tensor,
    }  # fmt: skip
