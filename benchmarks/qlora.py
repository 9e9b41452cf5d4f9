"""QLoRA on one GPU: memory and speed of an 8B model with random weights, and the loss of a small model.

    python benchmarks/qlora.py [--parts 8b loss] [--model PATH] [--tiny] [OVERRIDE ...]

`8b` trains adapters of Llama 3.1 8B at sequence 1024 with the base in nf4, int8 and bf16. Embedding
and head are bf16. Matrices are drawn and quantized one by one. `peak_gb` includes the construction of the model and the
compilation of its layers, `steps_gb` only later steps.
`loss` trains adapters of one base in all three precisions on the same rows, and compares the loss on held-out rows. The
base is SmolLM2 or another checkpoint given by `--model`; without one, a model of SmolLM2's size that first learns bytes
of this repository's code. Adapters learn its documentation. `--tiny` is a smoke test on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.checkpoint.formats.source import expected_sizes
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.finetuning.lora_extension import LoraExtension
from steelyard.parallel import mesh
from steelyard.sizes.memory import memory_of
from steelyard.tokens.dataloader import columns
from steelyard.training.engine import Engine
from steelyard.training.extension import Extension

ROOT = Path(__file__).parents[1]
BASES = {
    "nf4": ["finetune.base_precision=nf4"],
    "nf4 double": ["finetune.base_precision=nf4", "finetune.double_quant=true"],
    "int8": ["finetune.base_precision=int8"],
    "bf16": [],
}
TUNE = ["finetune.data=['none']", "finetune.adapter.rank=16", "optim.weight_decay=0.0", "optim.warmup_steps=0"]
TINY = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=192", "train.device=cpu"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def main() -> None:
    """Run the parts of the command line, and print a line for each base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "overrides", nargs="*", help="recipe overrides of the 8B model, such as finetune.adapter.rank=8"
    )
    parser.add_argument("--parts", nargs="+", default=["8b", "loss"], choices=["8b", "loss"])
    parser.add_argument("--bases", nargs="+", default=["nf4", "bf16", "int8", "nf4 double"], choices=BASES)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of the 8B model")
    parser.add_argument("--micro-batch", type=int, default=1, help="of the 8B model")
    parser.add_argument("--model", help="the checkpoint to tune, such as a folder of SmolLM2-135M")
    parser.add_argument("--pretrain", type=int, default=600, help="steps of the base that is trained here")
    parser.add_argument("--tune", type=int, default=200, help="steps of the adapters in the comparison of losses")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.steps, options.pretrain, options.tune = 2, 40, 20
    if "8b" in options.parts:
        compare_8b(options)
    if "loss" in options.parts:
        compare_losses(options)


def line(**fields: object) -> None:
    """Print a result."""
    print(json.dumps(fields), flush=True)


class RandomSource(CheckpointSource):
    """A checkpoint of random weights, drawn on the device when they are read."""

    format, path, dtype = "random", Path("random"), torch.bfloat16

    def __init__(self, recipe: Recipe) -> None:
        self.config, self.layout, self.hf_metadata, self.tokenizer_files = recipe.model, {}, {}, []
        self._sizes = expected_sizes(recipe.model)

    def names(self) -> list[str]:
        """Those of the model."""
        return list(self._sizes)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Those of the model."""
        return self._sizes

    def tensor(self, name: str) -> Tensor:
        """Normal with a standard deviation of 0.02; ones for norms."""
        values = torch.empty(self._sizes[name], dtype=self.dtype, device=DEVICE)
        if values.ndim == 1:
            return values.fill_(1.0)
        generator = torch.Generator(DEVICE).manual_seed(zlib.crc32(name.encode()))
        return values.normal_(0, 0.02, generator=generator)


class MemorySource(RandomSource):
    """A checkpoint of the weights of a model in this process."""

    def __init__(self, recipe: Recipe, engine: Engine) -> None:
        super().__init__(recipe)
        self._tensors = {part.name: part.tensor.to("cpu", torch.bfloat16) for part in engine.param_shards}

    def tensor(self, name: str) -> Tensor:
        """The weight as it was when this was made."""
        return self._tensors[name]


def engine_for(recipe: Recipe, source: CheckpointSource | None) -> Engine:
    """The engine of a recipe: adapters of the source's weights, or all weights from their initial values."""
    free(is_new=True)
    extension = Extension() if source is None else LoraExtension(recipe)
    engine = Engine(recipe, mesh.alone(), DEVICE, extension, None)
    engine.initialise()
    if source is not None:
        extension.load(source, engine, is_new=True)
        if extension.stored is None:
            extension._set_magnitudes(engine)
    free()
    return engine


def free(is_new: bool = False) -> None:
    """Release unused memory; for a new engine also what the last one compiled, so that the peak is its own."""
    gc.collect()
    if is_new:
        torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        if is_new:
            torch.cuda.reset_peak_memory_stats()


def gigabytes() -> float:
    """The peak of allocated memory, in 10^9 bytes."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 2) if DEVICE.type == "cuda" else 0.0


def compare_8b(options: argparse.Namespace) -> None:
    """Peak memory and median step of each base."""
    batch = options.micro_batch
    shape = ["data.sequence_length=1024", f"train.micro_batch={batch}", f"train.global_batch={batch}"]
    shape += ["train.precision=bf16"]
    if options.tiny:
        shape += [*TINY, "data.sequence_length=64", "model.vocab=512", "train.precision=fp32"]
    found: dict[str, float] = {}
    for name in options.bases:
        recipe = load_recipe("llama3.1-8b", [*shape, *TUNE, *BASES[name], *options.overrides])
        began = time.perf_counter()
        engine = engine_for(recipe, RandomSource(recipe))
        built, to_build = gigabytes(), time.perf_counter() - began
        rows = np.random.RandomState(0).randint(0, recipe.model.vocab, (8, batch, recipe.data.sequence_length + 1))
        found[name] = timed(engine, itertools.cycle(rows), options.steps)
        predicted = memory_of(recipe, 1)[0].total / 1e9
        whole = gigabytes()
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed(engine, itertools.cycle(rows), 1)
        line(part="8b", base=name, micro_batch=batch, peak_gb=whole, steps_gb=gigabytes(),
             predicted_gb=round(predicted, 2), build_peak_gb=built, build_seconds=round(to_build, 1),
             ms=round(1000 * found[name], 2),
             speed_of_bf16=round(found["bf16"] / found[name], 3) if "bf16" in found else None)  # fmt: skip
        del engine
    if "bf16" in found:
        line(part="8b", speed_of_bf16={name: round(found["bf16"] / each, 3) for name, each in found.items()})


def timed(engine: Engine, rows: Iterator[np.ndarray], steps: int) -> float:
    """The median seconds of a step after a warm-up."""
    labels, seconds = engine.recipe.train.global_batch * engine.recipe.data.sequence_length, []
    for number in range(steps + 5):
        began = time.perf_counter()
        engine.step(columns(next(rows)), 0, 1e-4, labels, 1.0)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        if number >= 5:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def compare_losses(options: argparse.Namespace) -> None:
    """The loss on held-out rows before and after tuning, for each base."""
    batch, length = (4, 64) if options.tiny else (4 if options.model else 16, 512)
    shape = [f"data.sequence_length={length}", f"train.micro_batch={batch}", f"train.global_batch={batch}"]
    shape += [*TINY, "train.precision=fp32"] if options.tiny else []
    code, prose = (b"\n".join(path.read_bytes() for path in sorted(ROOT.glob(pattern)))
                   for pattern in ("steelyard/**/*.py", "docs/**/*.md"))  # fmt: skip
    if options.model:
        source = open_source(options.model)
        encode = source.load_tokenizer().encode
        sizes = source.config.model_dump(exclude_none=True)
        shape += [f"model.{key}={str(value).lower()}" for key, value in sizes.items() if isinstance(value, int | float)]
        ids = np.asarray(encode(prose.decode()))
    else:
        shape.append("model.vocab=256")
        recipe = load_recipe("smollm2-135m", [*shape, "optim.warmup_steps=0"])
        engine = engine_for(recipe, None)
        loss = trained(engine, rows_of(np.frombuffer(code, np.uint8), batch, length), options.pretrain, 1e-3)
        line(part="loss", what="the base, trained here", steps=options.pretrain, loss=round(loss, 4))
        source, ids = MemorySource(recipe, engine), np.frombuffer(prose, np.uint8)
        del engine
    rows = rows_of(ids, batch, length)
    held, rows = rows[:8], rows[8:]
    found: dict[str, float] = {}
    for name in sorted(options.bases, key=lambda each: each != "bf16"):
        engine = engine_for(load_recipe("smollm2-135m", [*shape, *TUNE, *BASES[name]]), source)
        before = mean_loss(engine, held)
        trained(engine, rows, options.tune, 5e-4)
        found[name] = mean_loss(engine, held)
        line(part="loss", base=name, before=round(before, 4), after=round(found[name], 4),
             over_bf16=round(found[name] / found.get("bf16", found[name]) - 1, 5))  # fmt: skip
        del engine


def rows_of(ids: np.ndarray, batch: int, length: int) -> np.ndarray:
    """Batches of rows of consecutive tokens, in a fixed random order."""
    count = len(ids) // (length + 1)
    rows = ids[: count * (length + 1)].astype(np.int64).reshape(count, length + 1)
    rows = rows[np.random.RandomState(0).permutation(count)]
    return rows[: count // batch * batch].reshape(-1, batch, length + 1)


def trained(engine: Engine, rows: np.ndarray, steps: int, rate: float) -> float:
    """Train on the rows in turn, with a linear decay; returns the last step's loss."""
    labels = rows[0].shape[0] * (rows[0].shape[1] - 1)
    for number in range(steps):
        loss, _, _ = engine.step(columns(rows[number % len(rows)]), 0, rate * (1 - number / steps), labels, 1.0)
    return float(loss) / labels


def mean_loss(engine: Engine, rows: np.ndarray) -> float:
    """The loss per token without training."""
    total = sum(float(engine.evaluate(columns(each))) for each in rows)
    return total / (rows.shape[0] * rows.shape[1] * (rows.shape[2] - 1))


if __name__ == "__main__":
    main()
