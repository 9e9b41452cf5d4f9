"""Download datasets: files of the hub with `huggingface_hub`, any dataset of the hub with `datasets`, and plain URLs.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and offline mode (`HF_HUB_OFFLINE=1`) work as in those libraries. Files that are
already in the folder are not downloaded again; a file gets its name only when it is complete.
"""

from __future__ import annotations

import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.text.convert_corpus import convert

# Conversations in one file or more per split: repository, then the pattern of each split's files.
BY_SPLIT = {
    "openassistant": (
        "OpenAssistant/oasst1",
        {"train": "data/train-*.parquet", "validation": "data/validation-*.parquet"},
    ),
    "openassistant-guanaco": (
        "timdettmers/openassistant-guanaco",
        {"train": "openassistant_best_replies_train.jsonl", "validation": "openassistant_best_replies_eval.jsonl"},
    ),
}
REDPAJAMA, ARXIV_URLS = "togethercomputer/RedPajama-Data-1T", "urls/arxiv.txt"
PARQUET_BRANCH = "refs/convert/parquet"  # The hub's own conversion of a dataset that is defined by a script.
BOOKCORPUS_SHARDS = 10
WIKITEXT = ("wikitext-2-v1", "wikitext-2-raw-v1", "wikitext-103-v1", "wikitext-103-raw-v1")
C4_SHARDS = 1024
NAMES = (*WIKITEXT, "c4", "bookcorpus", "arxiv", "arxiv-sample", *BY_SPLIT)
ROWS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz", ".jsonl.zst")
ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json")
# data/train_sft-00000-of-00003.parquet, train.jsonl, test/rows.parquet
SPLIT = re.compile(r"(?:^|[/._-])((?:train|test|valid|validation|dev|eval)(?:_[a-z0-9]+)?)(?=[-./]|$)", re.IGNORECASE)
BLOCK = 1 << 20


def download(source: str, out: Path, shards: str = "0") -> list[Path]:
    """Download a dataset by name or URL into a folder, and return its files."""
    out.mkdir(parents=True, exist_ok=True)
    if source in WIKITEXT:
        return _wikitext(source, out)
    if source in BY_SPLIT:
        return _by_split(source, out)
    if source == "c4":
        names = [f"c4-train.{number:05d}-of-{C4_SHARDS:05d}.json.gz" for number in _numbers(shards, C4_SHARDS)]
        return [_copied("allenai/c4", f"en/{name}", out / name) for name in names]
    if source == "bookcorpus":
        numbers = _numbers(shards, BOOKCORPUS_SHARDS)
        return [_copied("bookcorpus/bookcorpus", f"plain_text/train/{number:04d}.parquet",
                        out / f"bookcorpus.{number:04d}.parquet", PARQUET_BRANCH) for number in numbers]  # fmt: skip
    if source == "arxiv":
        return _arxiv(shards, out)
    if source == "arxiv-sample":
        return [_copied(f"{REDPAJAMA}-Sample", "arxiv_sample.jsonl", out / "arxiv_sample.jsonl")]
    if source.startswith("hf:"):
        return _through_datasets(source.removeprefix("hf:"), out)
    if source.startswith(("http://", "https://")):
        return [_fetch(source, out)]
    if re.fullmatch(r"wikitext-?(2|103)", source):
        size = source.removeprefix("wikitext").lstrip("-")
        raise UserError(
            f"{source} has two versions, which give different perplexities",
            hint=f"wikitext-{size}-v1 is tokenized, with <unk>; wikitext-{size}-raw-v1 is the original text",
        )
    raise UserError(f"{source} is not a known dataset", hint=f"use {', '.join(NAMES)}, hf:org/name/config, or a URL")


def _wikitext(name: str, out: Path) -> list[Path]:
    """Write each split as one jsonl, with one row per line."""
    targets = {split: out / f"{name}.{split}.jsonl" for split in ("train", "validation", "test")}
    if not all(path.is_file() for path in targets.values()):
        folder = _from_hub("Salesforce/wikitext", [f"{name}/*.parquet"]) / name
        for split, path in targets.items():
            parts = sorted(folder.glob(f"{split}-*.parquet"))
            if not parts:
                raise RuntimeFailure(f"the hub's copy of {name} has no file for the {split} split")
            if not path.is_file():
                convert(parts, path)
    return list(targets.values())


def wikitext_split(name: str, split: str) -> list[Path]:
    """The files of one split, in the cache of `huggingface_hub`."""
    folder = _from_hub("Salesforce/wikitext", [f"{name}/{split}-*.parquet"]) / name
    parts = sorted(folder.glob(f"{split}-*.parquet"))
    if not parts:
        raise RuntimeFailure(f"the hub's copy of {name} has no file for the {split} split")
    return parts


def rows_on_the_hub(name: str) -> list[Path]:
    """The files with the training rows of a dataset on the hub, in the cache of `huggingface_hub`.

    `org/name:train_sft` names the split; without it the split is `train`, or the only one whose name starts with train,
    or the only one. Metadata files of the dataset are ignored.
    """
    name, _, split = name.partition(":")
    folder = _from_hub(name, [f"*{suffix}" for suffix in ROWS])
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith(ROWS) and path.name not in ABOUT)
    if not paths:
        raise UserError(f"{name} on the hub has no jsonl or parquet files")
    splits: dict[str, list[Path]] = {}
    for path in paths:
        match = SPLIT.search(str(path.relative_to(folder)))
        splits.setdefault(match[1] if match else "", []).append(path)
    wanted = [each for each in splits if each.startswith("train")] or list(splits)
    chosen = split or ("train" if "train" in wanted else wanted[0])
    if chosen not in splits or (not split and chosen != "train" and len(wanted) > 1):
        known = ", ".join(f"{name}:{each}" for each in splits if each)
        raise UserError(f"{name} on the hub has several splits", hint=f"choose one: {known}")
    console.say(f"{name}: {', '.join(str(path.relative_to(folder)) for path in splits[chosen])}")
    return splits[chosen]


def _by_split(name: str, out: Path) -> list[Path]:
    """Write each split as one jsonl, with all keys of the rows."""
    repository, patterns = BY_SPLIT[name]
    targets = {split: out / f"{name}.{split}.jsonl" for split in patterns}
    if not all(path.is_file() for path in targets.values()):
        folder = _from_hub(repository, list(patterns.values()))
        for split, path in targets.items():
            parts = sorted(folder.glob(patterns[split]))
            if not parts:
                raise RuntimeFailure(f"the hub's copy of {repository} has no file for the {split} split")
            if not path.is_file():
                convert(parts, path)
    return list(targets.values())


def _arxiv(shards: str, out: Path) -> list[Path]:
    """Papers of arXiv from RedPajama, whose repository lists the addresses of its files."""
    listed = _from_hub(REDPAJAMA, [ARXIV_URLS]) / ARXIV_URLS
    if not listed.is_file():
        raise RuntimeFailure(f"the hub's copy of {REDPAJAMA} has no {ARXIV_URLS}")
    addresses = listed.read_text(encoding="utf-8").split()
    return [_fetch(addresses[number], out) for number in _numbers(shards, len(addresses))]


def _copied(repository: str, file: str, path: Path, revision: str | None = None) -> Path:
    """One file of a dataset on the hub, under another name."""
    if not path.is_file():
        folder = _from_hub(repository, [file], revision)
        if not (folder / file).is_file():
            raise RuntimeFailure(f"the hub's copy of {repository} has no {file}")
        temporary = files.temporary_beside(path)
        shutil.copyfile(folder / file, temporary)
        os.replace(temporary, path)
    return path


def _numbers(shards: str, total: int) -> list[int]:
    """`0-3,7` is 0, 1, 2, 3 and 7."""
    numbers: list[int] = []
    for part in shards.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        last = int(match.group(2) or match.group(1)) if match else total
        if match is None or last >= total:
            raise UserError(f"{shards!r} is not a list of shards", hint=f"use 0-3 or 0,7; there are {total}")
        numbers += range(int(match.group(1)), last + 1)
    return numbers


def _from_hub(repository: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RuntimeFailure(
            f"{repository} could not be downloaded from the hub: {reason}", hint="run the same command again"
        ) from None


def _through_datasets(name: str, out: Path) -> list[Path]:
    try:
        import datasets
    except ImportError:
        raise UserError("hf: needs the datasets library", hint="pip install 'steelyard[datasets]'") from None
    parts = name.split("/")
    local = Path(name).is_dir()
    repository, config = (name, None) if local or len(parts) < 3 else ("/".join(parts[:2]), "/".join(parts[2:]))
    try:
        loaded: Any = datasets.load_dataset(repository, config)
    except Exception as error:
        raise RuntimeFailure(f"{name} could not be loaded: {str(error).splitlines()[0]}") from None
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(name).name if local else name)
    paths = []
    for split, rows in loaded.items():
        path = out / f"{stem}.{split}.jsonl"
        if not path.is_file():
            _write_rows(rows, path)
        paths.append(path)
    return paths


def _write_rows(rows: Iterator[dict[str, Any]], path: Path) -> None:
    import orjson

    with files.atomic_file(path, "wb") as file:
        for row in rows:
            file.write(orjson.dumps(row, default=str, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))


def _fetch(url: str, out: Path) -> Path:
    """Download one file over HTTP, and resume a partial download."""
    name = unquote(Path(urlsplit(url).path).name)
    if not name or name.startswith(".") or "/" in name:
        raise UserError(f"{url} has no file name")
    path, part = out / name, out / f"{files.TEMPORARY}download-{name}"
    if path.is_file():
        return path
    done = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if done and response.status != 206:
                done = 0  # The server sends the whole file again.
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else 0
            with open(part, "ab" if done else "wb") as file, console.progress(name, total, "B", done=done) as progress:
                while block := response.read(BLOCK):
                    file.write(block)
                    progress.advance(len(block))
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: the partial file is already complete.
            raise RuntimeFailure(f"{url}: the server answered {error.code} {error.reason}") from None
        total = done
    except (urllib.error.URLError, OSError) as error:
        raise RuntimeFailure(
            f"{url}: {error}", hint="the data received so far is kept; run the same command again to resume"
        ) from None
    if total and part.stat().st_size != total:
        have = part.stat().st_size
        raise RuntimeFailure(f"{url}: ended after {have} of {total} bytes", hint="run the same command again to resume")
    os.replace(part, path)
    return path
