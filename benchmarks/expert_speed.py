"""Training speed of a mixture of experts on one GPU, compared with TorchTitan's model, in one run.

    python benchmarks/expert_speed.py --peer                 # Qwen3-30B-A3B's width with 4 layers, 4 x 4096 tokens
    python benchmarks/expert_speed.py --imbalance 4 --peer   # the busiest expert gets 4 times the mean
    python benchmarks/expert_speed.py --tiny                 # a small model on the CPU, to try the program

Full optimizer steps on random tokens, bf16, fp32 master weights, clipping, fused AdamW. TorchTitan 0.2.2's model is
compiled and sharded by its own functions (apply_compile, apply_fsdp), on a mesh of one GPU. Routing is free: no bias
and no loss forces a balance, except with --imbalance, where both models get a fixed bias per expert that gives the
stated load. Both start with TorchTitan's embedding of standard deviation 1: with a smaller one tokens look alike to the
router, and its load is high from the first step on. The learning rate is 0, so that the load of a run does not change.
The load in a line is that of the last step: largest over mean, of the worst layer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from train_speed import data, memory, profile, report, timed

from steelyard.core.recipe import Recipe, load_recipe
from steelyard.parallel import mesh
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

WIDE = ["model.layers=4", "data.sequence_length=4096", "train.micro_batch=4", "train.global_batch=4"]
TINY = [
    "model={family='qwen3-moe', layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, expert_ffn=32, "
    "experts=8, experts_per_token=2, vocab=512}",
    "data.sequence_length=64", "train.micro_batch=2", "train.global_batch=2", "train.device=cpu",
]  # fmt: skip
RATE = 0.0  # An untrained router that learns random tokens collapses within the measured steps.


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as parallel.recompute=selective")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peer", action="store_true", help="also time TorchTitan's model")
    parser.add_argument("--imbalance", type=float, help="the load of the busiest expert, relative to the mean")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    balance = ["model.router_bias_rate=1e-9"] if options.imbalance else []
    overrides = [*(TINY if options.tiny else WIDE), "model.aux_loss=0", "train.precision=bf16", *balance]
    recipe = load_recipe("qwen3-30b-a3b", [*overrides, *options.overrides])
    for name, run in (("steelyard", ours), *([("torchtitan", theirs)] if options.peer else [])):
        seconds, losses, load = run(recipe, options)
        report(f"{name}, load {load:.2f}", recipe, seconds, memory(), losses)


def ours(recipe: Recipe, options: argparse.Namespace) -> tuple[float, list[float], float]:
    """Median seconds of a step of the engine, its losses, and the load of the last step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine(recipe, mesh.alone(), device, Extension(), None)
    engine.initialise()
    embedding = next(part.tensor for part in engine.param_shards if part.name == "embed.weight")
    embedding.mul_(1 / recipe.model.init_std)
    batches = data(recipe)
    labels = recipe.train.global_batch * recipe.data.sequence_length
    losses = []

    def step(rate: float = RATE) -> None:
        loss, _, _ = engine.step(columns(next(batches)), 0, rate, labels, 1.0)
        losses.append(loss / labels)

    def load() -> float:
        return engine.balance.metrics()["expert_load"]

    if options.imbalance:
        biases = [experts.router.balance for experts in engine.balance.experts.values()]
        unbalance(biases, lambda: (step(0.0), load())[1], options.imbalance)
    seconds = timed(step, options.steps)
    if options.profile:
        profile(step)
    return seconds, [loss.item() for loss in losses], load()


def unbalance(biases: list[Any], load: Callable[[], float], wanted: float) -> None:
    """Search the bias that gives the wanted load, falling linearly over the experts."""

    def load_with(scale: float) -> float:
        for bias in biases:
            bias.data.copy_(scale * torch.linspace(1, 0, len(bias)))
        return load()

    if (natural := load_with(0.0)) > wanted:
        raise SystemExit(f"the load without a bias is {natural:.2f}, more than the wanted {wanted:g}")
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if load_with(middle) < wanted else (low, middle)


def theirs(recipe: Recipe, options: argparse.Namespace) -> tuple[float, list[float], float]:
    """The same with TorchTitan's model, its compilation and sharding, clip_grad_norm_ and fused AdamW."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.config.job_config import Compile
    from torchtitan.models.llama4.infra.parallelize import apply_compile, apply_fsdp
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config: Any = recipe.model
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    experts = MoEArgs(
        num_experts=config.experts, num_shared_experts=0, top_k=config.experts_per_token, score_func="softmax",
        route_norm=True, score_before_experts=False, load_balance_coeff=1e-3 if options.imbalance else None,
        use_grouped_mm=device == "cuda",
    )  # fmt: skip
    arguments = Qwen3ModelArgs(
        dim=config.hidden, n_layers=config.layers, n_heads=config.heads, n_kv_heads=config.kv_heads,
        vocab_size=config.padded_vocab, head_dim=config.head_dim, hidden_dim=config.ffn, qk_norm=True,
        norm_eps=config.norm_eps, rope_theta=config.rope_theta, max_seq_len=recipe.data.sequence_length,
        moe_enabled=True, moe_inter_dim=config.expert_ffn, moe_args=experts,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3Model(arguments)
    if device == "cuda":
        apply_compile(model, Compile(enable=True), ep_enabled=False)
    one = init_device_mesh(device, (1,), mesh_dim_names=("fsdp",))
    apply_fsdp(model, one, torch.bfloat16, torch.float32, pp_enabled=False)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_of = torch.compile(_summed_loss) if device == "cuda" else _summed_loss
    batches, losses = data(recipe), []
    layers = [layer.moe for layer in model.layers.values()]

    def step(is_update: bool = True) -> None:
        rows = torch.from_numpy(next(batches)).to(device)
        for layer in layers:
            layer.tokens_per_expert.zero_()
        loss = loss_of(model(rows[:, :-1]), rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if is_update:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    def load() -> float:
        return max((layer.tokens_per_expert.max() / layer.tokens_per_expert.mean()).item() for layer in layers)

    if options.imbalance:
        unbalance([layer.expert_bias for layer in layers], lambda: (step(False), load())[1], options.imbalance)
    seconds = timed(step, options.steps)
    if options.profile:
        profile(step)
    return seconds, [loss.item() for loss in losses], load()


def _summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


if __name__ == "__main__":
    main()
