"""Remove exact duplicates from a corpus: of all documents with one text, the first stays.

The output folder gets a copy of each input file, in its format and without the duplicates, `removed.jsonl` with every
removed document and where its text stays, and `dedup.json`, the report. Lines that stay are the same bytes.

Two passes read the corpus: the first writes the hash of each document (`exact_duplicates.py`), the second writes the
files. A journal in `.dedup/` records what is on disk after each chunk of some megabytes. After a kill the same command
cuts the files back to the journal and continues, so the result never depends on where it was killed. A parquet file,
which cannot be continued, begins again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from steelyard.core import files, units
from steelyard.core.console import ProgressBar, console
from steelyard.core.errors import Interrupted, UserError
from steelyard.core.safe_parse import read_json_object
from steelyard.text import formats
from steelyard.text.corpus import (
    PIECE_BYTES,
    BadDocument,
    CorpusChunk,
    DocumentMode,
    bad_document_error,
    corpus_files,
    pieces,
    raw_documents,
    records,
    text_of,
)
from steelyard.text.exact_duplicates import HASH_BYTES, Duplicates, hash_of

WORK, REPORT, REMOVED = ".dedup", "dedup.json", "removed.jsonl"
HINT = "fix it; `steelyard data stats` counts all documents that cannot be read"


@dataclass(frozen=True)
class DedupJob:
    """Which files to read and how, and the output folder."""

    inputs: tuple[str, ...]
    output: Path
    mode: DocumentMode = "line"
    key: str = "text"
    piece_bytes: int = PIECE_BYTES

    @property
    def work(self) -> Path:
        """The folder of an unfinished job."""
        return self.output / WORK


@dataclass(frozen=True)
class Journal:
    """What is complete on disk: in which pass, up to which file and chunk, and the sizes of the files there."""

    is_writing: bool = False
    file: int = 0
    chunk: int = 0
    documents: int = 0
    """Documents of all files up to there."""
    file_bytes: int = 0
    removed_bytes: int = 0
    first_documents: list[int] = field(default_factory=list)
    """The number of the first document of each file so far."""
    removed: dict[str, int] = field(default_factory=dict)
    """Removed documents by file."""


def dedup(job: DedupJob) -> dict[str, Any]:
    """Run or resume the job, unless it is finished; returns the report."""
    found = corpus_files(job.inputs)
    made_of = {
        "files": {name: [path.stat().st_size, path.stat().st_mtime_ns] for name, path in found.items()},
        "document": job.mode,
        "key": job.key,
        "chunk": job.piece_bytes,
    }
    _refuse_overlap(job, found)
    if (job.output / REPORT).is_file():
        return _finished(job, made_of)
    if job.output.exists() and not job.work.is_dir() and (not job.output.is_dir() or any(job.output.iterdir())):
        raise UserError(f"{job.output} already exists and is not empty", hint="choose another output folder")
    job.work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(files.locked(job.work / "lock"))
        except BlockingIOError:
            raise UserError(f"{job.output} is in use by another process", hint="wait for it") from None
        return _Run(job, found).result(made_of)


def _refuse_overlap(job: DedupJob, found: dict[str, Path]) -> None:
    output = job.output.resolve()
    folders = [Path(name).resolve() for name in job.inputs if Path(name).is_dir()]
    if any(output in path.resolve().parents for path in found.values()):
        raise UserError(f"{job.output} contains an input file", hint="choose another output folder")
    if any(output.is_relative_to(folder) for folder in folders):
        raise UserError(f"{job.output} is inside an input folder", hint="choose another output folder")
    for name in (REMOVED, REPORT):
        if name in found:
            raise UserError(f"an input file is called {name}, like a file that this command writes", hint="rename it")


def _finished(job: DedupJob, made_of: dict[str, Any]) -> dict[str, Any]:
    report = read_json_object(job.output / REPORT)
    if report.get("made_of") != made_of:
        raise UserError(f"{job.output} is the output of another job", hint="choose another output folder")
    console.say(f"{job.output}: already finished, nothing to do")
    shutil.rmtree(job.work, ignore_errors=True)  # Left if it was killed between its last two steps.
    return report


class _Run:
    """One run of the command, from the journal on."""

    def __init__(self, job: DedupJob, found: dict[str, Path]) -> None:
        self.job, self.names, self.paths = job, list(found), list(found.values())
        self.hashes, self.at = job.work / "hashes", Journal()

    def result(self, made_of: dict[str, Any]) -> dict[str, Any]:
        """Do what the journal does not have, and write the report."""
        path = self.job.work / "journal.json"
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            if saved.pop("made_of") != made_of:
                raise UserError(
                    f"{self.job.work} is of an unfinished job with other files or options",
                    hint="remove the output folder, or choose another one",
                )
            self.at = Journal(**saved)
            console.say(
                f"resuming at document {self.at.documents} of the {'second' if self.at.is_writing else 'first'} pass"
            )
        self.made_of = made_of
        try:
            if not self.at.is_writing:
                self._hash_all()
            duplicates = Duplicates(self.hashes, self.job.work / "duplicates")
            self._write_all(duplicates)
        except UserError:  # The input must be fixed first, and then this is another job.
            shutil.rmtree(self.job.work)
            with contextlib.suppress(OSError):
                self.job.output.rmdir()
            raise
        except Interrupted:
            raise Interrupted(f"finished chunks are kept in {self.job.work}; the same command resumes") from None
        documents = self.hashes.stat().st_size // HASH_BYTES
        removed = sum(self.at.removed.values())
        report = {
            "output": str(self.job.output), "documents": documents, "kept": documents - removed, "removed": removed,
            "files": {name: {"removed": self.at.removed.get(name, 0)} for name in self.names},
            "removed_file": str(self.job.output / REMOVED), "made_of": made_of,
        }  # fmt: skip
        files.write_json(self.job.output / REPORT, report)
        shutil.rmtree(self.job.work)
        return report

    def _save(self, **changes: Any) -> None:
        self.at = replace(self.at, **changes)
        files.write_json(self.job.work / "journal.json", {**asdict(self.at), "made_of": self.made_of})

    def _chunks(self, number: int, progress: ProgressBar) -> Iterator[CorpusChunk]:
        """The chunks of a file that the journal does not have."""
        for index, piece in enumerate(pieces(self.paths[number], self.job.mode, self.job.piece_bytes)):
            if index >= self.at.chunk:
                yield piece
            else:
                progress.done_before += piece.file_bytes
            progress.advance(piece.file_bytes, note=f"{units.count(self.at.documents)} documents")

    def _pass(self, task: str) -> contextlib.AbstractContextManager[ProgressBar]:
        sizes = [path.stat().st_size for path in self.paths]
        return console.progress(task, sum(sizes), "B", done=sum(sizes[: self.at.file]))

    def _hash_all(self) -> None:
        size = self.at.documents * HASH_BYTES
        with _cut_to(self.hashes, size) as file, self._pass("hash documents") as progress:
            for number in range(self.at.file, len(self.paths)):
                if self.at.chunk == 0:
                    firsts = [*self.at.first_documents[:number], self.at.documents]
                    self._save(first_documents=firsts)
                for piece in self._chunks(number, progress):
                    hashes = [hash_of(text) for text in self._texts(piece)]
                    file.write(b"".join(hashes))
                    _sync(file)
                    self._save(chunk=self.at.chunk + 1, documents=self.at.documents + len(hashes))
                self._save(file=number + 1, chunk=0)
            self._save(is_writing=True, file=0, chunk=0, documents=0)

    def _texts(self, piece: CorpusChunk) -> Iterator[str]:
        try:
            for number, record in enumerate(records(piece)):
                yield text_of(record, self.job.key, number)
        except BadDocument as error:
            raise bad_document_error(piece, error, HINT) from None

    def _write_all(self, duplicates: Duplicates) -> None:
        path = self.job.output / REMOVED
        with _cut_to(path, self.at.removed_bytes) as removed, self._pass("write") as progress:
            for number in range(self.at.file, len(self.paths)):
                self._write_file(number, duplicates, removed, progress)

    def _write_file(self, number: int, duplicates: Duplicates, removed: IO[bytes], progress: ProgressBar) -> None:
        name, part, target = self.names[number], self.job.work / "part", self.job.output / self.names[number]
        if self.at.file_bytes and not part.exists():  # Killed between the rename and its entry in the journal.
            self._save(file=number + 1, chunk=0, file_bytes=0)
            return
        format_ = formats.format_of(self.paths[number])
        documents, count = self.at.documents, self.at.removed.get(name, 0)
        with _cut_to(part, self.at.file_bytes) as file, contextlib.ExitStack() as stack:
            write_rows = stack.enter_context(_parquet(file, format_)) if format_.base == "parquet" else None
            for piece in self._chunks(number, progress):
                keep, gone = self._split(piece, documents, duplicates)
                documents, count = documents + len(keep), count + len(gone)
                removed.writelines(json.dumps(line).encode() + b"\n" for line in gone)
                if write_rows is not None:
                    write_rows(piece, keep)
                    continue
                if any(keep):
                    with formats.writing(file, format_.compression) as packed:
                        packed.write(b"".join(_kept(piece, keep)))
                _sync(file)
                self._save_counts(name, removed, documents, count, chunk=self.at.chunk + 1, file_bytes=file.tell())
        if count < documents - self.at.first_documents[number]:
            files.sync_file(part)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(part, target)
            files.sync_folder(target.parent)
        self._save_counts(name, removed, documents, count, file=number + 1, chunk=0, file_bytes=0)

    def _save_counts(self, name: str, removed: IO[bytes], documents: int, count: int, **changes: int) -> None:
        _sync(removed)
        counts = {**self.at.removed, name: count}
        self._save(documents=documents, removed=counts, removed_bytes=removed.tell(), **changes)

    def _split(self, piece: CorpusChunk, start: int, duplicates: Duplicates) -> tuple[list[bool], list[dict[str, Any]]]:
        """Which documents of a chunk stay, and the lines of `removed.jsonl` for the others."""
        texts = list(self._texts(piece))
        first_of = duplicates.between(start, start + len(texts))
        gone = [
            {**self._place(document), "same_as": self._place(first), "text": texts[document - start]}
            for document, first in first_of.items()
        ]
        return [start + index not in first_of for index in range(len(texts))], gone

    def _place(self, document: int) -> dict[str, Any]:
        """The file of a document, and its number there, counted from 1."""
        firsts = self.at.first_documents
        number = bisect_right(firsts, document) - 1
        return {"file": self.names[number], "document": document - firsts[number] + 1}


def _cut_to(path: Path, size: int) -> IO[bytes]:
    """Open a file to continue it after its first `size` bytes."""
    file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115
    file.truncate(size)
    file.seek(size)
    return file


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _kept(piece: CorpusChunk, keep: list[bool]) -> Iterator[bytes]:
    """The bytes of the documents that stay, each with its separator."""
    end = {"line": b"\n", "blank": b"\n\n", "file": b""}[piece.mode]
    for raw, stays in zip(raw_documents(piece), keep, strict=True):
        if stays:
            yield raw if raw.endswith(b"\n") and piece.mode == "line" else raw + end


@contextlib.contextmanager
def _parquet(file: IO[bytes], format_: formats.CorpusFormat) -> Iterator[Any]:
    """A function that writes the rows of a row group that stay, with all their columns."""
    import pyarrow
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        packed = stack.enter_context(formats.writing(file, format_.compression))
        writer: list[Any] = []

        def write(piece: CorpusChunk, keep: list[bool]) -> None:
            source = parquet.ParquetFile(piece.unpacked)
            table = source.read_row_group(piece.start).filter(pyarrow.array(keep))
            if not writer:
                made = parquet.ParquetWriter(packed, source.schema_arrow, compression="zstd", write_page_checksum=True)
                writer.append(stack.enter_context(made))
            writer[0].write_table(table)

        yield write
