"""A first recipe for a user's text and machine: `steelyard init`.

The model gets the size that a token budget allows. A compute-optimal model sees about 20 tokens per parameter
(Hoffmann et al. 2022), and text may be repeated about four times before new tokens would be clearly better
(Muennighoff et al. 2023). So the number of parameters is at most 4 x tokens / 20, and at most what this machine trains
on 20 tokens per parameter in the given hours. The largest model of a ladder below both limits is taken, then the
largest micro-batch that fits into memory. Estimates: bytes per token by vocabulary, and 40% of the sustained peak.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.core import units
from steelyard.core.errors import RuntimeFailure
from steelyard.core.host import usable_cpus
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.recipe.load import load_recipe
from steelyard.core.recipe.model_section import ModelConfig
from steelyard.planning.cluster import CORE
from steelyard.sizes.gpu_catalogue import by_device_name
from steelyard.sizes.memory import RESERVED, memory_of
from steelyard.sizes.param_count import parameters
from steelyard.text.survey import Survey
from steelyard.tune.this_machine import visible_gpus

TOKENS_PER_PARAMETER, MOST_EPOCHS = 20, 4
UTILISATION = 0.4
UNKNOWN_GPU = 20e12  # FLOP/s, for a GPU that is not in the catalogue
LADDER = (
    (2, 64), (4, 128), (4, 192), (6, 256), (6, 384), (8, 512), (12, 768), (16, 1024), (24, 1536), (24, 2048),
    (32, 2560), (32, 4096),
)  # fmt: skip
# Bytes of text from which a vocabulary pays, its size, and the bytes of a token, measured roughly on English prose.
VOCABULARIES = (
    (0, 1024, 2.3), (4 * 10**6, 4096, 3.0), (4 * 10**7, 8192, 3.4), (4 * 10**8, 16384, 3.8), (4 * 10**9, 32768, 4.1),
)  # fmt: skip
# Parameters from which these hold: sequence length, learning rate.
BY_SIZE = ((0, 128, 3e-3), (10**6, 256, 3e-3), (10**7, 512, 1e-3), (10**8, 1024, 6e-4), (10**9, 2048, 3e-4))
FEWEST_STEPS, MOST_BATCH_TOKENS = 200, 1 << 19
MICRO_BATCHES = (32, 16, 8, 4, 2, 1)
# Tried in this order: each needs less memory and takes more time.
SAVINGS: tuple[dict[str, Any], ...] = (
    {},
    {"zero": 1},
    {"zero": 1, "recompute": "full"},
    {"zero": 3, "recompute": "full"},
)


@dataclass(frozen=True)
class Hardware:
    """The devices that train: their name, number, bytes for tensors, FLOP/s of all together, and best precision."""

    name: str
    devices: int
    usable: int
    flops: float
    precision: str

    def __str__(self) -> str:
        return self.name if self.devices == 1 else f"{self.devices} x {self.name}"


@dataclass(frozen=True)
class FirstRecipe:
    """The settings to write, what they were derived from, and the commands that follow."""

    settings: dict[str, Any]
    reasons: list[str]
    commands: list[str]


def this_machine() -> Hardware:
    """The GPUs of this machine, or its cores as one device."""
    gpus = visible_gpus()
    if not gpus:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(usable_cpus())
        flops = cores * (CORE.fp32 or 0.0) * 1e12 * UTILISATION
        return Hardware(f"{cores} CPU cores", 1, memory // 2, flops, "fp32")
    name, memory = min(gpus, key=lambda gpu: gpu[1])
    known = by_device_name(name)
    precision = "fp16" if known is not None and known.bf16 is None else "bf16"
    peak = UNKNOWN_GPU if known is None else (known.peak(precision) or UNKNOWN_GPU) * known.sustained
    return Hardware(name, len(gpus), memory - RESERVED, len(gpus) * peak * UTILISATION, precision)


def pretraining(found: Survey, machine: Hardware, recipe: Path, hours: float) -> FirstRecipe:
    """A recipe that trains a new tokenizer and model on the text."""
    folder = recipe.with_suffix("")
    _, vocab, bytes_per_token = _of_size(VOCABULARIES, found.bytes)
    text_tokens = max(1, int(found.bytes / bytes_per_token))
    compute = machine.flops * 3600 * hours
    by_text = MOST_EPOCHS * text_tokens / TOKENS_PER_PARAMETER
    by_compute = math.sqrt(compute / (6 * TOKENS_PER_PARAMETER))
    for model in _ladder(vocab, min(by_text, by_compute)):
        size = parameters(model).total
        _, length, rate = _of_size(BY_SIZE, size)
        tokens = int(min(MOST_EPOCHS * text_tokens, compute / (6 * size)))
        settings = _settings(recipe, machine, model, length, rate, tokens)
        settings["data"] |= {"tokenizer": f"{folder}/tokenizer", "train": f"{folder}/tokens_{found.key}_document"}
        fitting = fit_to_memory(settings, machine)
        if fitting is not None:
            break
    else:
        raise too_small(machine)
    trained = fitting["train"]["steps"] * fitting["train"]["global_batch"] * length
    reasons = [
        f"text     {units.size(found.bytes)} in {', '.join(found.inputs)}, about {units.count(text_tokens)} tokens",
        f"machine  {machine}",
        f"model    {units.count(size)} parameters; {units.count(trained)} tokens, {trained / text_tokens:.1f} epochs; "
        f"the text allows {units.count(by_text)} parameters, {hours:g} h here {units.count(by_compute)}",
    ]
    key = [] if found.key == "text" else ["--json-key", found.key]
    split = [] if found.mode == "line" else ["--document", found.mode]
    words = [
        ["tokenizer", "train", "--input", *found.inputs, "--model-prefix", f"{folder}/tokenizer", "--vocab-size",
         str(vocab), "--type", "byte-bpe", *key, *split],
        _tokenize(found, f"{folder}/tokenizer", f"{folder}/tokens"),
        ["train", str(recipe), *_nproc(machine)],
    ]  # fmt: skip
    return FirstRecipe(fitting, reasons, [_command(each) for each in words])


def finetuning(found: Survey, machine: Hardware, recipe: Path, base: str, context: int, config: Any) -> FirstRecipe:
    """A recipe that fine-tunes a model on conversations: all weights if they fit, otherwise LoRA."""
    settings = _settings(recipe, machine, config, min(context, 1024), 2e-5, 0)
    settings["train"] |= {"init_from": base}
    del settings["train"]["steps"], settings["data"]["split"]
    settings["optim"] |= {"weight_decay": 0.0}
    settings |= {"eval": {"every": 50}, "checkpoint": {"every": 200, "keep_best": True}, "log": {"every": 5}}
    settings["finetune"] = {"data": found.inputs}
    fitting = fit_to_memory(settings, machine)
    if fitting is None:
        frozen = 4 * parameters(config).total / machine.devices
        if frozen > machine.usable:
            raise too_small(machine)
        layout = {"recompute": "full"} | ({"zero": 3} if machine.devices > 1 else {})
        fitting = settings | {"parallel": layout}
        fitting["train"] |= {"micro_batch": 1}
        fitting["optim"] |= {"learning_rate": 2e-4, "min_learning_rate": 0.0}
        fitting["finetune"] |= {"adapter": {"kind": "lora"}}
    how = "LoRA: all weights do not fit" if "adapter" in fitting["finetune"] else "all weights"
    reasons = [f"machine  {machine}", f"trains   {how}"]
    words = [
        ["sft", "preview", str(recipe), "--samples", "2"],
        ["sft", str(recipe), *_nproc(machine)],
        ["generate", f"runs/{recipe.stem}/hf", "--chat", "--prompt", "Hello!"],
    ]
    return FirstRecipe(fitting, reasons, [_command(each) for each in words])


def pruning(found: Survey, machine: Hardware, recipe: Path, base: str, context: int, config: Any) -> FirstRecipe:
    """A recipe that trains a model with the zeros of one-shot 2:4 pruning, to recover its quality."""
    folder, length = recipe.with_suffix(""), min(context, 2048)
    tokens = int(found.bytes / 4)
    settings = _settings(recipe, machine, config, length, 2e-5, min(tokens, 10**8))
    settings["data"] |= {"tokenizer": f"{folder}/pruned", "train": f"{folder}/tokens_text_document"}
    settings["train"] |= {"init_from": f"{folder}/pruned"}
    settings["sparsity"] = {"method": "fixed"}
    fitting = fit_to_memory(settings, machine)
    if fitting is None:
        raise too_small(machine)
    windows = max(1, min(128, tokens // (2 * length)))
    words = [
        ["prune", base, f"{folder}/pruned", "--method", "sparsegpt", "--calibration", str(found.files[0]), "--samples",
         str(windows), "--sequence-length", str(length)],
        _tokenize(found, f"{folder}/pruned", f"{folder}/tokens"),
        ["train", str(recipe), *_nproc(machine)],
    ]  # fmt: skip
    size = units.count(parameters(config).total)
    reasons = [f"machine  {machine}", f"model    {size} parameters, half of them zero"]
    return FirstRecipe(fitting, reasons, [_command(each) for each in words])


def _settings(
    recipe: Path, machine: Hardware, model: ModelConfig, length: int, rate: float, tokens: int
) -> dict[str, Any]:
    """The sections of every recipe: a batch of a power of two per device, and at least some hundred steps of it."""
    wanted = min(MOST_BATCH_TOKENS, tokens // FEWEST_STEPS) // (length * machine.devices)
    batch = machine.devices * (1 << max(3, wanted.bit_length() - 1))
    steps = max(1, tokens // (batch * length))
    every = max(10, steps // 10)
    return {
        "name": recipe.stem,
        "model": model.model_dump(exclude_unset=True, exclude_none=True),
        "data": {"split": "95,5,0", "sequence_length": length},
        "train": {"steps": steps, "global_batch": batch, "precision": machine.precision},
        "optim": {"learning_rate": rate, "min_learning_rate": float(f"{rate / 10:.1e}"), "warmup_share": 0.03},
        "eval": {"every": every, "batches": max(1, min(10, 512 // batch))},
        "checkpoint": {"every": every, "keep_last": 2},
        "log": {"every": max(1, min(10, every // 5))},
    }


def fit_to_memory(settings: dict[str, Any], machine: Hardware) -> dict[str, Any] | None:
    """The settings with the largest micro-batch that fits into memory; None if none does."""
    for saving in SAVINGS:
        for micro in MICRO_BATCHES:
            if settings["train"]["global_batch"] % (micro * machine.devices):
                continue
            layout = {key: value for key, value in saving.items() if machine.devices > 1 or key != "zero"}
            changed = settings | {"train": settings["train"] | {"micro_batch": micro}}
            changed |= {"parallel": layout} if layout else {}
            checked: Recipe = load_recipe(dict(changed))
            if max(memory.total for memory in memory_of(checked, machine.devices)) <= machine.usable:
                return changed
    return None


def _ladder(vocab: int, most: float) -> Iterator[LlamaConfig]:
    """The models with at most so many parameters, the largest first; in any case the smallest model."""
    for number, (layers, hidden) in reversed(list(enumerate(LADDER))):
        heads = hidden // (32 if hidden < 256 else 64)
        kv_heads = heads // 4 if hidden >= 1024 else heads
        model = LlamaConfig(
            family="llama", layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab,
            tied=hidden < 2048,
        )  # fmt: skip
        if parameters(model).total <= most or number == 0:
            yield model


def _of_size(table: tuple[tuple[Any, ...], ...], size: int) -> tuple[Any, ...]:
    return next(row for row in reversed(table) if size >= row[0])


def _tokenize(found: Survey, tokenizer: str, prefix: str) -> list[str]:
    words = ["data", "tokenize", "--input", *found.inputs, "--tokenizer", tokenizer, "--output-prefix", prefix]
    words += ["--append-eod"] + ([] if found.key == "text" else ["--json-keys", found.key])
    return words + ([] if found.mode == "line" else ["--document", found.mode])


def _nproc(machine: Hardware) -> list[str]:
    return ["--nproc", str(machine.devices)] if machine.devices > 1 else []


def _command(words: list[str]) -> str:
    return shlex.join(["steelyard", *words])


def too_small(machine: Hardware) -> RuntimeFailure:
    """The error for a model that fits with no layout."""
    return RuntimeFailure(
        f"no layout on {machine} holds this model for training",
        hint="describe a larger cluster, and let steelyard plan find a layout",
    )
