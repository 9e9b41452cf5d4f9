"""Reads files of conversations and encodes them for training.

Encoding a large dataset takes minutes, so the result is cached next to the first file, under a digest of everything it
depends on:

    .steelyard-<digest>.npz    ids (int32, all conversations concatenated), lengths (int64), loss_mask (packed
                               bits), counts (JSON: rows read, truncated and dropped)

Only the most recently used cache files of a folder are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe
from steelyard.core.recipe.finetune_section import FinetuneSection
from steelyard.core.safe_parse import loads
from steelyard.finetuning import dataset_formats, templates
from steelyard.finetuning.conversation import BadRow, Conversation, Preference, Row
from steelyard.finetuning.encoding import Encoded, EncodeStats, encode, fitting
from steelyard.finetuning.templates import Template
from steelyard.text import download
from steelyard.text.corpus import BadDocument, named_files, pieces, records, where
from steelyard.text.tokenizer import Tokenizer

VERSION = 4  # of the cache format
CACHE_FILES, CACHES_TO_KEEP = ".steelyard-*.npz", 8  # files in a folder: training and validation of a few settings
EMPTY = "the line is empty"


Corpus = tuple[list[Encoded], EncodeStats]


def open_corpus(recipe: Recipe, names: Sequence[str], tokenizer: Tokenizer) -> Corpus:
    """Read, render and encode the conversations of files, or load them from the cache; with counts of dropped rows."""
    tune = _section(recipe)
    template = templates.load(tune.template, tokenizer)
    paths = paths_of(names)
    cache = _cache_path(paths, recipe, tokenizer, template)
    cached = _read_cache(cache)
    if cached is not None:
        return cached
    stats = EncodeStats()
    encoded = _encoded(conversations(paths, tune, stats), template, tokenizer, tune, stats)
    length = recipe.data.sequence_length
    corpus = list(fitting(encoded, length, tune.overlong, tune.untrained, stats)), stats
    _refuse_empty(corpus[0], names, stats)
    with contextlib.suppress(OSError):  # In a read-only folder there is no cache.
        _write_cache(corpus, cache)
    return corpus


def conversations(paths: Sequence[Path], tune: FinetuneSection, stats: EncodeStats) -> Iterator[Conversation]:
    """The conversations of files, in order. A row that cannot be read raises, or is dropped and counted."""
    name = tune.format
    if name is not None and name not in dataset_formats.NAMES:
        raise UserError(f"unknown finetune.format {name}", hint=f"use one of {', '.join(dataset_formats.NAMES)}")
    rows = _rows(paths, tune, stats)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{', '.join(map(str, paths))} contains no rows")
    name = name or dataset_formats.format_of(*first)
    markers = dataset_formats.Markers(tune.user_marker, tune.assistant_marker)
    if name == "preference":
        raise UserError("these rows are preferences, not conversations", hint="add [finetune.dpo] to train with DPO")
    found = _from(first, rows)
    if name == "flat-tree":
        name, found = "messages", dataset_formats.threads(found)
    for row, place in found:
        try:
            yield dataset_formats.conversation(row, name, markers, place, tune.system)
        except BadRow as error:
            _handle_bad_row(error, place, tune, stats)


def preferences(paths: Sequence[Path], tune: FinetuneSection, stats: EncodeStats) -> Iterator[Preference]:
    """The preference pairs of files, in order; bad rows are handled as in `conversations`."""
    for row, place in _rows(paths, tune, stats):
        try:
            if not {"chosen", "rejected"} <= row.keys():
                raise BadRow("a preference needs the keys chosen and rejected, and optionally prompt")
            yield dataset_formats.preference(row, place, tune.system)
        except BadRow as error:
            _handle_bad_row(error, place, tune, stats)


def open_pairs(
    recipe: Recipe, names: Sequence[str], tokenizer: Tokenizer
) -> tuple[list[tuple[Encoded, Encoded]], EncodeStats]:
    """Read and encode preference pairs; only the last answer counts in the loss. A dropped side drops the pair."""
    tune, stats = _section(recipe), EncodeStats()
    template, length = templates.load(tune.template, tokenizer), recipe.data.sequence_length
    pairs: list[tuple[Encoded, Encoded]] = []
    for found in preferences(paths_of(names), tune, stats):
        both, place = (found.chosen, found.rejected), found.chosen.where
        try:
            sides = [(encode(each, template, tokenizer, "completion"), place) for each in both]
        except BadRow as error:
            _handle_bad_row(error, place, tune, stats)
            continue
        fit = list(fitting(sides, length, tune.overlong, tune.untrained, stats))
        if len(fit) == 2:
            pairs.append((fit[0], fit[1]))
    _refuse_empty(pairs, names, stats)
    return pairs, stats


def _encoded(
    found: Iterable[Conversation], template: Template, tokenizer: Tokenizer, tune: FinetuneSection, stats: EncodeStats
) -> Iterator[tuple[Encoded, str]]:
    for each in found:
        try:
            yield encode(each, template, tokenizer, tune.loss), each.where
        except BadRow as error:
            _handle_bad_row(error, each.where, tune, stats)


def _refuse_empty(found: Sequence[Any], names: Sequence[str], stats: EncodeStats) -> None:
    if not found:
        raise UserError(f"{', '.join(names)} has no row to train on", hint="; ".join(stats.lines()) or None)


def _rows(paths: Sequence[Path], tune: FinetuneSection, stats: EncodeStats) -> Iterator[tuple[Row, str]]:
    for path in paths:
        if path.suffix == ".json" and _starts_with(path, b"["):
            yield from _listed(path, tune, stats)
            continue
        before = 0
        for piece in pieces(path):
            bad: list[BadDocument] = []
            number = 0
            try:
                for row in records(piece, bad):
                    number += 1
                    yield row, f"{path}:{before + number + len(bad)}"
            except BadDocument as damage:  # In a parquet file the rows after it are lost too.
                bad.append(damage)
            for document in bad:
                if document.reason != EMPTY:
                    _handle_bad_row(document, where(piece, document.number), tune, stats)
            before += number + len(bad)


def _starts_with(path: Path, sign: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).lstrip().startswith(sign)


def _listed(path: Path, tune: FinetuneSection, stats: EncodeStats) -> Iterator[tuple[Row, str]]:
    """The rows of a file that is one JSON list, such as Alpaca's."""
    try:
        rows = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}", hint="use a JSON list of rows, or JSON lines") from None
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield row, f"{path}:{number}"
        else:
            _handle_bad_row(BadRow("a row must be an object"), f"{path}:{number}", tune, stats)


def _handle_bad_row(error: BadRow | BadDocument, place: str, tune: FinetuneSection, stats: EncodeStats) -> None:
    reason = error.reason if isinstance(error, BadDocument) else str(error)
    if tune.bad_rows == "refuse":
        raise UserError(reason, where=place, hint='finetune.bad_rows = "drop" skips such rows and counts them')
    stats.counts["bad"] += 1


def _from(first: tuple[Row, str], rest: Iterator[tuple[Row, str]]) -> Iterator[tuple[Row, str]]:
    yield first
    yield from rest


def paths_of(names: Sequence[str]) -> list[Path]:
    """The files of names; a dataset on the Hub is downloaded into its cache."""
    found: list[Path] = []
    for name in names:
        is_on_hub = name.count("/") == 1 and not Path(name).exists() and not Path(name).parent.exists()
        found += download.rows_on_the_hub(name) if is_on_hub else named_files([name])
    return found


def _section(recipe: Recipe) -> FinetuneSection:
    if recipe.finetune is None:
        raise UserError(f"the recipe {recipe.name} has no [finetune] section", hint="add it, with finetune.data")
    return recipe.finetune


def _cache_path(paths: list[Path], recipe: Recipe, tokenizer: Tokenizer, template: Template) -> Path:
    tune = _section(recipe)
    inputs = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    choices = tune.model_dump(include={"format", "user_marker", "assistant_marker", "system", "loss", "overlong",
                                       "untrained", "bad_rows"})  # fmt: skip
    depends = [VERSION, inputs, choices, recipe.data.sequence_length, tokenizer.fingerprint, template.source]
    depends.append(dict(template.specials))
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
    return paths[0].parent / f".steelyard-{digest}.npz"


# What NumPy and zipfile raise for a corrupt file.
READ_ERRORS = (
    OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, SyntaxError, TokenError,
    zipfile.BadZipFile,
)  # fmt: skip


def _write_cache(corpus: Corpus, path: Path) -> None:
    samples, stats = corpus
    with files.atomic_file(path, "wb") as file:
        np.savez(
            file,
            ids=np.concatenate([each.ids for each in samples]),
            lengths=np.array([len(each.ids) for each in samples], dtype=np.int64),
            loss_mask=np.packbits(np.concatenate([each.loss_mask for each in samples])),
            counts=np.frombuffer(json.dumps(stats.counts).encode(), dtype=np.uint8),
        )
    newest = sorted(path.parent.glob(CACHE_FILES), key=lambda each: each.stat().st_mtime_ns, reverse=True)
    for old in newest[CACHES_TO_KEEP:]:
        old.unlink(missing_ok=True)


def _read_cache(path: Path) -> Corpus | None:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, lengths = arrays["ids"], arrays["lengths"]
            loss_mask = np.unpackbits(arrays["loss_mask"], count=len(ids)).astype(np.bool_)
            stats = EncodeStats()
            stats.counts.update(loads(arrays["counts"].tobytes()))
        with contextlib.suppress(OSError):
            path.touch()  # Mark it as recently used.
    except FileNotFoundError:
        return None
    except READ_ERRORS:
        console.warn(f"the cache {path} is corrupt and is rebuilt")
        return None
    ends = np.cumsum(lengths)[:-1]
    return [Encoded(*each) for each in zip(np.split(ids, ends), np.split(loss_mask, ends), strict=True)], stats
