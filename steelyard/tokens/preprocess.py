"""Tokenize text to token files with many processes and bounded memory; a killed job can be resumed.

The corpus is split into chunks (see `text.corpus`). A worker reads, parses and encodes a chunk and writes its tokens
and the length of each document to the folder of the job, `<prefix>.tokenize/`, by rename. The chunks are joined in
order, so the result does not depend on the number of workers or on how often the job was killed. At the end
`<prefix>.tokenize.json` records the inputs and options.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Interrupted, RuntimeFailure, UserError
from steelyard.core.safe_parse import read_object
from steelyard.core.units import count
from steelyard.text import tokenizer as tokenizers
from steelyard.text.corpus import (
    BadDocument,
    CorpusChunk,
    bad_document_error,
    named_files,
    pieces,
    records,
    text_of,
    where,
)
from steelyard.tokens import encode_workers, merge
from steelyard.tokens import tokenize_job as jobs
from steelyard.tokens.indexed_dataset import token_dtype
from steelyard.tokens.inspect import summary
from steelyard.tokens.tokenize_job import TokenizeJob

DOCUMENTS_AT_ONCE = 256
EXAMPLES_SHOWN = 5


@dataclass
class TokenizeStats:
    """Counts of documents and tokens. `examples` lists the first bad documents."""

    documents: int = 0
    skipped: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another chunk."""
        self.documents += other["documents"]
        self.skipped += other["skipped"]
        self.examples = [*self.examples, *other["examples"]][:EXAMPLES_SHOWN]
        for mine, theirs in ((self.tokens, other["tokens"]), (self.unknown, other.get("unknown", {}))):
            for key, number in theirs.items():
                mine[key] = mine.get(key, 0) + number


def tokenize(
    job: TokenizeJob, worker_count: int = 1, overwrite: bool = False, allow_unknown: bool = False
) -> dict[str, Any]:
    """Run or resume the job, unless it is finished; returns a summary of the files."""
    paths = named_files(job.inputs)
    tokenizer = tokenizers.load_tokenizer(job.tokenizer)
    if job.append_eod:
        _ = tokenizer.end_of_document  # Raises now instead of in a worker, if there is none.
    made_of = jobs.signature(job, paths, tokenizer.fingerprint)
    done = jobs.finished(job, made_of, overwrite)
    if done is not None:
        console.say(f"{job.prefix}: already finished, nothing to do")
        shutil.rmtree(job.folder, ignore_errors=True)  # Left if it was killed between its last two steps.
        return done
    job.folder.mkdir(parents=True, exist_ok=True)
    with encode_workers.sole_owner(job.folder):
        jobs.begin(job, made_of, overwrite)
        try:
            tally, written = _encode_and_join(job, paths, worker_count, tokenizer, allow_unknown)
        except tokenizers.TooManyUnknownError:
            raise  # The chunks are kept: with --allow-unknown they are joined.
        except Interrupted:
            raise Interrupted(
                f"finished chunks are kept in {job.folder}; run the same command again to resume"
            ) from None
        except UserError:
            shutil.rmtree(job.folder)  # The input must be fixed first, and then the chunks are useless.
            raise
        result = {"prefix": job.prefix, **asdict(tally), "files": written, "tokenizer": tokenizer.kind}
        files.write_json(job.record, {"made_of": made_of, "result": result})
        shutil.rmtree(job.folder)
    return result


def _encode_and_join(
    job: TokenizeJob, paths: list[Path], worker_count: int, tokenizer: tokenizers.Tokenizer, allow_unknown: bool
) -> tuple[TokenizeStats, dict[str, dict[str, Any]]]:
    """Encode the missing chunks, and join chunks in order while others are still being encoded."""
    tally, dtype = TokenizeStats(), token_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        joiners = {
            key: stack.enter_context(merge.joining(job.output(key), dtype, job.fixed_length)) for key in job.keys
        }
        for number, piece_tally in enumerate(_encoded(job, paths, worker_count)):
            tally.add(piece_tally)
            for key, joiner in joiners.items():
                joiner.append(_part(job.folder, number, key, "tokens"))
        for key, unknown in tally.unknown.items():
            tokenizers.report_unknown(unknown, tally.tokens[key], tokenizer, job.output(key), allow_unknown)
    written = {key: summary(job.output(key)) | joiner.dropped() for key, joiner in joiners.items()}
    return tally, written


def _encoded(job: TokenizeJob, paths: list[Path], worker_count: int) -> Iterator[dict[str, Any]]:
    """The counts of each chunk, in order, so that the first error is always the same."""
    waiting: deque[tuple[int, dict[str, Any] | Future[dict[str, Any]]]] = deque()
    total, documents = sum(path.stat().st_size for path in paths), 0
    pool = ProcessPoolExecutor(worker_count, get_context("spawn"), encode_workers.prepare, (job.tokenizer, os.getpid()))
    try:
        with console.progress("tokenize", total, "B") as progress:

            def first() -> dict[str, Any]:
                nonlocal documents
                weight, pending = waiting.popleft()
                result = pending if isinstance(pending, dict) else pending.result()
                documents += result["documents"]
                progress.advance(weight, note=f"{count(documents)} documents")
                return result

            chunks = (piece for path in paths for piece in pieces(path, job.document, job.piece_bytes))
            for number, piece in enumerate(chunks):
                finished = _finished(job, number)
                waiting.append((piece.file_bytes, finished or pool.submit(encode_piece, job, number, piece)))
                progress.done_before += piece.file_bytes if finished else 0
                # The decompressed copy of a parquet file is removed after its last chunk.
                most = 0 if piece.unpacked is not None and piece.unpacked != piece.path else 2 * worker_count
                while len(waiting) > most:
                    yield first()
            while waiting:
                yield first()
    except BrokenExecutor:
        raise RuntimeFailure(
            "a worker was killed, perhaps because the machine ran out of memory",
            hint=f"finished chunks are kept in {job.folder}; run the same command again to resume",
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def encode_piece(job: TokenizeJob, number: int, piece: CorpusChunk) -> dict[str, Any]:
    """Encode one chunk in a worker, and write it to the folder of the job."""
    tokenizer = encode_workers.tokenizer()
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_document] if job.append_eod else [], dtype=np.uint32)
    bad: list[BadDocument] | None = [] if job.on_bad_line == "skip" else None
    texts = _texts(piece, job.keys, bad)
    lengths: dict[str, list[np.ndarray[Any, Any]]] = {key: [] for key in job.keys}
    tokens, unknown = dict.fromkeys(job.keys, 0), dict.fromkeys(job.keys, 0)
    documents = 0
    streams = {key: open(_part(job.folder, number, key, "unfinished"), "wb") for key in job.keys}  # noqa: SIM115
    try:
        while rows := list(islice(texts, DOCUMENTS_AT_ONCE)):
            documents += len(rows)
            for column, key in enumerate(job.keys):
                encoded = tokenizer.encode_batch([row[column] for row in rows])
                sizes = np.array([len(ids) for ids in encoded], dtype=np.int32)
                unknown[key] += sum(tokenizers.count_unknown(ids, tokenizer) for ids in encoded)
                if job.append_eod:  # As in Megatron, an empty document stays empty.
                    sizes[sizes > 0] += 1
                    encoded = [part for ids in encoded if len(ids) for part in (ids, end)]
                joined = np.concatenate(encoded) if encoded else end[:0]
                tokenizer.check_ids(joined)
                streams[key].write(joined.astype(dtype, copy=False).tobytes())
                lengths[key].append(sizes)
                tokens[key] += int(sizes.sum(dtype=np.int64))
    finally:
        for stream in streams.values():
            stream.close()
    for key in job.keys:
        with files.atomic_file(_part(job.folder, number, key, "lengths"), "wb") as file:
            for sizes in lengths[key]:
                file.write(sizes.tobytes())
        os.replace(_part(job.folder, number, key, "unfinished"), _part(job.folder, number, key, "tokens"))
    examples = [f"{where(piece, error.number)}: {error.reason}" for error in (bad or [])[:EXAMPLES_SHOWN]]
    tally = TokenizeStats(documents, len(bad or []), tokens, unknown, examples)
    files.write_json(job.folder / f"{number:08d}.json", asdict(tally))
    return asdict(tally)


def _texts(piece: CorpusChunk, keys: tuple[str, ...], bad: list[BadDocument] | None) -> Iterator[list[str]]:
    try:
        for number, record in enumerate(records(piece, bad)):
            try:
                yield [text_of(record, key, number) for key in keys]
            except BadDocument as error:
                if bad is None:
                    raise
                bad.append(error)
    except BadDocument as error:
        raise bad_document_error(piece, error, "fix it, or pass --on-bad-line skip") from None


def _part(folder: Path, number: int, key: str, kind: str) -> Path:
    return folder / f"{number:08d}.{key}.{kind}"


def _finished(job: TokenizeJob, number: int) -> dict[str, Any] | None:
    return read_object(job.folder / f"{number:08d}.json") or None
