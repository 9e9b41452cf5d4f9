"""Muon beside AdamW: the time that it adds to a step, and the steps that it saves.

    python benchmarks/muon.py overhead                      # Llama 3.2 1B at 131,072 tokens a step, GPT-2 at 65,536
    python benchmarks/muon.py overhead --tiny               # a small model on the CPU, to test the script
    python benchmarks/muon.py loss gpt2-small data.train=corpus_text_document --steps 900 --seeds 1 2 3
    python benchmarks/muon.py loss --tiny

`overhead` builds and compiles a model once, and updates it by both optimizers in turn: the steps differ in nothing
else. `optimizer_milliseconds` is the update alone. `loss` trains with each optimizer at each of its learning rates, the
same number of rates for both, then Muon at its best rate with fewer steps. The learning rate decays over the horizon of
each run. It prints the validation loss at the end of each run, then the ratio of steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from train_speed import data

from steelyard import training
from steelyard.core.recipe import load_recipe
from steelyard.parallel import mesh
from steelyard.tokens.dataloader import columns
from steelyard.tokens.indexed_dataset import bin_path, token_dtype
from steelyard.tokens.merge import write_index
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension
from steelyard.training.optimizer import Optimizer

# Recipe, overrides, timed steps of each turn, and the bar: how much longer a step with Muon may take.
SHAPES = {
    "llama": ("llama3.2-1b", ["train.micro_batch=4", "train.global_batch=32"], 2, 0.05),
    "gpt2": ("gpt2-small", ["train.micro_batch=64", "train.global_batch=64"], 15, 0.08),
}
TINY = ("quickstart", ["train.micro_batch=2", "train.global_batch=2", "train.device=cpu"], 2, None)
TURNS = 2
RATES = {"adamw": [6e-4, 1.2e-3, 2.4e-3], "muon": [6e-4, 1.2e-3, 2.4e-3]}
SPEED_UPS = [1.25, 1.5]
TINY_MODEL = "model={family='llama', layers=2, hidden=64, heads=4, kv_heads=2, vocab=512}"
TINY_SETTINGS = ["data.sequence_length=64", "train.global_batch=16", "train.micro_batch=16", "train.device=cpu"]


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    overhead = kinds.add_parser("overhead")
    overhead.add_argument("--only", choices=SHAPES)
    overhead.add_argument("--tiny", action="store_true")
    loss = kinds.add_parser("loss")
    loss.add_argument("recipe", nargs="?", default="gpt2-small")
    loss.add_argument("overrides", nargs="*")
    loss.add_argument("--steps", type=int, default=900)
    loss.add_argument("--adamw-rates", type=float, nargs="+", default=RATES["adamw"])
    loss.add_argument("--muon-rates", type=float, nargs="+", default=RATES["muon"])
    loss.add_argument("--seeds", type=int, nargs="+", default=[1])
    loss.add_argument("--out", type=Path, help="folder for the runs; a finished run in it is not repeated")
    loss.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.kind == "loss":
        compare_losses(options)
        return
    chosen = {"tiny": TINY} if options.tiny else {name: SHAPES[name] for name in SHAPES if options.only in (None, name)}
    for name, shape in chosen.items():
        measure_overhead(name, *shape)


def measure_overhead(name: str, recipe_name: str, overrides: list[str], steps: int, bar: float | None) -> None:
    """Print the time of a step with both optimizers."""
    recipe = load_recipe(recipe_name, overrides)
    muon = load_recipe(recipe_name, [*overrides, "optim.name=muon"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = Engine(recipe, mesh.alone(), device, Extension(), None)
    engine.initialise()
    batches = data(recipe)
    labels = recipe.train.global_batch * recipe.data.sequence_length
    optimizers = {"adamw": engine.optimizer, "muon": Optimizer(engine.param_shards, muon.optim, False)}
    whole: dict[str, list[float]] = {kind: [] for kind in optimizers}
    alone: dict[str, list[float]] = {kind: [] for kind in optimizers}
    gradients = [torch.ones_like(part.parameter) for part in engine.param_shards]
    losses = []

    def step() -> None:
        loss, _, _ = engine.step(columns(next(batches)), 0, 1e-4, labels, 1.0)
        losses.append(loss)

    for kind, optimizer in optimizers.items():  # warm-up: compilation, kernels, state
        engine.optimizer = optimizer
        step()
        step()
        alone[kind] = milliseconds(lambda: update(engine, gradients), 5)
    del gradients[:]
    for _ in range(TURNS):
        for kind, optimizer in optimizers.items():
            engine.optimizer = optimizer
            whole[kind] += milliseconds(step, steps)
    times = {kind: statistics.median(values) for kind, values in whole.items()}
    line = {
        "what": name,
        "tokens_per_step": labels,
        "milliseconds": {kind: round(value, 2) for kind, value in times.items()},
        "all": {kind: [round(value, 2) for value in values] for kind, values in whole.items()},
        "optimizer_milliseconds": {kind: round(statistics.median(values), 2) for kind, values in alone.items()},
        "overhead": round(times["muon"] / times["adamw"] - 1, 4),
        "bar": bar,
        "is_finite": bool(torch.stack(losses).isfinite().all()),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else None,
    }
    print(json.dumps(line), flush=True)


def update(engine: Engine, gradients: list[torch.Tensor]) -> None:
    """One update of the engine's optimizer."""
    for part, gradient in zip(engine.param_shards, gradients, strict=True):
        part.parameter.grad = gradient
    one, zero = torch.ones((), device=engine.device), torch.zeros((), device=engine.device)
    engine.optimizer.step(0.0, one, zero, None)


def milliseconds(call: Callable[[], object], times: int) -> list[float]:
    """The time of each call; on a GPU between events, without waiting for the device after each."""
    if not torch.cuda.is_available():
        return [1000 * seconds for seconds in timeit.repeat(call, number=1, repeat=times)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


def compare_losses(options: argparse.Namespace) -> None:
    """Print the loss of each run, and how many steps Muon saves."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        settings = list(options.overrides)
        if options.tiny:
            write_chains(folder / "chains_text_document")
            settings = [TINY_MODEL, *TINY_SETTINGS, f"data.train={folder / 'chains_text_document'}", *settings]
            options.recipe, options.steps = "quickstart", 60
            settings += ["data.tokenizer=none"]
            options.adamw_rates, options.muon_rates = [3e-3, 6e-3], [6e-3, 1.2e-2]

        def final(kind: str, rate: float, steps: int, seed: int) -> float:
            return final_loss(options.recipe, settings, folder, kind, rate, steps, seed)

        first = options.seeds[0]
        best = {
            kind: min(rates, key=lambda rate, kind=kind: final(kind, rate, options.steps, first))
            for kind, rates in (("adamw", options.adamw_rates), ("muon", options.muon_rates))
        }
        target = statistics.mean(final("adamw", best["adamw"], options.steps, seed) for seed in options.seeds)
        reached = 0.0
        for ratio in (1.0, *SPEED_UPS):
            steps = round(options.steps / ratio)
            loss = statistics.mean(final("muon", best["muon"], steps, seed) for seed in options.seeds)
            reached = ratio if loss <= target else reached
            print(json.dumps({"muon_steps": steps, "ratio": ratio, "loss": loss, "adamw_loss": target}), flush=True)
        print(json.dumps({"best_rates": best, "steps_saved": reached, "seeds": len(options.seeds)}), flush=True)


def final_loss(recipe: str, settings: list[str], folder: Path, kind: str, rate: float, steps: int, seed: int) -> float:
    """The validation loss at the end of a run, which is trained unless it is in the folder."""
    path = folder / f"{kind}-{rate:g}-{steps}-{seed}"
    record = path.with_name(f"{path.name}.json")
    if not record.exists():
        run = training.run(
            load_recipe(recipe, [
                *settings, f"optim.name={kind}", f"optim.learning_rate={rate}", f"optim.min_learning_rate={rate / 10}",
                "optim.warmup_share=0.1", "optim.warmup_steps=0", f"train.steps={steps}", f"train.seed={seed}",
                f"eval.every={steps}", "checkpoint.every=0",
            ]),
            path,
        )  # fmt: skip
        loss = [each["valid_loss"] for each in run.metrics() if "valid_loss" in each][-1]
        line = {"optimizer": kind, "rate": rate, "steps": steps, "seed": seed, "valid_loss": loss}
        record.write_text(json.dumps(line))
        print(json.dumps(line), flush=True)
    loss = json.loads(record.read_text())["valid_loss"]
    return float(loss)


def write_chains(prefix: Path, vocab: int = 512) -> None:
    """Token files of a Markov chain with four likely successors of each token."""
    random = np.random.RandomState(0)
    successors = random.randint(0, vocab, (vocab, 4))
    documents = []
    for _ in range(400):
        ids = [random.randint(0, vocab)]
        for choice in random.randint(0, 4, 199):
            ids.append(successors[ids[-1], choice])
        documents.append(np.array(ids, dtype=token_dtype(vocab)))
    bin_path(prefix).write_bytes(b"".join(each.tobytes() for each in documents))
    lengths = np.full(len(documents), 200, dtype=np.int32)
    write_index(str(prefix), lambda: iter([lengths]), token_dtype(vocab))


if __name__ == "__main__":
    main()
