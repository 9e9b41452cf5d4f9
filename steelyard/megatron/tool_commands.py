"""Converts Megatron's other tools (tokenization, checkpoint conversion) to Steelyard's commands."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from steelyard.core.errors import UserError
from steelyard.megatron.cli_args import Given, canonical
from steelyard.megatron.flag_table import CARRIED, RULED

FOUND_IN_A_CHECKPOINT = (
    "--loader", "--checkpoint-type", "--model-type", "--model-size", "--megatron-path", "--tokenizer-model",
    "--no-checking", "--max-queue-size", "--true-vocab-size", "--vocab-file",
)  # fmt: skip


def program_of(words: list[str]) -> tuple[str, list[str], list[str]]:
    """The name of the Python file that a command starts, the words before it, and the words after it.

    The name is "" for a line of flags without a command, as in guides, and for an unknown program.
    """
    for at, word in enumerate(words):
        if word.endswith(".py"):
            name, flags = word.rpartition("/")[2], words[at + 1 :]
            return ("convert.py" if {"--loader", "--saver"} <= set(flags) else name), words[:at], flags
    known = {*CARRIED, *RULED}
    first = next((at for at, word in enumerate(words) if canonical(word.partition("=")[0]) in known), 0)
    return "", words[:first], words[first:]


def tokenize(given: Given) -> str:
    """`preprocess_data.py` as `steelyard data tokenize`."""
    words = ["steelyard", "data", "tokenize"]
    words += ["--input", *_needed(given, "--input")]
    model, vocab, merges = (
        given.text(flag, "--tokenizer") for flag in ("--tokenizer-model", "--vocab-file", "--merge-file")
    )
    tokenizer = model or (f"{vocab},{merges}" if vocab and merges else vocab)
    if tokenizer is None:
        tokenizer = "TOKENIZER"
        given.note("--tokenizer", "the script has no tokenizer file: replace TOKENIZER")
    words += ["--tokenizer", tokenizer]
    given.leave("--tokenizer-type", "the type is detected from the files", matters=False)
    words += ["--output-prefix", *_needed(given, "--output-prefix")]
    if keys := given.texts("--json-keys", "--json-keys"):
        words += ["--json-keys", *keys]
    if given.switch("--append-eod", "--append-eod"):
        words += ["--append-eod"]
    if (workers := given.text("--workers", "--workers")) is not None:
        words += ["--workers", workers]
    for flag in ("--dataset-impl", "--log-interval", "--partitions", "--chunk-size", "--keep-sequential-samples"):
        given.leave(flag, "the output is the same without it", matters=False)
    for flag in ("--split-sentences", "--keep-newlines", "--lang"):
        given.leave(flag, "documents are not split into sentences")
    return shlex.join(words)


def convert(given: Given) -> str:
    """`tools/checkpoint/convert.py` as `steelyard checkpoint convert`."""
    source, target = _needed(given, "--load-dir"), _needed(given, "--save-dir")
    saver = given.text("--saver", "--to") or "megatron"
    form = "hf" if "hf" in saver.lower() else "megatron"
    words = ["steelyard", "checkpoint", "convert", *source, *target, "--to", form]
    for flag, option in (
        ("--target-tensor-parallel-size", "--tensor"),
        ("--target-pipeline-parallel-size", "--pipeline"),
    ):
        if value := given.text(flag, option):
            words += [option, value]
    if balance := given.text("--balance", "--partition"):
        words += ["--partition", balance]
    for flag in ("--bf16", "--fp16"):
        if given.switch(flag, "--dtype"):
            words += ["--dtype", flag[2:]]
    for flag in FOUND_IN_A_CHECKPOINT:
        given.leave(flag, "read from the checkpoint", matters=False)
    return shlex.join(words)


def train_tokenizer(given: Given) -> str:
    """A script around SentencePiece's trainer as `steelyard tokenizer train`."""
    words = ["steelyard", "tokenizer", "train", "--input", *_needed(given, "--input")]
    words += ["--model-prefix", *_needed(given, "--model_prefix"), "--vocab-size", *_needed(given, "--vocab_size")]
    return shlex.join(words)


def _needed(given: Given, flag: str) -> list[str]:
    if not given.has(flag):
        raise UserError(f"{flag} is missing", where=given.where)
    values = given.texts(flag, flag)
    if not values:
        value = next(left.value for left in given.left if left.flag == flag)
        raise UserError(
            f"{flag} is {value or 'empty'}, which is not known", where=given.where, hint="pass its value: -- ARGS"
        )
    return values


TOOLS: dict[str, Callable[[Given], str]] = {
    "preprocess_data.py": tokenize,
    "convert.py": convert,
    "train_sentencepiece_tokenizer.py": train_tokenizer,
}
