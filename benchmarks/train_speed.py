"""Training speed on one GPU, compared with transformers, in one run.

    python benchmarks/train_speed.py llama --precision bf16 fp8 --peer
    python benchmarks/train_speed.py llama --precision bf16 fp8 --fp8-scaling tensor row
    python benchmarks/train_speed.py gpt2 --peer
    python benchmarks/train_speed.py llama-8b --precision bf16 fp8 --steps 4 --warmup 2   # 8B without offloading

Full optimizer steps on random tokens: forward, backward, clipping, fused AdamW. The median step counts. MFU is relative
to the GPU's dense bf16 peak, with 6 FLOPs per matmul parameter and token, plus half of full attention (causal).
`--floor` times only the matrix products and attention of the step, one after the other: a lower bound of its time. With
fp8 also a floor whose products of layers are in fp8, without casts. `--command` also trains as `steelyard train` does,
on token files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from steelyard import training
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.parallel import mesh
from steelyard.sizes.gpu_catalogue import by_device_name
from steelyard.sizes.least_recompute import with_least_recompute
from steelyard.sizes.param_count import flops_per_token
from steelyard.tokens.dataloader import columns
from steelyard.tokens.indexed_dataset import bin_path, token_dtype
from steelyard.tokens.merge import write_index
from steelyard.training import device as devices
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

SHAPES = {
    "llama": ("llama3.2-1b", ["train.micro_batch=4", "train.global_batch=4"]),
    "llama-8b": (
        "llama3.1-8b",
        ["train.micro_batch=1", "train.global_batch=8", "optim.state=int8", "parallel.recompute=auto"],
    ),
    "gpt2": ("gpt2-small", ["train.micro_batch=64", "train.global_batch=64"]),
    "smollm2": ("smollm2-135m", ["data.sequence_length=1024", "train.micro_batch=16", "train.global_batch=16"]),
    "tiny": ("quickstart", ["train.micro_batch=2", "train.global_batch=2", "train.device=cpu"]),
}


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as train.micro_batch=8")
    parser.add_argument("--precision", nargs="+", default=["bf16"])
    parser.add_argument("--fp8-scaling", nargs="+", default=["tensor"], help="fp8: tensor, row or both")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="steps that are not timed")
    parser.add_argument("--peer", action="store_true", help="also time transformers, compiled and under autocast")
    parser.add_argument("--floor", action="store_true", help="also time only the matrix products and attention")
    parser.add_argument("--command", action="store_true", help="also train through the whole command on token files")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    options = parser.parse_args()
    name, overrides = SHAPES[options.shape]
    for precision in options.precision:
        for scaling in options.fp8_scaling if precision == "fp8" else ["tensor"]:
            kind = [f"train.precision={precision}", f"train.fp8_scaling={scaling}"]
            recipe = load_recipe(name, [*overrides, *kind, *options.overrides])
            what = f"steelyard {precision}" + (" by row" if scaling == "row" else "")
            report(what, recipe, *ours(recipe, options.steps, options.profile, options.warmup))
            if options.command:
                report(f"{what}, whole command", recipe, *whole_command(recipe, options.steps, options.warmup))
    if options.floor:
        report("floor", recipe, floor(recipe, products), 0.0, [])
        if "fp8" in options.precision:
            report("floor fp8", recipe, floor(recipe, fp8_products), 0.0, [])
    if options.peer:
        report("transformers", recipe, *theirs(recipe, options.steps))


def report(what: str, recipe: Recipe, seconds: float, gibibytes: float, losses: list[float]) -> None:
    """Print a measurement as one line of JSON."""
    tokens = recipe.train.global_batch * recipe.data.sequence_length
    flops = flops_per_token(recipe.model, recipe.data.sequence_length) * tokens / seconds
    gpu = by_device_name(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    peak = gpu.peak("bf16") if gpu else None
    line = {
        "what": what,
        "tokens_per_second": round(tokens / seconds),
        "milliseconds": round(1000 * seconds, 2),
        "tflops": round(flops / 1e12, 1),
        "mfu": round(flops / peak, 4) if peak else None,
        "gib": round(gibibytes, 1),
        "losses": [round(loss, 4) for loss in losses[:: max(1, len(losses) // 5)]],
    }
    print(json.dumps(line), flush=True)


def ours(recipe: Recipe, steps: int, profiled: bool, warmup: int = 5) -> tuple[float, float, list[float]]:
    """Median seconds of a step of the engine, its memory, and its losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recipe = with_least_recompute(recipe, 1, devices.usable_memory(device))
    engine = Engine(recipe, mesh.alone(), device, Extension(), None)
    engine.initialise()
    batches = data(recipe)
    labels = recipe.train.global_batch * recipe.data.sequence_length
    losses = []

    def step() -> None:
        loss, _, _ = engine.step(columns(next(batches)), 0, 1e-4, labels, 1.0)
        losses.append(loss / labels)

    seconds = timed(step, steps, warmup)
    if profiled:
        profile(step)
    return seconds, memory(), [loss.item() for loss in losses]


def whole_command(recipe: Recipe, steps: int, warmup: int) -> tuple[float, float, list[float]]:
    """The same of a training run without checkpoints: the median of its records."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/random_text_document"
        length = recipe.train.global_batch * (recipe.data.sequence_length + 1)
        tokens = np.random.RandomState(0).randint(0, 1000, (steps + warmup) * length).astype(token_dtype(2**16))
        bin_path(prefix).write_bytes(tokens.tobytes())
        write_index(prefix, lambda: iter([np.array([len(tokens)], dtype=np.int32)]), tokens.dtype)
        settings = [
            f"data.train={prefix}", "data.split=100,0,0", "data.tokenizer=none", f"train.steps={steps + warmup}",
            "checkpoint.every=0", "eval.every=0", "optim.warmup_steps=0",
        ]  # fmt: skip
        run = training.run(load_recipe(recipe.settings(), settings), Path(folder) / "run")
        records = [each for each in run.metrics() if "loss" in each]
    seconds = statistics.median(each["seconds"] for each in records if each["step"] >= warmup + recipe.log.every)
    return seconds, memory(), [each["loss"] for each in records]


def theirs(recipe: Recipe, steps: int) -> tuple[float, float, list[float]]:
    """The same with transformers' model, torch.compile, autocast, clip_grad_norm_ and fused AdamW."""
    import transformers

    shape = recipe.model
    if shape.family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=shape.padded_vocab, hidden_size=shape.hidden, intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, rope_theta=shape.rope_theta, tie_word_embeddings=shape.tied, use_cache=False,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).cuda()
    else:
        config = transformers.GPT2Config(
            vocab_size=shape.padded_vocab, n_embd=shape.hidden, n_layer=shape.layers, n_head=shape.heads,
            n_positions=shape.positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = data(recipe)
    losses = []

    def step() -> None:
        rows = torch.from_numpy(next(batches)[:, :-1].copy()).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    return timed(step, steps), memory(), [loss.item() for loss in losses]


def floor(recipe: Recipe, layer_products: Callable[[int, int, int], float]) -> float:
    """Seconds of the step's matrix products and attention, timed separately and summed; head and attention in bf16."""
    shape, length = recipe.model, recipe.data.sequence_length
    rows = recipe.train.global_batch * length
    head_dim = shape.hidden // shape.heads
    key_value = getattr(shape, "kv_heads", shape.heads) * head_dim
    gated = 2 if shape.family == "llama" else 1
    widths = [(shape.hidden, shape.hidden + 2 * key_value), (shape.hidden, shape.hidden),
              (shape.hidden, gated * shape.ffn), (shape.ffn, shape.hidden)]  # fmt: skip
    total = shape.layers * sum(layer_products(rows, *width) for width in widths)
    total += products(rows, shape.hidden, shape.padded_vocab)
    sizes = [
        (recipe.train.global_batch, number, length, head_dim) for number in (shape.heads, *[key_value // head_dim] * 2)
    ]
    heads = [torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True) for size in sizes]

    def attend() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, is_causal=True, enable_gqa=heads[0].shape[1] != heads[1].shape[1]
        )
        out.backward(torch.ones_like(out))

    return total + shape.layers * timed(attend, 10)


def products(rows: int, inputs: int, outputs: int) -> float:
    """Seconds of the three products of a linear layer: forward, gradient of the input, gradient of the weight."""
    x, w, g = (torch.randn(*size, device="cuda", dtype=torch.bfloat16)
               for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))  # fmt: skip
    return timed(lambda: (x @ w.t(), g @ w, g.t() @ x), 10)


def fp8_products(rows: int, inputs: int, outputs: int) -> float:
    """The same in fp8, one scale per tensor, with operands in the order that the GPU needs."""

    def matrix(height: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(height, width, device="cuda").to(dtype)

    forward, backward, one = torch.float8_e4m3fn, torch.float8_e5m2, torch.ones((), device="cuda")
    pairs = [
        (matrix(rows, inputs, forward), matrix(outputs, inputs, forward), True),
        (matrix(rows, outputs, backward), matrix(inputs, outputs, forward), False),
        (matrix(outputs, rows, backward), matrix(inputs, rows, forward), False),
    ]

    def multiply() -> None:
        for a, b, fast in pairs:
            torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return timed(multiply, 10)


def data(recipe: Recipe) -> Iterator[np.ndarray]:
    """Batches of random tokens with repetitions, so that the loss can decrease."""
    random = np.random.RandomState(0)
    rows = [
        random.randint(0, min(recipe.model.vocab, 1000), (recipe.train.global_batch, recipe.data.sequence_length + 1))
        for _ in range(4)
    ]
    while True:
        yield from rows


def timed(step: Callable[[], object], steps: int, warmup: int = 5) -> float:
    """The median seconds of a call after a warm-up; on a GPU, device time, without synchronizing after each call."""
    for _ in range(warmup):
        step()
    if not torch.cuda.is_available():
        return statistics.median(timeit.repeat(step, number=1, repeat=steps))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(marks))


def profile(step: Callable[[], object]) -> None:
    """Print the kernels of one step by time."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    total = sum(event.device_time_total for event in events)
    print(f"kernels {total / 1000:.1f} ms")
    for event in events[:28]:
        print(f"{event.device_time_total / 1000:8.2f} ms {event.count:5d}x  {event.key[:110]}")


def memory() -> float:
    """Peak allocated GPU memory since the last call, in GiB."""
    if not torch.cuda.is_available():
        return 0.0
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return most


if __name__ == "__main__":
    main()
