"""Load a Megatron checkpoint into megatron-core's GPTModel on CPUs and save the logits it gives: one process per rank.

    python gpt_model.py CHECKPOINT RANK TENSOR PORT KIND OUT [qkv|gate]

The last word is a control: the weights are put in a wrong order first.
"""

import contextlib
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

TOKENS = torch.arange(2 * 20).view(2, 20) * 7 % 100


def main(folder: str, rank: str, tensor: str, port: str, out: str, control: str = "") -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=tensor)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo")
    iteration = Path(folder) / "iter_0000001"
    is_dist = (iteration / "common.pt").is_file()
    state = torch.load(
        iteration / ("common.pt" if is_dist else f"mp_rank_{int(rank):02d}/model_optim_rng.pt"), weights_only=False
    )
    model = build(state["args"], int(tensor), state["args"].padded_vocab_size)
    if is_dist:
        from megatron.core import dist_checkpointing

        weights = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(iteration))["model"]
    else:
        weights = state["model"]
    if control:
        weights = {name: disordered(name, weight, control) for name, weight in weights.items()}
    result = model.load_state_dict(weights, strict=False)
    assert not result.unexpected_keys, result
    assert all(name.endswith("_extra_state") for name in result.missing_keys), result
    model.eval()
    length = TOKENS.shape[1]
    mask = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        logits = model(TOKENS, torch.arange(length)[None].expand(2, -1), mask)
    if rank == "0":
        torch.save(logits, out)


def build(args, tensor: int, rows: int):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(tensor, 1)
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    config = TransformerConfig(
        num_layers=args.num_layers, hidden_size=args.hidden_size, num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels, ffn_hidden_size=args.ffn_hidden_size, normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon, gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else partial(F.gelu, approximate="tanh"),
        add_bias_linear=args.add_bias_linear, add_qkv_bias=args.add_qkv_bias, tensor_model_parallel_size=tensor,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, bias_activation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, qk_layernorm=getattr(args, "qk_layernorm", False), **experts_of(args),
    )  # fmt: skip
    spec = (
        get_gpt_decoder_block_spec(config, False, normalization=args.normalization)
        if config.num_moe_experts
        else get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=config.qk_layernorm)
    )
    rope = {}
    if args.position_embedding_type == "rope":
        rope = {
            "rotary_base": args.rotary_base, "rope_scaling": args.use_rope_scaling,
            "rope_scaling_factor": args.rope_scaling_factor,
        }  # fmt: skip
    return GPTModel(
        config, spec, vocab_size=rows,
        max_sequence_length=args.max_position_embeddings, position_embedding_type=args.position_embedding_type,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, parallel_output=False, **rope,
    )  # fmt: skip


def experts_of(args) -> dict:
    if not getattr(args, "num_experts", None):
        return {}
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # Defined only where Transformer Engine is installed, and read everywhere.
    names = (
        "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_layer_freq",
        "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_load_balancing_type",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype",
    )  # fmt: skip
    # The all-to-all dispatcher needs a CUDA stream.
    config = {"num_moe_experts": args.num_experts, "moe_token_dispatcher_type": "allgather"}
    return config | {name: getattr(args, name) for name in names}


def disordered(name: str, weight, control: str):
    if control == "gate" and name.endswith("linear_fc1.weight"):
        return torch.cat(weight.chunk(2)[::-1])
    if control == "qkv" and name.endswith("linear_qkv.weight"):
        by_head = weight.unflatten(0, (-1, 4, 8))  # two groups of two queries, key and value, eight wide
        return torch.cat([by_head[:, :2].flatten(0, 2), by_head[:, 2].flatten(0, 1), by_head[:, 3].flatten(0, 1)])
    return weight


if __name__ == "__main__":
    main(*sys.argv[1:])
