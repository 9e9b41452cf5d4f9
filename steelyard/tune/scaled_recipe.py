"""A recipe for a number of parameters and a token budget: `steelyard recipe scale`.

Published rules give every number; docs/recipe-scale.md lists them with their limits.

- Learning rate and batch follow the Step Law (Li et al. 2025, arXiv 2503.04715), which was fitted on 3,700 AdamW runs:
  1.79 N^-0.713 D^0.307, and 0.58 D^0.571 tokens, for N parameters without the vocabulary and D tokens.
- Muon takes AdamW's learning rate, because the size of its updates is matched to AdamW's (Liu et al. 2025,
  arXiv 2502.16982): `optim.muon_scale = "match_rms_adamw"`.
- Width over depth interpolates the models of GPT-3 (Brown et al. 2020): 64 at 125M, 128 at 6.7B. The loss depends
  little on it (Kaplan et al. 2020).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from steelyard.core import units
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.planning import search
from steelyard.planning.cluster import Cluster
from steelyard.sizes.gpu_catalogue import CATALOGUE, Gpu, by_name
from steelyard.sizes.memory import RESERVED
from steelyard.sizes.param_count import parameters
from steelyard.tune.first_recipe import Hardware, fit_to_memory, too_small

OPTIMIZERS = ("adamw", "muon")
TOLERANCE = 0.03  # of the number of parameters, within which the width over depth decides
FAR = 0.1  # the largest difference from the request
LAST_LEARNING_RATE = 1e-5  # as in the runs of the Step Law
MOST_LEARNING_RATE = 0.01  # a limit of our own, for models much smaller than those of the Step Law
FITTED = (59 * 10**6, 10**9)  # parameters without the vocabulary of the models that the Step Law was fitted on
WARM_UP_SHARE, MOST_WARM_UP = 0.02, 2000


@dataclass(frozen=True)
class ScaleRequest:
    """What `steelyard recipe scale` is asked for. `price_hour` is the price of one GPU."""

    parameters: int
    tokens_per_parameter: float
    vocab: int = 50257
    sequence_length: int | None = None
    gpu: str = "h200"
    gpus: int = 1
    price_hour: float | None = None


@dataclass(frozen=True)
class ScaledRun:
    """The settings for one optimizer, and its predicted time."""

    settings: dict[str, Any]
    step_seconds: float
    hours: float
    cost: float | None


def scaled(request: ScaleRequest, name: str) -> tuple[dict[str, ScaledRun], list[str]]:
    """A run for each optimizer, and the reasons for its numbers."""
    gpu = _gpu(request.gpu)
    model = choose_config(request.parameters, request.vocab)
    size = parameters(model)
    tokens = int(size.total * request.tokens_per_parameter)
    runs = {each: _run(request, name, model, tokens, gpu, each) for each in OPTIMIZERS}
    train, optim = runs["adamw"].settings["train"], runs["adamw"].settings["optim"]
    length = runs["adamw"].settings["data"]["sequence_length"]
    reasons = [
        f"model    llama, {model.layers} layers, width {model.hidden}, {model.heads} heads: {units.count(size.total)} "
        f"parameters, {units.count(size.all_layers)} of them in layers",
        f"tokens   {units.count(tokens)}, {request.tokens_per_parameter:g} per parameter",
        f"batch    {train['global_batch']} x {length} tokens; the Step Law says {units.count(batch_tokens(tokens))}",
        f"rate     {optim['learning_rate']:g} for AdamW (Step Law), the same for Muon (matched updates)"
        + ("" if FITTED[0] <= size.all_layers <= FITTED[1] else "; extrapolated"),
    ]
    for each, run in runs.items():
        cost = "" if run.cost is None else f", ${run.cost:,.2f}"
        reasons.append(
            f"{each:8} {train['steps']} steps of {1e3 * run.step_seconds:.1f} ms on {request.gpus} x {gpu.name}: "
            f"{units.duration(3600 * run.hours)}, {run.hours * request.gpus:.1f} GPU hours{cost}"
        )
    return runs, reasons


def choose_config(wanted: int, vocab: int) -> LlamaConfig:
    """The model within 3% of the number of parameters whose width over depth is nearest to that of GPT-3's models."""
    found = []
    for hidden in [*range(32, 256, 32), *range(256, 16385, 64)]:
        one, two = (parameters(_model(layers, hidden, vocab)).total for layers in (1, 2))
        layers = max(1, round(1 + (wanted - one) / (two - one)))
        far = abs(one + (layers - 1) * (two - one) - wanted) / wanted
        aspect = 64 * (wanted / 125e6) ** (math.log(2) / math.log(6.7e9 / 125e6))
        unlike = abs(math.log(hidden / layers / aspect))
        found.append((far > TOLERANCE, far if far > TOLERANCE else unlike, far, layers, hidden))
        if one > wanted:
            break
    *_, far, layers, hidden = min(found)
    if far > FAR:
        raise UserError(
            f"no model with a vocabulary of {vocab} has about {units.count(wanted)} parameters: the nearest is "
            f"{units.count(parameters(_model(layers, hidden, vocab)).total)}",
            where="--parameters",
            hint="choose another number, or a smaller --vocab",
        )
    return _model(layers, hidden, vocab)


def _model(layers: int, hidden: int, vocab: int) -> LlamaConfig:
    heads = hidden // (32 if hidden < 256 else 64 if hidden < 2048 or hidden % 128 else 128)
    return LlamaConfig(family="llama", layers=layers, hidden=hidden, heads=heads, vocab=vocab, tied=hidden < 2048)


def learning_rate(layer_parameters: int, tokens: int) -> float:
    """The Step Law's best learning rate of AdamW."""
    return min(MOST_LEARNING_RATE, 1.79 * math.pow(layer_parameters, -0.713) * math.pow(tokens, 0.307))


def batch_tokens(tokens: int) -> float:
    """The Step Law's best batch, in tokens."""
    return 0.58 * math.pow(tokens, 0.571)


def _run(request: ScaleRequest, name: str, model: LlamaConfig, tokens: int, gpu: Gpu, optimizer: str) -> ScaledRun:
    precision = "bf16" if gpu.bf16 is not None else "fp16"
    machine = Hardware(gpu.name, request.gpus, (gpu.memory or 0) - RESERVED, gpu.peak(precision) or 0.0, precision)
    recipe = fit_to_memory(_settings(request, name, model, tokens, optimizer, precision), machine)
    if recipe is None:
        raise too_small(machine)
    loaded: Recipe = load_recipe(dict(recipe))
    nodes = {"type": gpu.name, "count": 1, "gpu": gpu.name, "gpus": request.gpus}
    plan = search.given(loaded, Cluster.model_validate({"nodes": [nodes]})).plans[0]
    hours = recipe["train"]["steps"] * plan.seconds / 3600
    cost = None if request.price_hour is None else hours * request.gpus * request.price_hour
    return ScaledRun(recipe, plan.seconds, hours, cost)


def _settings(
    request: ScaleRequest, name: str, model: LlamaConfig, tokens: int, optimizer: str, precision: str
) -> dict[str, Any]:
    size = parameters(model)
    length = request.sequence_length or (1024 if size.total < 10**9 else 2048 if size.total < 10**10 else 4096)
    each = batch_tokens(tokens) / (length * request.gpus)
    batch = request.gpus * 2 ** max(0, round(math.log2(each)))
    steps = max(1, -(-tokens // (batch * length)))
    rate = float(f"{learning_rate(size.all_layers, tokens):.2e}")
    every = max(1, steps // 20)
    optim = {
        "name": optimizer,
        "learning_rate": rate,
        "min_learning_rate": min(LAST_LEARNING_RATE, rate),
        "warmup_steps": min(MOST_WARM_UP, int(WARM_UP_SHARE * steps)),
    }
    if optimizer == "muon":
        optim |= {"adamw_learning_rate": rate, "muon_scale": "match_rms_adamw"}
    return {
        "name": name,
        "model": model.model_dump(exclude_unset=True, exclude_none=True),
        "data": {"sequence_length": length},
        "train": {"steps": steps, "global_batch": batch, "precision": precision},
        "optim": optim,
        "eval": {"every": every},
        "checkpoint": {"every": every, "keep_last": 2},
    }


def _gpu(name: str) -> Gpu:
    gpu = by_name(name)
    if gpu is None or gpu.memory is None:
        known = ", ".join(each.name for each in CATALOGUE if each.memory is not None)
        raise UserError(f"the catalogue has no GPU {name}", where="--gpu", hint=f"use one of {known}")
    return gpu
