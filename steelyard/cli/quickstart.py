"""`steelyard quickstart`: the whole road in one command, each step the command a user would type.

Every step leaves its result under `quickstart/` by rename, so that a killed quickstart goes on where it was.
Training is sized to this machine: its first steps are measured, and as many are taken as fit into two minutes. The
number is kept in the run's recipe, so that a killed quickstart goes on to the same end, by the same learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import typer

from steelyard.cli.options import JsonOption, Overrides, RunOption, print_result
from steelyard.core.console import console
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.core.run import place_for_training

PROMPT = "def read(self, "
SECONDS_TO_TRAIN = 120.0
FEWEST_STEPS = 150  # The validation loss falls by 2.4 nats, and the sample has the layout of Python code.
MOST_STEPS = 1200  # Almost once through the text; a faster machine is done earlier.
LENGTHS = ("train.steps", "train.samples", "train.tokens")


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(quickstart)


def quickstart(overrides: Overrides = None, run: RunOption = None, json: JsonOption = False) -> None:
    """Train a tokenizer and a small model on Python's own source, then let it write.

    Training takes about two minutes: its first steps are measured, and as many are taken as fit. train.steps=N takes N
    steps, and measures nothing.

    Example: steelyard quickstart train.steps=900
    """
    given = list(overrides or ())
    recipe = load_recipe("quickstart", given)
    _prepare(recipe)

    from steelyard.evaluate.generation import Sampling, from_checkpoint
    from steelyard.observe import report
    from steelyard.training import run_status, trainer

    measured = None
    if not any(override.partition("=")[0].strip() in LENGTHS for override in given):
        steps, measured, run = _sized(recipe, run)
        given.append(f"train.steps={steps}")
        recipe = load_recipe("quickstart", given)
    console.say(f"$ steelyard train quickstart {' '.join(given)}")
    folder = trainer.run(recipe, run)
    page = report.write(folder)
    console.say(f'$ steelyard generate {folder.path} --prompt "{PROMPT}"')
    sample = from_checkpoint(folder.path, PROMPT, Sampling(max_tokens=120))
    result = run_status.results(folder) | {"report": str(page), "sample": sample, "seconds_per_step_measured": measured}
    before, after = result["valid_loss_before"], result["valid_loss_after"]
    text = (
        f"\nvalidation loss        {before:.3f} -> {after:.3f} nats\n"
        f"validation perplexity  {math.exp(before):.0f} -> {math.exp(after):.1f}\n\n"
        f"what the model wrote:\n\n{_indented(sample)}\n\n"
        f"run folder  {folder.path}\nreport      {page}"
    )
    print_result(result, json, text)


def _sized(recipe: Recipe, run: Path | None) -> tuple[int, float | None, Path]:
    """The steps to take, the seconds measured for one, and where to train.

    An unfinished run keeps its number, since its learning rates follow from it; nothing is measured then.
    """
    from steelyard.training import time_budget

    shortest = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})})
    place, unfinished = place_for_training(shortest, run)  # A finished run is never too short for one step.
    if unfinished is not None:
        steps = unfinished.recipe().train.steps
        console.say(f"{place} is not finished: it goes on to its {steps} steps")
        return steps, None, place
    per_step = time_budget.seconds_per_step(recipe)
    steps = time_budget.steps_within(SECONDS_TO_TRAIN, per_step, recipe, FEWEST_STEPS, MOST_STEPS)
    why = {FEWEST_STEPS: " (fewer would show little)", MOST_STEPS: " (more would repeat the text)"}.get(steps, "")
    console.say(f"measured {per_step:.2g} s per step here: training {steps} steps{why}, {_about(steps * per_step)}")
    return steps, per_step, place


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"about {math.ceil(seconds / 10) * 10} seconds"
    minutes = round(seconds / 60)
    return "about two minutes" if minutes == 2 else f"about {minutes} minutes"


def _prepare(recipe: Recipe) -> None:
    """Corpus, tokenizer and token files, as far as they are not there yet."""
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents
    from steelyard.text.stdlib import write_corpus
    from steelyard.tokens import preprocess
    from steelyard.tokens.tokenize_job import TokenizeJob

    corpus, folder, vocab = Path("quickstart/corpus.jsonl"), Path(str(recipe.data.tokenizer)), recipe.model.vocab
    prefix = recipe.data.train[0].prefix
    short = prefix.removesuffix("_text_document")

    def train_tokenizer() -> None:
        tokenizers.train_byte_bpe(documents([corpus]), vocab).save(folder)

    def tokenize() -> None:
        preprocess.tokenize(TokenizeJob((str(corpus),), str(folder), short, append_eod=True))

    _step(f"the source of Python's standard library -> {corpus}", corpus, lambda: write_corpus(corpus))
    _step(
        f"$ steelyard tokenizer train --input {corpus} --model-prefix {folder} --vocab-size {vocab} --type byte-bpe",
        folder / "tokenizer.json",
        train_tokenizer,
    )
    _step(
        f"$ steelyard data tokenize --input {corpus} --tokenizer {folder} --output-prefix {short} --append-eod",
        Path(f"{prefix}.idx"),
        tokenize,
    )


def _step(what: str, result: Path, make: Callable[[], object]) -> None:
    if result.is_file():
        console.say(f"{what}  (already there)")
    else:
        console.say(what)
        make()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
