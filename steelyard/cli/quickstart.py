"""`steelyard quickstart`: corpus, tokenizer, token files, training and generation in one command.

It prints the equivalent command of each step. Every step writes its result to `quickstart/` by a rename, so a killed
quickstart continues. Training takes as many steps as fit into two minutes, from a measurement of the first steps. The
number is stored in the run's recipe, so a resumed quickstart has the same length and learning rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from steelyard.cli.options import JsonOption, Overrides, RunOption, print_result
from steelyard.core.console import console
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.core.run import place_for_training

PROMPT = "def read(self, "
SECONDS_TO_TRAIN = 120.0
FEWEST_STEPS = 150  # The validation loss decreases by 2.4 nats, and the sample has the layout of Python code.
MOST_STEPS = 1200  # Almost one epoch; a faster machine finishes earlier.
LENGTHS = ("train.steps", "train.samples", "train.tokens")


def quickstart(overrides: Overrides = None, run: RunOption = None, json: JsonOption = False) -> None:
    """Train a tokenizer and a small model on the source of Python's standard library, and generate a sample.

    Training takes about two minutes: the number of steps follows from a measurement of the first ones. train.steps=N
    trains N steps without a measurement.

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
        f"sample of the model:\n\n{_indented(sample)}\n\n"
        f"run folder  {folder.path}\nreport      {page}"
    )
    print_result(result, json, text)


def _sized(recipe: Recipe, run: Path | None) -> tuple[int, float | None, Path]:
    """The number of steps, the measured seconds per step, and the run folder.

    An unfinished run keeps its number of steps, since its learning rates depend on it; nothing is measured then.
    """
    from steelyard.training import time_budget

    shortest = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 1})})
    place, unfinished = place_for_training(shortest, run)  # With one step, a finished run is never resumed.
    if unfinished is not None:
        steps = unfinished.recipe().train.steps
        console.say(f"{place} is not finished: it continues to {steps} steps")
        return steps, None, place
    per_step = time_budget.seconds_per_step(recipe)
    steps = time_budget.steps_within(SECONDS_TO_TRAIN, per_step, recipe, FEWEST_STEPS, MOST_STEPS)
    why = {FEWEST_STEPS: " (the minimum)", MOST_STEPS: " (the maximum: more would repeat the text)"}.get(steps, "")
    console.say(f"measured {per_step:.2g} s per step: training {steps} steps{why}, {_about(steps * per_step)}")
    return steps, per_step, place


def _about(seconds: float) -> str:
    if seconds < 90:
        return f"about {math.ceil(seconds / 10) * 10} seconds"
    minutes = round(seconds / 60)
    return "about two minutes" if minutes == 2 else f"about {minutes} minutes"


def _prepare(recipe: Recipe) -> None:
    """Create the corpus, tokenizer and token files that do not exist yet."""
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
        console.say(f"{what}  (exists)")
    else:
        console.say(what)
        make()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
