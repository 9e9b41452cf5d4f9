"""`steelyard sft`: a recipe made whole, its conversations as rows, the one training loop, and a folder at the end."""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from steelyard import checkpoint, training
from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.checkpoint.formats.hf_metadata import end_ids
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core import files, units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.finetune_section import FinetuneSection
from steelyard.core.recipe.sparsity_section import SparsitySection
from steelyard.core.run import Run
from steelyard.finetuning import dpo, templates
from steelyard.finetuning.dpo import PairSamples, Preferring
from steelyard.finetuning.encoding import Encoded, EncodeStats
from steelyard.finetuning.lora_extension import Adapting
from steelyard.finetuning.neftune import add_noise
from steelyard.finetuning.packed_samples import PackedSamples
from steelyard.finetuning.peft_format import of_run
from steelyard.finetuning.sft_dataset import open_corpus, open_pairs
from steelyard.finetuning.templates import Template
from steelyard.parallel.world import World, detect
from steelyard.sparsity import sparsity_extension as sparsity
from steelyard.sparsity.pruned_source import opened as opened_under_masks
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer
from steelyard.text.tokenizer.tokenizer import read_config
from steelyard.tokens.samples import Samples
from steelyard.training.extension import Extension

MARK = re.compile(r"<\|[\w-]+\|>")
PRUNED = 0.4  # Share of zeros from which on a matrix was pruned.
Rows = PackedSamples | PairSamples


@dataclass(frozen=True)
class Tuning:
    """All that is known before the first step."""

    recipe: Recipe
    tokenizer: Tokenizer
    template: Template
    tally: EncodeStats
    training: Rows
    validation: Rows | None

    def open_data(self, recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
        """The rows, for the loop."""
        return self.training, self.validation

    def described(self) -> str:
        """The data in a line or two."""
        if isinstance(self.training, PairSamples):
            line = f"{units.count(len(self.training.pairs))} pairs of answers"
        else:
            talks = self.training.conversations
            learned, total = sum(int(each.learned[1:].sum()) for each in talks), sum(each.places for each in talks)
            line = (
                f"{units.count(len(talks))} conversations in {units.count(self.training.per_epoch)} rows, "
                f"{self.training.efficiency:.1%} full; "
                f"{units.count(learned)} of {units.count(total)} tokens are learned"
            )
        return "\n".join([line, *self.tally.lines()])


def prepare(recipe: Recipe, ranks: int | None = None) -> Tuning:
    """Read the conversations, and say in the recipe what follows from them: steps, and batches of validation.

    `ranks` is how many will share the work; left out, as many as were started.
    """
    tune = recipe.finetune
    if tune is None:
        raise UserError(f"the recipe {recipe.name} has no [finetune]", hint="say there what to learn from")
    if recipe.train.init_from is None:
        raise UserError("there is no model to tune", hint="name one in train.init_from")
    recipe = keeping_zeros(recipe, tune)
    tokenizer = tokenizer_of(recipe)
    template = templates.load(tune.template, tokenizer)
    _warn_of_split_marks(template, tokenizer)
    length, batch = recipe.data.sequence_length, recipe.train.global_batch
    opened: Callable[..., tuple[list[Any], EncodeStats]] = open_corpus
    made: Callable[..., Rows] = partial(PackedSamples, length=length, packing=tune.packing)
    if tune.dpo is not None:
        world = detect(os.environ).size if ranks is None else ranks
        for size in (batch, *((ramp.start, ramp.increment) if (ramp := recipe.train.batch_ramp) else ())):
            dpo.refuse_odd(size, recipe.parallel.data_for(world), recipe.where("train.global_batch"))
        opened, made = open_pairs, partial(PairSamples, length=length)
    found, tally = opened(recipe, tune.data, tokenizer)
    if tune.valid:
        held_back, _ = opened(recipe, tune.valid, tokenizer)
    else:
        found, held_back = _divided(found, tune.valid_share, recipe.train.seed)
    _refuse_foreign_ids(found + held_back, recipe, tokenizer)
    digest = _digest(found, held_back)
    if tune.rows not in (None, digest):
        raise UserError(
            "the data is not what it was when this recipe was written by a run",
            where=recipe.where("finetune.rows"),
            hint="drop the key to tune on what is there now",
        )
    changes: dict[str, Any] = {"finetune": tune.model_copy(update={"rows": digest})}
    if not {"steps", "samples", "tokens"} & recipe.train.model_fields_set:
        steps = math.ceil(tune.epochs * made(found, samples=0, seed=None).per_epoch / batch)
        changes["train"] = recipe.train.model_copy(update={"steps": max(1, steps)})
    validation = None
    if held_back:
        batches = math.ceil(made(held_back, samples=0, seed=None).per_epoch / batch)
        changes["eval"] = recipe.eval.model_copy(update={"batches": batches})
        validation = made(held_back, samples=batches * batch, seed=None)
    recipe = recipe.model_copy(update=changes)
    training = made(found, samples=recipe.train.samples_in(recipe.train.steps), seed=recipe.train.seed)
    return Tuning(recipe, tokenizer, template, tally, training, validation)


def _warn_of_split_marks(template: Template, tokenizer: Tokenizer) -> None:
    """Say so where a mark that the template writes is no token: the model then has to spell it out."""
    split = {mark: len(tokenizer.encode(mark)) for mark in sorted(set(MARK.findall(template.source)))}
    listed = ", ".join(f"{mark} ({count} tokens)" for mark, count in split.items() if count > 1)
    if listed:
        console.warn(f"no token of the tokenizer's: {listed}; the template {template.name} has it spelled out")


def run(tuning: Tuning, path: Path | None, resume: str = "auto") -> Run:
    """Tune as the recipe says."""
    recipe, tune = tuning.recipe, tuning.recipe.finetune
    assert tune is not None
    extension = Adapting(recipe) if tune.adapter is not None else sparsity.extension(recipe) or Extension()
    if tune.neftune:
        extension = add_noise(extension, tune.neftune, recipe.data.sequence_length)
    if tune.dpo is not None:
        pairs = [each for each in (tuning.training, tuning.validation) if isinstance(each, PairSamples)]
        extension = Preferring(extension, tune.dpo.beta, pairs)
    return training.run(recipe, path, extension, resume, tuning.open_data)


def keeping_zeros(recipe: Recipe, tune: FinetuneSection) -> Recipe:
    """A pruned model stays pruned unless the recipe says otherwise; one of its matrices is looked at."""
    if recipe.sparsity is not None or not tune.keep_zeros:
        return recipe
    source = open_source(str(recipe.train.init_from))
    zeros = (source.tensor(next(name for name in source.names() if name.endswith("mlp.up.weight"))) == 0).float().mean()
    if zeros < PRUNED:
        return recipe
    if tune.adapter is not None and tune.adapter.kind == "dora":
        raise UserError(
            f"{source.path} was pruned, and DoRA would fill its zeros",
            where=recipe.where("finetune.adapter.kind"),
            hint="use lora, tune in full, or say finetune.keep_zeros = false",
        )
    console.say(f"{zeros:.0%} of a matrix of {source.path} are zero and stay so; finetune.keep_zeros=false fills them")
    return recipe.model_copy(update={"sparsity": SparsitySection(method="fixed")})


def export(tuning: Tuning, run: Run, out: Path | None = None) -> dict[str, Any]:
    """Write what was tuned, at its best step where that was kept, as a folder that transformers loads.

    Left out, that is `hf` in the run, where it takes the place of what an earlier part of the run left.
    """
    if out is None:
        out = run.path / "hf"
        if out.exists():
            shutil.rmtree(out)
    origin = open_source(str(tuning.recipe.train.init_from))
    best = checkpoint.best(run.checkpoints)
    _warn_if_worse(run)
    assert tuning.recipe.finetune is not None
    if tuning.recipe.finetune.adapter is not None:
        source: CheckpointSource = of_run(best or run.path, origin, is_checked=False)
    else:
        source = opened_under_masks(best or run.path)  # As it computes.
    take_along(source, origin)
    _end_where_answers_end(source, tuning)
    named = tuning.recipe.data.tokenizer

    def add_template(folder: Path) -> None:
        files.write_text(folder / "chat_template.jinja", tuning.template.source)
        settings = read_config(folder / "tokenizer_config.json")
        if settings.get("split_special_tokens"):  # A template writes special tokens out, and they must be read as such.
            files.write_json(folder / "tokenizer_config.json", settings | {"split_special_tokens": False})

    written = convert(source, out, Target("hf", dtype=origin.dtype, tokenizer=named), add_template)
    return written | {"step": source.step}


def _end_where_answers_end(source: CheckpointSource, tuning: Tuning) -> None:
    """Have whoever writes with the model stop at the special token that closed most answers it learned."""
    shown = tuning.training.pairs if isinstance(tuning.training, PairSamples) else tuning.training.conversations
    closing = Counter(int(each.ids[np.flatnonzero(each.learned)[-1]]) for each in _flat(shown))
    end, count = closing.most_common(1)[0]
    ends = end_ids(source.extra) or [each for each in [tuning.tokenizer.end_id] if each is not None]
    if end in ends or 2 * count < closing.total() or tuning.tokenizer.decode([end]):
        return
    generation = dict(source.extra.get("generation_config") or {})
    source.extra = {**source.extra, "generation_config": generation | {"eos_token_id": [*ends, end]}}


def _warn_if_worse(run: Run) -> None:
    """Say so where tuning never came below the loss that it began with."""
    losses = {record["step"]: record["valid_loss"] for record in run.metrics() if record.get("valid_loss") is not None}
    first = losses.pop(0, None)
    if first is not None and losses and min(losses.values()) >= first:
        console.warn(
            f"the validation loss was {first:.4f} before tuning and {min(losses.values()):.4f} at its best after"
        )


def take_along(tuned: CheckpointSource, origin: CheckpointSource) -> None:
    """Have a tuned model keep what its origin says beside the weights: positions, special tokens, the tokenizer."""
    tuned.extra = dict(origin.extra)
    tuned.tokenizer, tuned.tokenizer_files = origin.tokenizer, list(origin.tokenizer_files)
    tuned.load_tokenizer = origin.load_tokenizer  # type: ignore[method-assign]


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer that the recipe names, or the model's own."""
    if recipe.data.tokenizer is not None:
        return tokenizers.load_tokenizer(recipe.data.tokenizer)
    return open_source(str(recipe.train.init_from)).load_tokenizer()


def _refuse_foreign_ids(found: list[Any], recipe: Recipe, tokenizer: Tokenizer) -> None:
    largest = max(int(each.ids.max()) for each in _flat(found))
    if largest >= recipe.model.vocab:
        raise UserError(
            f"the tokenizer {tokenizer.source} gives the id {largest}, but model.vocab is {recipe.model.vocab}",
            where=recipe.where("data.tokenizer"),
            hint="use the model's own tokenizer",
        )


def _digest(found: list[Any], held_back: list[Any]) -> str:
    digest = hashlib.sha256()
    for each in (*_flat(found), *_flat(held_back)):
        digest.update(each.ids.tobytes() + each.learned.tobytes())
    return digest.hexdigest()[:24]


def _flat(found: Sequence[Any]) -> Iterator[Encoded]:
    """Conversations, and both answers of pairs."""
    for each in found:
        yield from each if isinstance(each, tuple) else (each,)


def _divided(found: list[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """What to train on, and what to hold back for validation: chosen by chance, the same for the same seed."""
    held = max(1, round(share * len(found))) if share else 0
    if held >= len(found):
        console.warn("there are too few conversations to hold any back for validation")
        held = 0
    chosen = set(np.random.RandomState(seed).permutation(len(found))[:held].tolist())
    numbered = list(enumerate(found))
    return [each for n, each in numbered if n not in chosen], [each for n, each in numbered if n in chosen]
