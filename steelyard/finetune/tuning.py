"""`steelyard sft`: a recipe made whole, its conversations as rows, the one training loop, and a folder at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steelyard import checkpoint, train
from steelyard.checkpoint.formats import Source, open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core import files, units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.run import Run
from steelyard.finetune import templates
from steelyard.finetune.adapting import AdaptedSource, Adapting
from steelyard.finetune.data import Corpus, open_corpus
from steelyard.finetune.encoding import Encoded
from steelyard.finetune.samples import PackedSamples
from steelyard.finetune.templates import Template
from steelyard.parallel.world import World
from steelyard.sparsity import training as sparsity
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import Tokenizer
from steelyard.tokens.samples import Samples


@dataclass(frozen=True)
class Tuning:
    """All that is known before the first step."""

    recipe: Recipe
    tokenizer: Tokenizer
    template: Template
    corpus: Corpus
    training: PackedSamples
    validation: PackedSamples | None

    def open_data(self, recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
        """The rows, for the loop."""
        return self.training, self.validation

    def described(self) -> str:
        """The data in a line or two."""
        rows, learned = self.training.rows, sum(int(each.learned[1:].sum()) for each in self.training.conversations)
        total = sum(each.places for each in self.training.conversations)
        lines = [
            f"{units.count(len(self.training.conversations))} conversations in {units.count(len(rows))} rows, "
            f"{self.training.efficiency:.1%} full; {units.count(learned)} of {units.count(total)} tokens are learned"
        ]
        return "\n".join(lines + self.corpus.tally.lines())


def prepare(recipe: Recipe) -> Tuning:
    """Read the conversations, and say in the recipe what follows from them: steps, and batches of validation."""
    tune = recipe.finetune
    if tune is None:
        raise UserError(f"the recipe {recipe.name} has no [finetune]", mend="say there what to learn from")
    if recipe.train.init_from is None:
        raise UserError("there is no model to tune", mend="name one in train.init_from")
    tokenizer = tokenizer_of(recipe)
    corpus = open_corpus(recipe, tune.data, tokenizer)
    if tune.valid:
        to_train, held_back = corpus.conversations, open_corpus(recipe, tune.valid, tokenizer).conversations
    else:
        to_train, held_back = _divided(corpus.conversations, tune.valid_share, recipe.train.seed)
    length, batch = recipe.data.sequence_length, recipe.train.global_batch
    rows = len(PackedSamples(to_train, length, tune.packing, 0, None).rows)
    changes: dict[str, Any] = {}
    if not {"steps", "samples", "tokens"} & recipe.train.model_fields_set:
        steps = max(1, math.ceil(tune.epochs * rows / batch))
        changes["train"] = recipe.train.model_copy(update={"steps": steps})
    validation = None
    if held_back:
        needed = math.ceil(len(PackedSamples(held_back, length, tune.packing, 0, None).rows) / batch)
        changes["eval"] = recipe.eval.model_copy(update={"batches": needed})
        validation = PackedSamples(held_back, length, tune.packing, needed * batch, None)
    recipe = recipe.model_copy(update=changes)
    total = recipe.train.samples_in(recipe.train.steps)
    training = PackedSamples(to_train, length, tune.packing, total, recipe.train.seed)
    return Tuning(recipe, tokenizer, templates.load(tune.template, tokenizer), corpus, training, validation)


def run(tuning: Tuning, path: Path | None, resume: str = "auto") -> Run:
    """Tune as the recipe says."""
    recipe = tuning.recipe
    assert recipe.finetune is not None
    extension = Adapting(recipe) if recipe.finetune.adapter is not None else sparsity.extension(recipe)
    return train.run(recipe, path, extension, resume, tuning.open_data)


def export(tuning: Tuning, run: Run, out: Path) -> dict[str, Any]:
    """Write what was tuned, at its best step where that was kept, as a folder that transformers loads."""
    origin = open_source(str(tuning.recipe.train.init_from))
    best = checkpoint.best(run.checkpoints)
    source = open_source(best or run.path)
    assert tuning.recipe.finetune is not None
    if tuning.recipe.finetune.adapter is not None:
        source = AdaptedSource(source, origin, tuning.recipe.finetune.adapter)
    take_along(source, origin)
    named = tuning.recipe.data.tokenizer
    written = convert(source, out, Target("hf", dtype=origin.dtype, tokenizer=named))
    files.write_text(out / "chat_template.jinja", tuning.template.source)
    return written | {"step": source.step}


def take_along(tuned: Source, origin: Source) -> None:
    """Have a tuned model keep what its origin says beside the weights: positions, special tokens, the tokenizer."""
    tuned.extra = dict(origin.extra)
    tuned.tokenizer, tuned.tokenizer_files = origin.tokenizer, list(origin.tokenizer_files)
    tuned.load_tokenizer = origin.load_tokenizer  # type: ignore[method-assign]


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The tokenizer that the recipe names, or the model's own."""
    if recipe.data.tokenizer is not None:
        return tokenizers.load(recipe.data.tokenizer)
    return open_source(str(recipe.train.init_from)).load_tokenizer()


def _divided(conversations: list[Encoded], share: float, seed: int) -> tuple[list[Encoded], list[Encoded]]:
    """What to train on, and what to hold back for validation: chosen by chance, the same for the same seed."""
    held = round(share * len(conversations))
    if share and not held:
        held = 1
    if held >= len(conversations):
        if share:
            console.warn("there are too few conversations to hold any back for validation")
        held = 0
    chosen = set(np.random.RandomState(seed).permutation(len(conversations))[:held].tolist())
    numbered = list(enumerate(conversations))
    return [each for n, each in numbered if n not in chosen], [each for n, each in numbered if n in chosen]
