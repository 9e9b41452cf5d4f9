"""Publishes a model on the hub, after testing locally that it loads and generates text."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from steelyard import checkpoint
from steelyard.checkpoint import STATE, hub
from steelyard.core import files, sha256sums
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.run import MANIFEST, Run
from steelyard.evaluate import model_card, weight_stats
from steelyard.evaluate.smoke_test import try_out
from steelyard.text import tokenizer as tokenizers

CARD = "README.md"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
SCANNED = 16 << 20  # Larger files are not searched for the token.


def push(
    source: Path,
    name: str,
    private: bool = False,
    prompt: str = "Once upon a time,",
    dry_run: bool = False,
    new_card: bool = False,
    run: Path | None = None,
) -> dict[str, Any]:
    """Test a model and upload it to the hub with its tokenizer and a card. A dry run does everything but the upload."""
    if not hub.is_name(name):
        raise UserError(f"{name} is not a valid name on the hub", hint="a name is user/model: letters, digits, - _ .")
    if not prompt.strip():
        raise UserError("the test prompt is empty", hint="give a text that the model continues")
    if not source.exists():
        raise UserError(f"there is no folder {source}")
    origin = model_card.Origin(Run.open(run)) if run is not None else _origin(source)
    name = _full(name) if not dry_run else name if "/" in name else f"<you>/{name}"
    with _as_hugging_face(source) as folder:
        paths, left_out = _publishable(folder, source)
        text = try_out(folder, prompt)
        remarks = _remarks(folder)
        for remark in remarks:
            console.warn(remark)
        contents: dict[str, Path | bytes] = dict(paths)
        if CARD not in paths or new_card:
            sample = model_card.Sample(prompt, text)
            contents[CARD] = model_card.render(name, folder, weight_stats.measure(folder), origin, sample).encode()
        contents[sha256sums.NAME] = _sums(folder, paths)
        for each in left_out:
            console.say(f"not published: {each}")
        result = {"name": name, "generated": text, "left_out": left_out, "remarks": remarks, "dry_run": dry_run}
        if dry_run:
            return result | {"files": _sizes(contents), "card": _card(contents)}
        # A card that was edited on the hub takes precedence over a generated one.
        keep = (CARD,) if CARD not in paths and not new_card else ()
        return result | hub.push(name, contents, private, keep)


def _origin(source: Path) -> model_card.Origin | None:
    """The run of a run folder, or of a checkpoint inside one."""
    if (source / MANIFEST).is_file():
        return model_card.Origin(Run.open(source))
    if (source / STATE).is_file() and (source.resolve().parents[1] / MANIFEST).is_file():
        saved = checkpoint.source(source.resolve())
        return model_card.Origin(saved.run, saved.step)
    return None


@contextlib.contextmanager
def _as_hugging_face(source: Path) -> Iterator[Path]:
    """The model as a Hugging Face folder: the source itself, or a temporary conversion."""
    if (source / "config.json").is_file():
        yield source
        return
    from steelyard.checkpoint.formats.write import Target, convert
    from steelyard.sparsity.pruned_source import opened as opened_under_masks

    opened = opened_under_masks(source)
    # In the source's parent folder, which has space for models.
    with files.temporary_folder(source.resolve()) as place:
        folder = place / source.resolve().name
        convert(opened, folder, Target("hf"))
        yield folder


def _remarks(folder: Path) -> list[str]:
    """Problems for users of the folder although the model works."""
    from steelyard.checkpoint.formats import hf_config, hf_metadata
    from steelyard.core.safe_parse import read_json_object

    generation = folder / "generation_config.json"
    metadata = hf_config.metadata_of(
        read_json_object(folder / "config.json"), read_json_object(generation) if generation.is_file() else None
    )
    try:
        remark = hf_metadata.disagreement(metadata, tokenizers.load_tokenizer(folder))
    except UserError as error:  # transformers has just loaded it, so its kind is unknown only to Steelyard.
        remark = f"the tokenizer was not compared with the configuration: {error.message}"
    return [remark] if remark else []


def _publishable(folder: Path, source: Path) -> tuple[dict[str, Path], list[str]]:
    """The files to publish, and the names of the others."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    chosen = hub.model_files(names)
    if not any(name.endswith(".safetensors") for name in chosen):
        raise UserError(
            f"{folder} has no weights in safetensors", hint="steelyard checkpoint convert --to hf writes them"
        )
    if not names & set(TOKENIZERS):
        convert = f"steelyard checkpoint convert {shlex.quote(str(source))} {shlex.quote(f'{source}-hf')} --to hf"
        raise UserError(
            f"{source} has no tokenizer",
            hint=f"{convert} --tokenizer TOKENIZER writes a folder with one: use the tokenizer of its training",
        )
    secret = hub.token()
    for name in chosen:
        path = files.inside(folder / name)
        if secret and path.stat().st_size <= SCANNED and secret.encode() in path.read_bytes():
            raise UserError(f"{path} contains your hub token", hint="remove it; nothing was uploaded")
    others = {path.name for path in folder.iterdir()} - set(chosen)
    return {name: folder / name for name in chosen}, sorted(others)


def _sums(folder: Path, paths: dict[str, Path]) -> bytes:
    """The SHA256SUMS of the published files. The card is not listed, since it is often edited on the hub."""
    sums = sha256sums.digests(folder, [name for name in paths if name not in (CARD, sha256sums.NAME)])
    recorded = sha256sums.read(folder) or {}
    changed = [name for name in sums if recorded.get(name, sums[name]) != sums[name]]
    if changed:
        raise UserError(
            f"{folder / changed[0]} does not match its SHA-256 in {sha256sums.NAME}; nothing was uploaded",
            hint=f"copy or export the model again; if you changed the file on purpose, delete {sha256sums.NAME}",
        )
    return sha256sums.text_of(sums).encode()


def _full(name: str) -> str:
    """The name with its owner, by default the user."""
    owner = hub.whoami()["name"]
    return name if "/" in name else f"{owner}/{name}"


def _sizes(contents: dict[str, Path | bytes]) -> dict[str, int]:
    return {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in sorted(contents.items())
    }


def _card(contents: dict[str, Path | bytes]) -> str:
    content = contents[CARD]
    return (content if isinstance(content, bytes) else content.read_bytes()).decode(errors="replace")
