"""From files of conversations to the rows that are trained on.

Encoding a large set takes minutes, so its result is kept beside the first file, under a name that is a digest of
everything it depends on:

    .steelyard-<digest>.npz    ids (int32, all conversations in a row), lengths (int64), learned (packed bits),
                               counts (JSON: what became of the rows)

Of the files in a folder the few that were used last stay.
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

VERSION = 3  # of what the kept files mean
KEPT, KEEP = ".steelyard-*.npz", 8  # files in a folder: training and validation of a few settings
EMPTY = "the line is empty"


Corpus = tuple[list[Encoded], EncodeStats]


def open_corpus(recipe: Recipe, names: Sequence[str], tokenizer: Tokenizer) -> Corpus:
    """Read, write out and encode the conversations of some files, or find that done; and what became of the rest."""
    tune = _section(recipe)
    template = templates.load(tune.template, tokenizer)
    paths = paths_of(names)
    kept = _kept_at(paths, recipe, tokenizer, template)
    found = _reopened(kept)
    if found is not None:
        return found
    tally = EncodeStats()
    encoded = _encoded(conversations(paths, tune, tally), template, tokenizer, tune, tally)
    length = recipe.data.sequence_length
    corpus = list(fitting(encoded, length, tune.overlong, tune.untrained, tally)), tally
    _refuse_empty(corpus[0], names, tally)
    with contextlib.suppress(OSError):  # A folder that may only be read costs time, not the run.
        _keep(corpus, kept)
    return corpus


def conversations(paths: Sequence[Path], tune: FinetuneSection, tally: EncodeStats) -> Iterator[Conversation]:
    """The conversations of files, in order. A row that cannot be read is refused, or left out and counted."""
    name = tune.format
    if name is not None and name not in dataset_formats.NAMES:
        raise UserError(
            f"finetune.format {name} is not known", hint=f"the formats are {', '.join(dataset_formats.NAMES)}"
        )
    rows = _rows(paths, tune, tally)
    first = next(rows, None)
    if first is None:
        raise UserError(f"{', '.join(map(str, paths))} holds no rows")
    name = name or dataset_formats.format_of(*first)
    markers = dataset_formats.Markers(tune.user_marker, tune.assistant_marker)
    if name == "preference":
        raise UserError("these rows are preferences, not conversations", hint="add [finetune.dpo] to learn from them")
    found = _from(first, rows)
    if name == "flat-tree":
        name, found = "messages", dataset_formats.threads(found)
    for row, place in found:
        try:
            yield dataset_formats.conversation(row, name, markers, place, tune.system)
        except BadRow as error:
            _complain(error, place, tune, tally)


def preferences(paths: Sequence[Path], tune: FinetuneSection, tally: EncodeStats) -> Iterator[Preference]:
    """The pairs of answers of files, in order; as for conversations."""
    for row, place in _rows(paths, tune, tally):
        try:
            if not {"chosen", "rejected"} <= row.keys():
                raise BadRow("a preference has the keys chosen and rejected, and perhaps prompt")
            yield dataset_formats.preference(row, place, tune.system)
        except BadRow as error:
            _complain(error, place, tune, tally)


def open_pairs(
    recipe: Recipe, names: Sequence[str], tokenizer: Tokenizer
) -> tuple[list[tuple[Encoded, Encoded]], EncodeStats]:
    """Read and encode pairs of answers, of which the last is learned. A pair that does not fit is cut on both sides."""
    tune, tally = _section(recipe), EncodeStats()
    template, length = templates.load(tune.template, tokenizer), recipe.data.sequence_length
    pairs: list[tuple[Encoded, Encoded]] = []
    for found in preferences(paths_of(names), tune, tally):
        both, place = (found.chosen, found.rejected), found.chosen.where
        try:
            sides = [(encode(each, template, tokenizer, "completion"), place) for each in both]
        except BadRow as error:
            _complain(error, place, tune, tally)
            continue
        fit = list(fitting(sides, length, tune.overlong, tune.untrained, tally))
        if len(fit) == 2:
            pairs.append((fit[0], fit[1]))
    _refuse_empty(pairs, names, tally)
    return pairs, tally


def _encoded(
    found: Iterable[Conversation], template: Template, tokenizer: Tokenizer, tune: FinetuneSection, tally: EncodeStats
) -> Iterator[tuple[Encoded, str]]:
    for each in found:
        try:
            yield encode(each, template, tokenizer, tune.loss), each.where
        except BadRow as error:
            _complain(error, each.where, tune, tally)


def _refuse_empty(found: Sequence[Any], names: Sequence[str], tally: EncodeStats) -> None:
    if not found:
        raise UserError(f"nothing in {', '.join(names)} can be learned from", hint="; ".join(tally.lines()) or None)


def _rows(paths: Sequence[Path], tune: FinetuneSection, tally: EncodeStats) -> Iterator[tuple[Row, str]]:
    for path in paths:
        if path.suffix == ".json" and _starts_with(path, b"["):
            yield from _listed(path, tune, tally)
            continue
        before = 0
        for piece in pieces(path):
            bad: list[BadDocument] = []
            number = 0
            try:
                for row in records(piece, bad):
                    number += 1
                    yield row, f"{path}:{before + number + len(bad)}"
            except BadDocument as damage:  # Of a parquet file: what follows in it is lost as well.
                bad.append(damage)
            for document in bad:
                if document.reason != EMPTY:
                    _complain(document, where(piece, document.number), tune, tally)
            before += number + len(bad)


def _starts_with(path: Path, sign: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).lstrip().startswith(sign)


def _listed(path: Path, tune: FinetuneSection, tally: EncodeStats) -> Iterator[tuple[Row, str]]:
    """The rows of a file that is one JSON list, as Alpaca's is."""
    try:
        rows = loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}", hint="a list of rows, or a row a line") from None
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield row, f"{path}:{number}"
        else:
            _complain(BadRow("a row must be an object"), f"{path}:{number}", tune, tally)


def _complain(error: BadRow | BadDocument, place: str, tune: FinetuneSection, tally: EncodeStats) -> None:
    reason = error.reason if isinstance(error, BadDocument) else str(error)
    if tune.bad_rows == "refuse":
        raise UserError(reason, where=place, hint='finetune.bad_rows = "drop" leaves such rows out and counts them')
    tally.counts["bad"] += 1


def _from(first: tuple[Row, str], rest: Iterator[tuple[Row, str]]) -> Iterator[tuple[Row, str]]:
    yield first
    yield from rest


def paths_of(names: Sequence[str]) -> list[Path]:
    """The files that names stand for; a data set on the hub is fetched into its cache."""
    found: list[Path] = []
    for name in names:
        is_on_hub = name.count("/") == 1 and not Path(name).exists() and not Path(name).parent.exists()
        found += download.rows_on_the_hub(name) if is_on_hub else named_files([name])
    return found


def _section(recipe: Recipe) -> FinetuneSection:
    if recipe.finetune is None:
        raise UserError(f"the recipe {recipe.name} has no [finetune]", hint="say there what to learn from")
    return recipe.finetune


def _kept_at(paths: list[Path], recipe: Recipe, tokenizer: Tokenizer, template: Template) -> Path:
    tune = _section(recipe)
    inputs = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    choices = tune.model_dump(include={"format", "user_marker", "assistant_marker", "system", "loss", "overlong",
                                       "untrained", "bad_rows"})  # fmt: skip
    depends = [VERSION, inputs, choices, recipe.data.sequence_length, tokenizer.fingerprint, template.source]
    depends.append(dict(template.specials))
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:24]
    return paths[0].parent / f".steelyard-{digest}.npz"


# What NumPy and zipfile raise for a file that is not as it was written.
DAMAGE = (
    OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError, SyntaxError, TokenError,
    zipfile.BadZipFile,
)  # fmt: skip


def _keep(corpus: Corpus, path: Path) -> None:
    samples, tally = corpus
    with files.atomic_file(path, "wb") as file:
        np.savez(
            file,
            ids=np.concatenate([each.ids for each in samples]),
            lengths=np.array([len(each.ids) for each in samples], dtype=np.int64),
            learned=np.packbits(np.concatenate([each.learned for each in samples])),
            counts=np.frombuffer(json.dumps(tally.counts).encode(), dtype=np.uint8),
        )
    newest = sorted(path.parent.glob(KEPT), key=lambda each: each.stat().st_mtime_ns, reverse=True)
    for old in newest[KEEP:]:
        old.unlink(missing_ok=True)


def _reopened(path: Path) -> Corpus | None:
    try:
        with np.load(path, allow_pickle=False) as kept:
            ids, lengths = kept["ids"], kept["lengths"]
            learned = np.unpackbits(kept["learned"], count=len(ids)).astype(np.bool_)
            tally = EncodeStats()
            tally.counts.update(loads(kept["counts"].tobytes()))
        with contextlib.suppress(OSError):
            path.touch()  # It was used.
    except FileNotFoundError:
        return None
    except DAMAGE:
        console.warn(f"{path} is damaged and is made anew")
        return None
    ends = np.cumsum(lengths)[:-1]
    return [Encoded(*each) for each in zip(np.split(ids, ends), np.split(learned, ends), strict=True)], tally
