"""`steelyard quickstart`: the whole road in one command, each step the command a user would type.

Every step leaves its result under `quickstart/` by rename, so that a killed quickstart goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import typer

from steelyard.cli.options import JsonOption, Overrides, RunOption, print_result
from steelyard.core.console import console
from steelyard.core.recipe import Recipe, load

PROMPT = "def read(self, "


def register(root: typer.Typer, name: str, help_: str) -> None:
    """Add the command to the tree."""
    root.command(name)(quickstart)


def quickstart(overrides: Overrides = None, run: RunOption = None, json: JsonOption = False) -> None:
    """Train a tokenizer and a small model on Python's own source, then let it write.

    Example: steelyard quickstart train.steps=900
    """
    recipe = load("quickstart", overrides or ())
    _prepare(recipe)

    from steelyard.evaluate.generate import Sampling, from_checkpoint
    from steelyard.observe import report
    from steelyard.train import loop

    console.say(f"$ steelyard train quickstart {' '.join(overrides or ())}".rstrip())
    folder = loop.run(recipe, run)
    page = report.write(folder)
    console.say(f'$ steelyard generate {folder.path} --prompt "{PROMPT}"')
    sample = from_checkpoint(folder.path, PROMPT, Sampling(max_tokens=120))
    result = loop.results(folder) | {"report": str(page), "sample": sample}
    before, after = result["valid_loss_before"], result["valid_loss_after"]
    text = (
        f"\nvalidation loss        {before:.3f} -> {after:.3f} nats\n"
        f"validation perplexity  {math.exp(before):.0f} -> {math.exp(after):.1f}\n\n"
        f"what the model wrote:\n\n{_indented(sample)}\n\n"
        f"run folder  {folder.path}\nreport      {page}"
    )
    print_result(result, json, text)


def _prepare(recipe: Recipe) -> None:
    """Corpus, tokenizer and token files, as far as they are not there yet."""
    from steelyard.text import tokenizer as tokenizers
    from steelyard.text.corpus import documents
    from steelyard.text.stdlib import write_corpus
    from steelyard.tokens import preprocess
    from steelyard.tokens.job import Job

    corpus, folder, vocab = Path("quickstart/corpus.jsonl"), Path(str(recipe.data.tokenizer)), recipe.model.vocab
    prefix = recipe.data.train[0].prefix
    short = prefix.removesuffix("_text_document")

    def train_tokenizer() -> None:
        tokenizers.train_byte_bpe(documents([corpus]), vocab).save(folder)

    def tokenize() -> None:
        preprocess.tokenize(Job((str(corpus),), str(folder), short, append_eod=True))

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
