"""`steelyard sft`: completes the recipe, packs conversations into rows, trains, and exports a Hugging Face folder."""

from __future__ import annotations

import hashlib
import math
import os
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
from steelyard.finetuning import dpo, template_markers, templates
from steelyard.finetuning.dpo import DpoExtension, PairSamples
from steelyard.finetuning.encoding import Encoded, EncodeStats
from steelyard.finetuning.lora_extension import LoraExtension
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

PRUNED = 0.4  # A matrix with at least this share of zeros counts as pruned.
Rows = PackedSamples | PairSamples


@dataclass(frozen=True)
class SftJob:
    """A fine-tuning job that is ready for its first step."""

    recipe: Recipe
    tokenizer: Tokenizer
    template: Template
    stats: EncodeStats
    training: Rows
    validation: Rows | None

    def open_data(self, recipe: Recipe, world: World) -> tuple[Samples, Samples | None]:
        """The training and validation rows, for the training loop."""
        return self.training, self.validation

    def described(self) -> str:
        """The data in one line, and a line for each kind of dropped or truncated row."""
        if isinstance(self.training, PairSamples):
            line = f"{units.count(len(self.training.pairs))} pairs of answers"
        else:
            samples = self.training.conversations
            trained = sum(int(each.loss_mask[1:].sum()) for each in samples)
            total = sum(each.length for each in samples)
            line = (
                f"{units.count(len(samples))} conversations in {units.count(self.training.per_epoch)} rows, "
                f"{self.training.efficiency:.1%} full; "
                f"{units.count(trained)} of {units.count(total)} tokens count in the loss"
            )
        return "\n".join([line, *self.stats.lines()])


def prepare(recipe: Recipe, ranks: int | None = None) -> SftJob:
    """Read the conversations, and set the steps and validation batches of the recipe from them.

    `ranks` is the world size of the run; by default that of this process.
    """
    tune = recipe.finetune
    if tune is None:
        raise UserError(f"the recipe {recipe.name} has no [finetune] section", hint="add it, with finetune.data")
    if recipe.train.init_from is None:
        raise UserError("no model to fine-tune is set", hint="set train.init_from to a checkpoint")
    _warn_if_not_exportable(recipe)
    recipe = with_fixed_masks(recipe, tune)
    tokenizer = tokenizer_of(recipe)
    template = templates.load(tune.template, tokenizer)
    template_markers.check(template, tokenizer)
    length, batch = recipe.data.sequence_length, recipe.train.global_batch
    opened: Callable[..., tuple[list[Any], EncodeStats]] = open_corpus
    made: Callable[..., Rows] = partial(PackedSamples, length=length, packing=tune.packing)
    if tune.dpo is not None:
        world = detect(os.environ).size if ranks is None else ranks
        for size in (batch, *((ramp.start, ramp.increment) if (ramp := recipe.train.batch_ramp) else ())):
            dpo.refuse_odd(size, recipe.parallel.data_for(world), recipe.where("train.global_batch"))
        opened, made = open_pairs, partial(PairSamples, length=length)
    samples, stats = opened(recipe, tune.data, tokenizer)
    if tune.valid:
        valid, _ = opened(recipe, tune.valid, tokenizer)
    else:
        samples, valid = _split(samples, tune.valid_share, recipe.train.seed)
    _refuse_foreign_ids(samples + valid, recipe, tokenizer)
    stats.counts["unknown"] = _count_unknown(samples + valid, tokenizer, tune)
    digest = _digest(samples, valid)
    if tune.rows not in (None, digest):
        raise UserError(
            "the data has changed since a run wrote this recipe",
            where=recipe.where("finetune.rows"),
            hint="remove the key to train on the current data",
        )
    changes: dict[str, Any] = {"finetune": tune.model_copy(update={"rows": digest})}
    if not {"steps", "samples", "tokens"} & recipe.train.model_fields_set:
        steps = math.ceil(tune.epochs * made(samples, samples=0, seed=None).per_epoch / batch)
        changes["train"] = recipe.train.model_copy(update={"steps": max(1, steps)})
    validation = None
    if valid:
        batches = math.ceil(made(valid, samples=0, seed=None).per_epoch / batch)
        changes["eval"] = recipe.eval.model_copy(update={"batches": batches})
        validation = made(valid, samples=batches * batch, seed=None)
    recipe = recipe.model_copy(update=changes)
    training = made(samples, samples=recipe.train.samples_in(recipe.train.steps), seed=recipe.train.seed)
    return SftJob(recipe, tokenizer, template, stats, training, validation)


def run(job: SftJob, path: Path | None, resume: str = "auto") -> Run:
    """Train the recipe."""
    recipe, tune = job.recipe, job.recipe.finetune
    assert tune is not None
    extension = LoraExtension(recipe) if tune.adapter is not None else sparsity.extension(recipe) or Extension()
    if tune.neftune:
        extension = add_noise(extension, tune.neftune, recipe.data.sequence_length)
    if tune.dpo is not None:
        pairs = [each for each in (job.training, job.validation) if isinstance(each, PairSamples)]
        extension = DpoExtension(extension, tune.dpo.beta, pairs)
    return training.run(recipe, path, extension, resume, job.open_data)


def with_fixed_masks(recipe: Recipe, tune: FinetuneSection) -> Recipe:
    """Add fixed masks if the model is pruned (one matrix is checked), unless `finetune.keep_zeros` is false."""
    if recipe.sparsity is not None or not tune.keep_zeros:
        return recipe
    source = open_source(str(recipe.train.init_from))
    names = (name for name in source.names() if name.endswith(("mlp.up.weight", "mlp.experts.up.weight")))
    zeros = (source.tensor(next(names)) == 0).float().mean()
    if zeros < PRUNED:
        return recipe
    if tune.adapter is not None and tune.adapter.kind == "dora":
        raise UserError(
            f"{source.path} is pruned, and DoRA would fill its zeros",
            where=recipe.where("finetune.adapter.kind"),
            hint="use lora or full fine-tuning, or set finetune.keep_zeros = false",
        )
    console.say(f"{source.path} is pruned ({zeros:.0%} zeros); they stay zero unless finetune.keep_zeros=false")
    return recipe.model_copy(update={"sparsity": SparsitySection(method="fixed")})


def _warn_if_not_exportable(recipe: Recipe) -> None:
    """Say before the training that its result cannot be exported."""
    try:
        recipe.model.to_hf({})
    except UserError as error:
        console.warn(f"{error.message}: the export at the end will fail; the run folder keeps the tuned weights")


def export(job: SftJob, run: Run, out: Path | None = None) -> dict[str, Any]:
    """Write the tuned model, of the best step if it was saved, as a folder that transformers loads.

    The default is `hf` in the run folder, where it replaces an earlier export.
    """
    if out is None:
        out = run.path / "hf"
        if out.exists():
            shutil.rmtree(out)
    origin = open_source(str(job.recipe.train.init_from))
    best = checkpoint.best(run.checkpoints)
    _warn_if_worse(run)
    assert job.recipe.finetune is not None
    if job.recipe.finetune.adapter is not None:
        source: CheckpointSource = of_run(best or run.path, origin, is_checked=False)
    else:
        source = opened_under_masks(best or run.path)  # With masks applied, as in training.
    copy_metadata(source, origin)
    _add_answer_end(source, job)
    tokenizer = job.recipe.data.tokenizer

    def add_template(folder: Path) -> None:
        files.write_text(folder / "chat_template.jinja", job.template.source)
        settings = read_config(folder / "tokenizer_config.json")
        if settings.get("split_special_tokens"):  # Templates write special tokens as text.
            files.write_json(folder / "tokenizer_config.json", settings | {"split_special_tokens": False})

    written = convert(source, out, Target("hf", dtype=origin.dtype, tokenizer=tokenizer), add_template)
    return written | {"step": source.step}


def _add_answer_end(source: CheckpointSource, job: SftJob) -> None:
    """Add the special token that ends most training answers to `eos_token_id`, so that generation stops there."""
    samples = job.training.pairs if isinstance(job.training, PairSamples) else job.training.conversations
    closing = Counter(int(each.ids[np.flatnonzero(each.loss_mask)[-1]]) for each in _flat(samples))
    end, count = closing.most_common(1)[0]
    ends = end_ids(source.hf_metadata) or [each for each in [job.tokenizer.end_id] if each is not None]
    if end in ends or 2 * count < closing.total() or job.tokenizer.decode([end]):
        return
    generation = dict(source.hf_metadata.get("generation_config") or {})
    source.hf_metadata = {**source.hf_metadata, "generation_config": generation | {"eos_token_id": [*ends, end]}}


def _warn_if_worse(run: Run) -> None:
    """Warn if the validation loss never fell below its initial value."""
    losses = {record["step"]: record["valid_loss"] for record in run.metrics() if record.get("valid_loss") is not None}
    first = losses.pop(0, None)
    if first is not None and losses and min(losses.values()) >= first:
        console.warn(
            f"the validation loss did not improve: {first:.4f} before training, {min(losses.values()):.4f} at best"
        )


def copy_metadata(tuned: CheckpointSource, origin: CheckpointSource) -> None:
    """Copy the metadata of the base model to the tuned one: positions, special tokens, the tokenizer."""
    tuned.hf_metadata = dict(origin.hf_metadata)
    tuned.tokenizer, tuned.tokenizer_files = origin.tokenizer, list(origin.tokenizer_files)
    tuned.load_tokenizer = origin.load_tokenizer  # type: ignore[method-assign]


def tokenizer_of(recipe: Recipe) -> Tokenizer:
    """The recipe's tokenizer, by default the model's."""
    if recipe.data.tokenizer is not None:
        return tokenizers.load_tokenizer(recipe.data.tokenizer)
    return open_source(str(recipe.train.init_from)).load_tokenizer()


def _refuse_foreign_ids(samples: list[Any], recipe: Recipe, tokenizer: Tokenizer) -> None:
    largest = max(int(each.ids.max()) for each in _flat(samples))
    if largest >= recipe.model.vocab:
        raise UserError(
            f"the tokenizer {tokenizer.source} produces token id {largest}, but model.vocab is {recipe.model.vocab}",
            where=recipe.where("data.tokenizer"),
            hint="use the model's own tokenizer",
        )


def _count_unknown(samples: list[Any], tokenizer: Tokenizer, tune: FinetuneSection) -> int:
    tokens = sum(len(each.ids) for each in _flat(samples))
    unknown = sum(tokenizers.count_unknown(each.ids, tokenizer) for each in _flat(samples))
    tokenizers.report_unknown(unknown, tokens, tokenizer, ", ".join(tune.data), tune.allow_unknown)
    return unknown


def _digest(samples: list[Any], valid: list[Any]) -> str:
    digest = hashlib.sha256()
    for each in (*_flat(samples), *_flat(valid)):
        digest.update(each.ids.tobytes() + each.loss_mask.tobytes())
    return digest.hexdigest()[:24]


def _flat(samples: Sequence[Any]) -> Iterator[Encoded]:
    """All conversations; for pairs, both answers."""
    for each in samples:
        yield from each if isinstance(each, tuple) else (each,)


def _split(samples: list[Any], share: float, seed: int) -> tuple[list[Any], list[Any]]:
    """A random split into training and validation, deterministic for a seed."""
    held = max(1, round(share * len(samples))) if share else 0
    if held >= len(samples):
        console.warn("too few conversations for a validation split: training without validation")
        held = 0
    chosen = set(np.random.RandomState(seed).permutation(len(samples))[:held].tolist())
    numbered = list(enumerate(samples))
    return [each for n, each in numbered if n not in chosen], [each for n, each in numbered if n in chosen]
