"""Build a corpus of English prose and documentation from Debian and PyPI packages of pinned versions.

    python benchmarks/build_corpus.py corpus --cache packages --tokenizer SmolLM2-135M-Instruct.Q4_1.gguf

`corpus_sources.toml` lists the packages of each part. The parts have different sources, and a paragraph of the test or
validation part is removed from what follows. Score the test part only for final figures: settings are chosen on the
validation part. The files are `train.jsonl.zst`, `validation.jsonl.zst`, `test.jsonl.zst` (a document per line) and
`corpus.json` (sizes by source). The text is a function of the package versions; its digests are in the list, and a
difference is an error. `--accept` takes other versions where a pinned one is gone, and prints the new digests.

Needs `apt-get` with today's package lists of Debian 12 (`apt-get update`), `dpkg-deb` and `pip`.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import zstandard

LISTED = Path(__file__).with_name("corpus_sources.toml")
PARTS = ("test", "validation", "train")
WORKERS = 3
LEVEL = 19  # of zstd
LIMIT_BYTES = 60 * 2**20  # at that level
SHORTEST_DOCUMENT, SHORTEST_PARAGRAPH, FEWEST_WORDS = 300, 60, 9
STOPWORDS = frozenset(
    ("the a an of to and is in for that it be this as with or are by on not which can from").split()  # noqa: SIM905
)
DROPPED = re.compile(r"<(script|style|head|nav|footer|pre|svg)\b.*?</\1>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
BLOCKS = re.compile(
    r"</?(p|div|li|[uod]l|d[td]|h[1-6]|t[rdh]|table|section|article|br|blockquote|para|title|note|item|page|info)\b[^>]*>",
    re.IGNORECASE,
)
TAGS, SPACES, BLANK = re.compile(r"<[^>]*>"), re.compile(r"\s+"), re.compile(r"\n\s*\n")
ROFF_ESCAPE = re.compile(r"\\f[A-Z(\[][A-Z]?\]?|\\[&|^/,]|\\s[-+]?\d+|\\\*\(..|\\\((?:bu|em|en)")
ROFF_BREAK = re.compile(r"^[.'](?:PP|P|LP|TP|IP|SH|SS|HP|Pp|Sh|It|TQ)\b.*$", re.MULTILINE)
ROFF_FONT = re.compile(r"^[.'](?:B|I|BR|IR|RB|RI|BI|IB|Nm|Ar|Fl|Xr|Fn|Pa|Em|Sy)\s+", re.MULTILINE)
ROFF_OTHER = re.compile(r"^[.'].*$", re.MULTILINE)
MAN_PAGE = re.compile(r"/man/man\d[a-z]*/[^/]+\.gz$")
TEXTS = re.compile(r"\.(?:x?html?|page|txt|rst|md|text|info(?:-\d+)?)(?:\.gz)?$|\.dict\.dz$")
SKIPPED = re.compile(r"/_sources/|/(?:changelog|NEWS)(?:\.Debian)?\.gz$")
OTHER_LANGUAGES = re.compile(
    r"/(?:(?!en)[a-z]{2}[-_][A-Z]{2}|de|fr|es|it|ja|ru|zh|pl|cs|da|nl|sv|pt|ko|id|vi|ar|fa|tr)/"
)


def main() -> None:
    """Build the corpus of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("packages"), help="the folder of downloaded packages")
    parser.add_argument("--tokenizer", help="count tokens with this tokenizer, or that of this checkpoint")
    parser.add_argument("--accept", action="store_true", help="accept other versions and other digests")
    parser.add_argument("--level", type=int, default=LEVEL, help="of zstd; 3 is much faster")
    options = parser.parse_args()
    listed = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    packages = {part: _fetched(listed[part], options.cache, options.accept) for part in PARTS}
    encode = _counter(options.tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    report: dict[str, Any] = {part: _write(part, packages[part], options, seen, encode) for part in PARTS}
    size = sum(entry["compressed_bytes"] for entry in report.values())
    for part in PARTS:
        entry = report[part]
        tokens = f", {entry['tokens']:,} tokens" if encode else ""
        print(f"{part}: {entry['documents']:,} documents, {entry['bytes']:,} bytes{tokens}, sha256 {entry['sha256']}")
    print(f"compressed: {size / 2**20:.1f} MiB")
    if size > LIMIT_BYTES and options.level >= LEVEL:
        sys.exit(f"error: the files have {size:,} bytes, more than {LIMIT_BYTES:,}")
    wrong = [part for part in PARTS if listed["sha256"].get(part) != report[part]["sha256"]]
    if wrong and not options.accept:
        sys.exit(f"error: the text of {', '.join(wrong)} differs from {LISTED.name}")
    (options.out / "corpus.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _fetched(names: dict[str, str], cache: Path, accept: bool) -> dict[str, Path]:
    """The package files, downloaded where they are missing; every package that cannot be had is named."""
    cache.mkdir(parents=True, exist_ok=True)
    found, missing = {}, []
    for name, version in sorted(names.items()):
        path = _cached(cache, name, version) or _download(cache, name, version)
        if path is None and accept:
            path = _cached(cache, name, None) or _download(cache, name, None)
        if path is None:
            missing.append(f"{name} {version}")
        else:
            found[name] = path
    if missing:
        sys.exit(
            f"error: not available: {', '.join(missing)}; `apt-get update` reads newer package lists, "
            "--accept takes other versions"
        )
    return found


def _cached(cache: Path, name: str, version: str | None) -> Path | None:
    kind, _, package = name.partition(":")
    if kind == "deb":
        wanted = "*" if version is None else version.replace(":", "%3a")
        return next(iter(sorted(cache.glob(f"{package}_{wanted}_*.deb"))), None)
    wanted = "*" if version is None else version
    return next(iter(sorted(cache.glob(f"{package.replace('-', '_')}-{wanted}-*.whl"))), None)


def _download(cache: Path, name: str, version: str | None) -> Path | None:
    kind, _, package = name.partition(":")
    if kind == "deb":
        command = ["apt-get", "-qq", "download", package if version is None else f"{package}={version}"]
    else:
        wanted = package if version is None else f"{package}=={version}"
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", wanted]
    done = subprocess.run(command, cwd=cache, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}", file=sys.stderr)
        return None
    return _cached(cache, name, version)


def _counter(tokenizer: str | None) -> Any:
    """A function that counts the tokens of texts, or None."""
    if tokenizer is None:
        return None
    from steelyard.checkpoint.formats import open_source
    from steelyard.text.tokenizer import load_tokenizer

    loaded = open_source(tokenizer).load_tokenizer() if tokenizer.endswith(".gguf") else load_tokenizer(tokenizer)
    return lambda texts: sum(len(ids) + 1 for ids in loaded.encode_batch(texts))


def _write(
    part: str, packages: dict[str, Path], options: argparse.Namespace, seen: set[bytes], encode: Any
) -> dict[str, Any]:
    """Write a part; the digest is that of the uncompressed file, since compressors change."""
    digest, sources = hashlib.sha256(), {}
    how = {"window_log": 27, "enable_ldm": True, "threads": 2}
    parameters = zstandard.ZstdCompressionParameters.from_level(options.level, **how)
    path = options.out / f"{part}.jsonl.zst"
    compressor = zstandard.ZstdCompressor(compression_params=parameters)
    with Pool(WORKERS) as pool, open(path, "wb") as file, compressor.stream_writer(file) as writer:
        for name, extracted in zip(packages, pool.imap(_extracted, packages.values()), strict=True):
            counts = {"documents": 0, "bytes": 0, "tokens": 0}
            for text in _documents(extracted, seen):
                line = json.dumps({"text": text, "source": name}, ensure_ascii=False).encode() + b"\n"
                digest.update(line)
                writer.write(line)
                counts["documents"] += 1
                counts["bytes"] += len(text.encode())
                counts["tokens"] += encode([text]) if encode else 0
            print(f"{part} {name}: {counts}", file=sys.stderr, flush=True)
            sources[name] = counts
    totals = {key: sum(counts[key] for counts in sources.values()) for key in ("documents", "bytes", "tokens")}
    return {
        **totals, "compressed_bytes": path.stat().st_size, "sha256": digest.hexdigest(),
        "packages": {name: package.name for name, package in packages.items()}, "sources": sources,
    }  # fmt: skip


def _documents(extracted: list[list[str]], seen: set[bytes]) -> Iterator[str]:
    """The documents of a package, without paragraphs that were seen before."""
    for paragraphs in extracted:
        kept = []
        for text in paragraphs:
            key = hashlib.blake2b(text.lower().encode(), digest_size=8).digest()
            if key not in seen:
                seen.add(key)
                kept.append(text)
        document = "\n\n".join(kept)
        if len(document) >= SHORTEST_DOCUMENT:
            yield document


def _extracted(package: Path) -> list[list[str]]:
    """The paragraphs of English prose of each file of a package."""
    found = []
    for name, data in _files(package):
        texts = (SPACES.sub(" ", paragraph).strip() for paragraph in _paragraphs(name, data))
        found.append([text for text in texts if _is_english_prose(text)])
    return found


def _files(package: Path) -> Iterator[tuple[str, bytes]]:
    """The files of a package that can have prose, by name."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith((".py", ".json", ".rst", ".md", ".txt")):
                    yield name, archive.read(name)
        return
    found = {}
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as unpacking:
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix(".")
                is_text = TEXTS.search(name) or MAN_PAGE.search(name)
                skipped = OTHER_LANGUAGES.search(name) or SKIPPED.search(name)
                if member.isfile() and is_text and not skipped:
                    file = archive.extractfile(member)
                    assert file is not None
                    found[name] = file.read()
    for name in sorted(found):
        data = found.pop(name)
        yield (name, gzip.decompress(data)) if name.endswith((".gz", ".dz")) else (name, data)


def _paragraphs(name: str, data: bytes) -> Iterator[str]:
    """Paragraphs of a file, by the kind that its name tells; none for other kinds."""
    plain = name.removesuffix(".gz")
    if MAN_PAGE.search(name):
        yield from BLANK.split(_without_roff(data.decode(errors="replace")))
    elif plain.endswith((".html", ".htm", ".xhtml", ".page")):
        yield from BLANK.split(_without_tags(data.decode(errors="replace")))
    elif plain.endswith((".txt", ".rst", ".md", ".text", ".info", ".dict.dz")) or re.search(r"\.info-\d+$", plain):
        yield from BLANK.split(data.decode(errors="replace"))
    elif plain.endswith(".py"):
        for text in _docstrings(data):
            yield from BLANK.split(text)
    elif plain.endswith(".json"):
        for text in _documentation(data):
            yield from BLANK.split(_without_tags(text))


def _without_tags(text: str) -> str:
    text = DROPPED.sub("\n\n", text).replace("\n\n", "\n")
    return html.unescape(TAGS.sub("", BLOCKS.sub("\n\n", text)))


def _without_roff(text: str) -> str:
    text = ROFF_OTHER.sub("", ROFF_FONT.sub("", ROFF_BREAK.sub("\n", text)))
    return ROFF_ESCAPE.sub("", text).replace("\\-", "-").replace("\\", "")


def _docstrings(data: bytes) -> Iterator[str]:
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
        elif (
            isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            yield node.value.value if len(node.value.value) > SHORTEST_DOCUMENT else ""


def _documentation(data: bytes) -> Iterator[str]:
    """The values of `documentation` in a JSON file, as in botocore's descriptions of services."""
    try:
        waiting = [json.loads(data)]
    except ValueError:
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(value.get("documentation"), str):
                yield value["documentation"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _is_english_prose(text: str) -> bool:
    if len(text) < SHORTEST_PARAGRAPH:
        return False
    words = text.split()
    if len(words) < FEWEST_WORDS or "\ufffd" in text:
        return False
    letters = sum(map(str.isalpha, text)) + len(words)
    stops = sum(word.lower() in STOPWORDS for word in words)
    return letters > 0.85 * len(text) and stops > 0.18 * len(words)


if __name__ == "__main__":
    main()
