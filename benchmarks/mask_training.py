"""Speed of mask learning compared with training the weights of the same model, on one GPU in one run.

    python benchmarks/mask_training.py              # the config of Llama 3.2 1B at sequence 4096
    python benchmarks/mask_training.py --shape smollm2 --distill train.cuda_graph=true   # SmolLM2-135M, 16 x 1024
    python benchmarks/mask_training.py --tiny       # on a CPU, as a smoke test

Full optimizer steps on random tokens, timed as in `train_speed.py`, with the same batches for both. The target is 0.8
of the dense tokens per second. `--breaks` lists graph breaks of torch.compile, which cost speed.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from train_speed import SHAPES, data, memory, profile, timed

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from steelyard.core.recipe import Recipe, load_recipe
from steelyard.parallel import mesh
from steelyard.sparsity import sparsity_extension
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WANTED = 0.8


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="recipe overrides, such as train.micro_batch=8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--distill", action="store_true", help="also learn masks with distillation")
    parser.add_argument("--tiny", action="store_true", help="a model that is small enough for a CPU")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--breaks", action="store_true", help="log graph breaks and recompilations")
    options = parser.parse_args()
    if DEVICE.type != "cuda" and not options.tiny:
        parser.error("there is no GPU; --tiny runs on a CPU, without meaningful speeds")
    name, overrides = SHAPES["tiny" if options.tiny else options.shape]
    learning = ['sparsity.method="learned"', 'sparsity.base="random"']
    recipes = {
        "dense": load_recipe(name, [*overrides, *options.overrides]),
        "masks": load_recipe(name, [*overrides, *learning, *options.overrides]),
    }
    if options.distill:
        distilled = [*overrides, *learning, "sparsity.distill=1.0", *options.overrides]
        recipes["distilled masks"] = load_recipe(name, distilled)
    if options.breaks:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
    speeds = {}
    for what, recipe in recipes.items():
        seconds, gibibytes, losses = measured(recipe, options.steps, options.profile)
        speeds[what] = recipe.train.global_batch * recipe.data.sequence_length / seconds
        line = {
            "what": what,
            "tokens_per_second": round(speeds[what]),
            "milliseconds": round(1000 * seconds, 2),
            "gib": round(gibibytes, 1),
            "losses": [round(loss, 4) for loss in losses[:: max(1, len(losses) // 5)]],
        }
        print(json.dumps(line), flush=True)
    share = speeds["masks"] / speeds["dense"]
    print(json.dumps({"what": "masks beside dense", "share": round(share, 3), "wanted": WANTED}), flush=True)


def measured(recipe: Recipe, steps: int, profiled: bool) -> tuple[float, float, list[float]]:
    """Median seconds of a step, its peak memory in GiB, and the losses."""
    extension = sparsity_extension.extension(recipe) or Extension()
    engine = Engine(recipe, mesh.alone(), DEVICE, extension, None)
    engine.initialise()
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    with torch.no_grad():  # Frozen weights usually come from a base; random ones are as fast.
        for part in engine.param_shards:
            if not part.parameter.requires_grad:
                part.tensor.normal_(std=0.02, generator=generator) if part.tensor.ndim > 1 else part.tensor.fill_(1.0)
    batches, batch = data(recipe), recipe.train.global_batch
    labels = batch * recipe.data.sequence_length
    losses: list[torch.Tensor] = []

    def step() -> None:
        extension.begin_step(len(losses) + 1, batch, 1.0)
        loss, _, _ = engine.step(columns(next(batches)), len(losses) * batch, 1e-4, labels, 1.0)
        losses.append(loss / labels)

    seconds = timed(step, steps)
    if profiled:
        profile(step)
    return seconds, memory(), [loss.item() for loss in losses]


if __name__ == "__main__":
    main()
