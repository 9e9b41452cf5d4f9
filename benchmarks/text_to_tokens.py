"""Text to token files: steelyard compared with Megatron's preprocessing and with the fastest library with equal ids.

    python benchmarks/text_to_tokens.py --tokenizer vocab.json,merges.txt --text prose.txt --text more.txt
    [--mebibytes 256]

Everything runs in one call on the same documents. Rates are MiB of text per CPU second over all processes, that is, per
core.

- Megatron's preprocessing: a worker turns text into token strings and those into ids with a Hugging Face tokenizer, and
  sends lists to one writer, which uses megatron-core's builder. It is slow, so it gets only the first 4 MiB.
- Encoding only: each library on documents in memory; the ids are discarded. They are checked for equality first.
- steelyard: the full command, from the jsonl on disk to the finished token files. The start of its processes, which
  does not grow with the corpus, is measured on eight documents. Rates are shown with and without it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
MEBIBYTE = 1 << 20
DOCUMENT_BYTES = 4096


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", action="append", required=True, type=Path)
    parser.add_argument("--mebibytes", type=int, default=256)
    options = parser.parse_args()
    documents = make_documents(options.text)
    size = sum(len(document.encode()) for document in documents) / MEBIBYTE
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        repeats = max(1, round(options.mebibytes / size))
        with open(corpus, "w", encoding="utf-8") as file:
            for _ in range(repeats):
                file.writelines(json.dumps({"text": d}, ensure_ascii=False) + "\n" for d in documents)
        print(f"{len(documents)} documents, {size:.1f} MiB of text, repeated {repeats} times\n")
        rows = [("Megatron's preprocessing, text to files", megatrons_way(options.tokenizer, documents, folder))]
        rows += encoding_only(options.tokenizer, documents, repeats)
        few = Path(folder) / "few.jsonl"
        few.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents[:8]), encoding="utf-8")
        start, start_wall = steelyard(options.tokenizer, few, folder, 2)
        one, one_wall = steelyard(options.tokenizer, corpus, folder, 1)
        _, two_wall = steelyard(options.tokenizer, corpus, folder, 2)
        total = size * repeats
        rows.append(("steelyard, text to files, including start", total / one))
        rows.append(("steelyard, text to files", total / (one - start)))
    for name, rate in rows:
        print(f"{name:45} {rate:8.2f} MiB per CPU second")
    best_name, best = max(rows[1:-2], key=lambda row: row[1])
    print(f"\nsteelyard relative to Megatron's preprocessing: {rows[-1][1] / rows[0][1]:.1f}")
    print(f"steelyard relative to encoding only with {best_name}: {rows[-1][1] / best:.2f}")
    faster = (one_wall - start_wall) / (two_wall - start_wall)
    print(f"wall-time speedup from 1 to 2 workers: {faster:.2f}; including start: {one_wall / two_wall:.2f}")


def make_documents(paths: list[Path]) -> list[str]:
    """Documents of a few kilobytes, split between lines."""
    documents, lines, size = [], [], 0
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            lines.append(line)
            size += len(line)
            if size >= DOCUMENT_BYTES:
                documents.append("".join(lines))
                lines, size = [], 0
    return [*documents, "".join(lines)] if lines else documents


def encoding_only(source: str, documents: list[str], repeats: int) -> list[tuple[str, float]]:
    """The rate of each library, on text in memory."""
    from steelyard.text import tokenizer as tokenizers

    loaded = tokenizers.load_tokenizer(source)
    reference = [loaded.encode(document) for document in documents]
    candidates = {}
    if hasattr(loaded, "inner") and hasattr(loaded.inner, "encode_batch_fast"):
        candidates["tokenizers, encode_batch_fast"] = (
            lambda: [e.ids for e in loaded.inner.encode_batch_fast(documents, add_special_tokens=False)], 1
        )  # fmt: skip
        candidates |= _tiktoken(loaded, documents)
        import gigatoken

        fast = gigatoken.Tokenizer.from_json(loaded.inner.to_str())
        candidates["gigatoken, encode"] = (lambda: [fast.encode(document) for document in documents], repeats)
    else:
        candidates["sentencepiece, encode"] = (lambda: loaded.inner.encode(documents, num_threads=1), min(repeats, 4))
    rows = []
    size = sum(len(document.encode()) for document in documents) / MEBIBYTE
    for name, (encode, times) in candidates.items():
        if [list(ids) for ids in encode()] != reference:
            print(f"{name}: skipped, its ids differ")
            continue
        start = time.process_time()
        for _ in range(times):
            encode()
        rows.append((name, size * times / (time.process_time() - start)))
    return rows


def _tiktoken(loaded, documents):
    try:
        import tiktoken
    except ImportError:
        return {}
    decoder = {character: byte for byte, character in _byte_characters().items()}
    ranks = {
        bytes(decoder[c] for c in token): number
        for token, number in loaded.inner.get_vocab(with_added_tokens=False).items()
        if all(c in decoder for c in token)
    }
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return {"tiktoken, encode_ordinary": (lambda: [encoding.encode_ordinary(document) for document in documents], 2)}


def _byte_characters() -> dict[int, str]:
    """The printable characters for bytes in byte-level vocabularies."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def megatrons_way(source: str, documents: list[str], folder: str) -> float:
    """The rate of Megatron's preprocessing: a worker that sends lists, and one writer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    some, size = [], 0
    for document in documents:
        if size > 4 * MEBIBYTE:
            break
        some.append(json.dumps({"text": document}))
        size += len(document.encode())
    with multiprocessing.get_context("spawn").Pool(1, _load, (source,)) as pool:
        before = time.process_time() + pool.apply(time.process_time)
        builder = IndexedDatasetBuilder(f"{folder}/megatron.bin", dtype=__import__("numpy").uint16)
        for ids in pool.imap(_tokens_then_ids, some, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)])
        builder.finalize(f"{folder}/megatron.idx")
        return size / MEBIBYTE / (time.process_time() + pool.apply(time.process_time) - before)


def _load(source: str) -> None:
    global _tokens, _ids
    from steelyard.text import tokenizer as tokenizers

    inner = tokenizers.load_tokenizer(source).inner
    if hasattr(inner, "piece_to_id"):
        _tokens, _ids = inner.encode_as_pieces, inner.piece_to_id
    else:
        from transformers import PreTrainedTokenizerFast

        wrapped = PreTrainedTokenizerFast(tokenizer_object=inner)
        _tokens, _ids = wrapped.tokenize, wrapped.convert_tokens_to_ids


def _tokens_then_ids(line: str) -> list[int]:
    return _ids(_tokens(json.loads(line)["text"]))


def steelyard(source: str, corpus: Path, folder: str, workers: int) -> tuple[float, float]:
    """Run the full command; returns CPU seconds and wall seconds."""
    words = ["data", "tokenize", "--input", str(corpus), "--tokenizer", source, "--workers", str(workers)]
    words += ["--output-prefix", f"{folder}/{corpus.stem}{workers}", "--append-eod", "--quiet"]
    before, start = _cpu(), time.perf_counter()
    subprocess.run([sys.executable, "-m", "steelyard", *words], check=True, capture_output=True)
    return _cpu() - before, time.perf_counter() - start


def _cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
