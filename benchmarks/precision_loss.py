r"""The loss of a run in smaller number formats, relative to the same run in bf16 with fp32 sums and state.

    python benchmarks/precision_loss.py gpt2-small data.train=corpus_text_document train.global_batch=64 \
        train.micro_batch=64 optim.warmup_steps=100 --steps 1000 --only fp8 fp8-row
    python benchmarks/precision_loss.py --tiny

Runs differ only in the settings of `VARIANTS`: same seed, same samples, same schedule. `valid_loss` is the loss on the
validation split at the end, `train_loss` the mean of the last tenth of the steps. A line per run, as JSON. Bars: fp8
within 0.3% of bf16 after 1,000 steps, small optimizer state and bf16 gradients within 0.5% after 500.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from muon import TINY_MODEL, TINY_SETTINGS, write_chains

from steelyard import training
from steelyard.core.recipe import load_recipe

FP8 = "train.precision=fp8"
BASELINE = ["train.precision=bf16"]
VARIANTS = {
    "fp8": [FP8],
    "fp8-row": [FP8, "train.fp8_scaling=row"],
    "bf16-state": [*BASELINE, "optim.state=bf16"],
    "int8-state": [*BASELINE, "optim.state=int8"],
    "bf16-gradients": [*BASELINE, "optim.gradients=bf16"],
    "int8-state-bf16-gradients": [*BASELINE, "optim.state=int8", "optim.gradients=bf16"],
}
ON_A_CPU = ["bf16-state", "int8-state", "bf16-gradients"]


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="gpt2-small")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=VARIANTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, help="folder for the runs; an unfinished run in it continues")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, without fp8, to test the script")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        settings, names = list(options.overrides), options.only or list(VARIANTS)
        if options.tiny:
            write_chains(folder / "chains_text_document")
            data = [f"data.train={folder / 'chains_text_document'}", "data.tokenizer=none"]
            settings = [TINY_MODEL, *TINY_SETTINGS, *data, *settings]
            options.recipe, options.steps = "quickstart", 60
            names = options.only or ON_A_CPU
        for seed in options.seeds:
            baseline = losses(options, settings, folder, "bf16", BASELINE, seed)
            for name in names:
                found = losses(options, settings, folder, name, VARIANTS[name], seed)
                relative = {key: round(found[key] / baseline[key] - 1, 5) for key in found}
                print(json.dumps({"what": name, "seed": seed, "relative_to_bf16": relative}), flush=True)


def losses(
    options: argparse.Namespace, settings: list[str], folder: Path, name: str, variant: list[str], seed: int
) -> dict[str, float]:
    """The losses at the end of a run, which is trained unless it is in the folder."""
    path = folder / f"{name}-{options.steps}-{seed}"
    record = path.with_name(f"{path.name}.json")
    if not record.exists():
        more = [f"train.steps={options.steps}", f"train.seed={seed}", f"eval.every={options.steps}", "log.every=1"]
        run = training.run(load_recipe(options.recipe, [*settings, *more, "checkpoint.every=0", *variant]), path)
        records = run.metrics()
        trained = [each["loss"] for each in records if "loss" in each]
        found = {
            "train_loss": statistics.mean(trained[-max(1, len(trained) // 10) :]),
            "valid_loss": [each["valid_loss"] for each in records if "valid_loss" in each][-1],
        }
        record.write_text(json.dumps(found))
        print(json.dumps({"what": name, "seed": seed, "steps": options.steps, **found}), flush=True)
    return {key: float(value) for key, value in json.loads(record.read_text()).items()}


if __name__ == "__main__":
    main()
