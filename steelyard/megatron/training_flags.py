"""`[data]`, `[train]`, `[optim]`, `[checkpoint]`, `[eval]` and `[log]`."""

from __future__ import annotations

import re
from typing import Any

from steelyard.megatron import muon_flags
from steelyard.megatron.flag_table import CARRIED
from steelyard.megatron.recipe_draft import DEFAULT, Draft

SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
NUMBER = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][-+]?\d+)?")
DEFAULT_SPLIT = "969,30,1"
TEXT = (".json", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")


def plain(draft: Draft) -> None:
    """Convert every flag that is exactly one recipe key, with Megatron's default if it is not given."""
    for flag, (key, kind, default) in CARRIED.items():
        if key in ("model.layers", "model.hidden", "model.heads"):
            continue
        read: Any = {int: draft.given.whole, float: draft.given.real, str: draft.given.text}[kind]
        draft.put_or(key, read(flag, key), default)
    if draft.get("optim.learning_rate") is None:
        draft.ask("--lr is not given: set optim.learning_rate")


def data(draft: Draft) -> None:
    """The token files, their weights and the split."""
    given = draft.given
    for flag, key in (
        ("--data-path", "train"),
        ("--train-data-path", "train"),
        ("--valid-data-path", "valid"),
        ("--test-data-path", "test"),
    ):
        if sources := _sources(draft, given.texts(flag, f"data.{key}")):
            draft.put(f"data.{key}", sources)
            if text := next((source["prefix"] for source in sources if source["prefix"].endswith(TEXT)), None):
                draft.reject(f"data.{key}", sources, f"{text} is text: write token files with steelyard data tokenize")
    if draft.get("data.train") is None:
        draft.ask("no token files are given: set data.train")
    split = given.text("--split", "data.split")
    draft.put_or("data.split", split and split.replace(" ", ""), DEFAULT_SPLIT)
    for flag, key in (
        ("--reset-position-ids", "data.reset_positions"),
        ("--reset-attention-mask", "data.mask_documents"),
    ):
        if given.switch(flag, key):
            draft.put(key, True)


def _sources(draft: Draft, words: list[str]) -> list[dict[str, Any]]:
    """`weight prefix weight prefix ...`, or prefixes alone."""
    words = [word for text in words for word in text.split()]
    if len(words) > 1 and len(words) % 2 == 0 and all(NUMBER.fullmatch(word) for word in words[::2]):
        return [
            {"prefix": prefix, "weight": float(weight)} for weight, prefix in zip(words[::2], words[1::2], strict=True)
        ]
    if len(words) > 1:
        draft.ask("several token files without weights: here they have equal weights, in newer Megatron their sizes")
    return [{"prefix": word} for word in words]


def train(draft: Draft, config: dict[str, Any]) -> None:
    """The length of the run and the precision; `config` is DeepSpeed's."""
    given = draft.given
    _length(draft)
    minutes = given.real("--exit-duration-in-mins", "train.max_hours")
    if minutes:
        draft.put("train.max_hours", round(minutes / 60, 4))
    half, brain = given.switch("--fp16", "train.precision"), given.switch("--bf16", "train.precision")
    eight = given.text("--fp8-format", "train.precision") or given.switch("--fp8-hybrid", "train.precision")
    precision = "fp8" if eight else "bf16" if brain else "fp16" if half else None
    draft.put_or("train.precision", precision, "fp32")
    scale, window = (
        given.real("--initial-loss-scale", "train.loss_scale"),
        given.whole("--loss-scale-window", "train.loss_scale_window"),
    )
    if half and draft.given.has("--deepspeed"):  # DeepSpeed scales the loss, by its own settings and defaults.
        fp16 = config.get("fp16")
        settings = fp16 if isinstance(fp16, dict) else {}
        power, steps = settings.get("initial_scale_power", 16), settings.get("loss_scale_window", 1000)
        draft.put("train.loss_scale", 2.0 ** min(power, 64) if isinstance(power, int) else 65536.0, "of DeepSpeed")
        draft.put("train.loss_scale_window", steps if isinstance(steps, int) else 1000, "of DeepSpeed")
    elif half:
        draft.put_or("train.loss_scale", scale, float(2**32))
        draft.put_or("train.loss_scale_window", window, 1000)


def _length(draft: Draft) -> None:
    """Steps, samples or tokens: a recipe has one of them, Megatron-DeepSpeed stops at the earliest."""
    given = draft.given
    steps = given.whole("--train-iters", "train.steps")
    samples = given.whole("--train-samples", "train.samples")
    tokens = given.whole("--train-tokens", "train.tokens")
    ends: list[tuple[float, str, str, int]] = []
    per_sample, per_step = draft.get("data.sequence_length"), draft.get("train.global_batch")
    if steps:
        ends.append((steps * per_step * per_sample, "train.steps", "--train-iters", steps))
    if samples:
        ends.append((samples * per_sample, "train.samples", "--train-samples", samples))
    if tokens:
        ends.append((tokens, "train.tokens", "--train-tokens", tokens))
    if not ends:
        draft.ask("the length of the training is not given: set train.steps")
        return
    _, key, _, value = min(ends)
    draft.put(key, value)
    for _, _, flag, _ in sorted(ends)[1:]:
        given.carried.pop(flag, None)
        given.leave(flag, f"{key} is reached first", matters=False)


def optim(draft: Draft, sgd: str | None) -> None:
    """The optimizer and its learning-rate schedule."""
    given = draft.given
    name = given.text("--optimizer", "optim.name") or "adam"
    if name not in ("adam", "sgd", *muon_flags.NAMES):
        draft.reject("optim.name", name, f"optimizer {name} is not supported, only adamw, muon, sgd and sgd-sai")
        name = "adam"
    betas = [given.real("--adam-beta1", "optim.betas"), given.real("--adam-beta2", "optim.betas")]
    eps, momentum = given.real("--adam-eps", "optim.eps"), given.real("--sgd-momentum", "optim.momentum")
    if name != "sgd":
        draft.put("optim.name", "adamw", "" if given.has("--optimizer") else DEFAULT)
        whole = [0.9 if betas[0] is None else betas[0], 0.999 if betas[1] is None else betas[1]]
        draft.put("optim.betas", whole, "" if None not in betas else DEFAULT)
        draft.put_or("optim.eps", eps, 1e-8)
        if name in muon_flags.NAMES:
            muon_flags.muon(draft)
    else:
        _sgd(draft, sgd)
        draft.put_or("optim.momentum", momentum, 0.9)
        for flag in ("--adam-beta1", "--adam-beta2", "--adam-eps"):
            given.carried.pop(flag, None)
            given.leave(flag, "not used by this optimizer", matters=False)
    _schedule(draft)


def _sgd(draft: Draft, settled: str | None) -> None:
    draft.put("optim.name", settled or "sgd")
    if settled is None:
        draft.ask(
            "which SGD is meant? Megatron's sgd is SGD with momentum; in some patched versions it is "
            'SGD-SaI: then set optim.name = "sgd-sai", or give --sgd sgd-sai'
        )
    if (settled or "sgd") == "sgd" and draft.get("optim.weight_decay"):
        draft.ask("Megatron's sgd adds weight decay to the gradient, here it is decoupled: is that intended?")


def _schedule(draft: Draft) -> None:
    given = draft.given
    style = given.text("--lr-decay-style", "optim.schedule")
    if style is not None and style not in SCHEDULES:
        given.carried.pop("--lr-decay-style")
        given.leave("--lr-decay-style", "this schedule is not supported; optim.schedule is set to constant")
        style = "constant"
    draft.put_or("optim.schedule", style and SCHEDULES[style], "linear")
    decay_length: tuple[str, int] | None = None
    for unit, flag in (
        ("steps", "--lr-decay-iters"),
        ("samples", "--lr-decay-samples"),
        ("tokens", "--lr-decay-tokens"),
    ):
        value = given.whole(flag, f"optim.decay_{unit}")
        if value:
            decay_length = (unit, value)
    if decay_length:  # Megatron-DeepSpeed prefers tokens.
        draft.put(f"optim.decay_{decay_length[0]}", decay_length[1])
    _warmup(draft, decay_length)
    decay = given.whole("--lr-wsd-decay-iters", "optim.decay_fraction") or given.whole(
        "--lr-wsd-decay-samples", "optim.decay_fraction"
    )
    end = decay_length[1] if decay_length else draft.get("train.steps") or draft.get("train.samples")
    if decay and end and style == "WSD":
        draft.put("optim.decay_fraction", round(decay / end, 6))
        if given.text("--lr-wsd-decay-style", "optim.schedule") not in ("linear",):
            draft.ask("Megatron's WSD decays exponentially by default, here it decays linearly: is that intended?")


def _warmup(draft: Draft, decay_length: tuple[str, int] | None) -> None:
    """A fraction refers to the length of the schedule, which by default is that of the run."""
    given = draft.given
    fraction = given.real("--lr-warmup-fraction", "optim.warmup_steps")
    if fraction:
        lengths = [(unit, draft.get(f"train.{unit}")) for unit in ("steps", "samples", "tokens")]
        unit, end = decay_length or next(((unit, value) for unit, value in lengths if value), ("steps", 0))
        if end:
            given.carry("--lr-warmup-fraction", f"optim.warmup_{unit}")
            draft.put(f"optim.warmup_{unit}", round(fraction * end), f"{fraction} of {end}")
            return
        draft.ask(f"--lr-warmup-fraction {fraction} is of an unknown length: set optim.warmup_steps")
    for unit, flag in (
        ("steps", "--lr-warmup-iters"),
        ("samples", "--lr-warmup-samples"),
        ("tokens", "--lr-warmup-tokens"),
    ):
        value = given.whole(flag, f"optim.warmup_{unit}")
        if value:
            draft.put(f"optim.warmup_{unit}", value)
            return
    draft.put("optim.warmup_steps", 0, "" if given.has("--lr-warmup-iters") else DEFAULT)


def checkpoint(draft: Draft) -> None:
    """The initial weights and the run folder."""
    given = draft.given
    save, load = given.flags.get("--save"), given.flags.get("--load")
    finetune = given.switch("--finetune", "train.init_from")
    if load is not None and load == save and not finetune:
        given.leave("--load", "the same command resumes an unfinished run", matters=False)
    else:
        source = given.text("--pretrained-checkpoint", "train.init_from") or given.text("--load", "train.init_from")
        if source:
            draft.put("train.init_from", source)
            draft.ask(
                f"{source} is a Megatron checkpoint: the run starts from its weights"
                + ("" if finetune else ", not from its optimizer and step")
                + "; if it must be converted first, see steelyard checkpoint convert"
            )
    given.leave("--save", "the run folder is an option of the command: steelyard train RECIPE --run DIR")


def watching(draft: Draft) -> None:
    """Validation, TensorBoard and profiling."""
    given = draft.given
    batches = given.whole("--eval-iters", "eval.batches")
    if batches is not None and batches <= 0:
        draft.put("eval.every", 0)
        given.carried.pop("--eval-iters")
        given.leave("--eval-iters", "validation runs only at the first and the last step: eval.every = 0")
    else:
        draft.put_or("eval.batches", batches, 100)
    if draft.get("log.every") == 0:
        draft.put("log.every", 100, DEFAULT)
    if given.has("--tensorboard-dir"):
        draft.put("log.tensorboard", True)
        given.leave("--tensorboard-dir", "log.tensorboard = true; the files are in the run folder", matters=False)
    start, end = given.whole("--profile-step-start", "log.profile"), given.whole("--profile-step-end", "log.profile")
    if given.switch("--profile", "log.profile"):  # Megatron counts completed steps, the recipe step numbers.
        draft.put("log.profile", [(10 if start is None else start) + 1, 12 if end is None else end])
        ranks = given.numbers("--profile-ranks", "log.profile_ranks", int) or [0]  # Megatron's default.
        draft.put("log.profile_ranks", [int(rank) for rank in ranks])
        if given.switch("--use-pytorch-profiler", "log.profile_tool"):
            draft.put("log.profile_tool", "torch")
    for flag in ("--use-pytorch-profiler", "--profile-ranks"):
        given.leave(flag, "no effect without --profile", matters=False)
