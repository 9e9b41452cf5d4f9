"""Find and load a tokenizer: from a folder, a file, GPT-2's pair of files, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from steelyard.core.errors import UserError
from steelyard.core.files import inside
from steelyard.text.tokenizer import json_file, sentencepiece_model
from steelyard.text.tokenizer.tokenizer import Tokenizer

MODELS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
FORMS = "a Hugging Face folder or name, a tokenizer.json, a SentencePiece .model, or vocab.json,merges.txt"


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load a tokenizer of any kind."""
    text = str(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf":
        raise UserError(
            "a GGUF file is a checkpoint, not a tokenizer", where=text,
            hint=f"its tokenizer is in the folder that `steelyard checkpoint convert {text} FOLDER --to hf` writes",
        )  # fmt: skip
    if path.is_file():
        return sentencepiece_model.from_file(path) if path.suffix == ".model" else json_file.from_file(path)
    vocab, comma, merges = text.partition(",")
    if comma:
        for part in (vocab, merges):
            if not Path(part).is_file():
                raise UserError(f"there is no file {part}", where=text, hint="the pair is vocab.json,merges.txt")
        return json_file.from_gpt2_pair(Path(vocab), Path(merges))
    if path.suffix in (".model", ".json", ".txt") or path.is_absolute() or text.startswith("."):
        raise UserError(f"there is no file or folder {text}", hint=f"a tokenizer is {FORMS}")
    return _from_hub(text)


def _from_folder(folder: Path) -> Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return json_file.from_file(inside(folder / "tokenizer.json"))
    for name in MODELS:
        if (folder / name).is_file():
            return sentencepiece_model.from_file(inside(folder / name))
    pairs = [(folder / f"{stem}vocab.json", folder / f"{stem}merges.txt") for stem in ("", "gpt2-")]
    for vocab, merges in pairs:
        if vocab.is_file() and merges.is_file():
            return json_file.from_gpt2_pair(inside(vocab), inside(merges))
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return sentencepiece_model.from_file(inside(models[0]))
    raise UserError(f"there is no tokenizer in {folder}", hint=f"a tokenizer is {FORMS}")


def _from_hub(name: str) -> Tokenizer:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt", *MODELS]
    try:
        folder = snapshot_download(name, allow_patterns=wanted)
    except HFValidationError:
        raise UserError(f"there is no tokenizer {name}", hint=f"a tokenizer is {FORMS}") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"there is no file or folder {name}, and downloading it from the hub failed: {reason}"
        ) from None
    return _from_folder(Path(folder))
