"""Publishing a model: it must work here before it is sent anywhere."""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from steelyard import checkpoint
from steelyard.checkpoint import STATE, hub
from steelyard.core import files
from steelyard.core.console import console
from steelyard.core.errors import Fault, SteelyardError, UserError
from steelyard.core.run import MANIFEST, Run
from steelyard.evaluate import card, weights

CARD = "README.md"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
NEW_TOKENS = 20
SCANNED = 16 << 20  # Larger files are not looked through for the token.


def push(
    source: Path,
    name: str,
    private: bool = False,
    prompt: str = "Once upon a time,",
    dry_run: bool = False,
    new_card: bool = False,
    run: Path | None = None,
) -> dict[str, Any]:
    """Try a model out, and send it to the hub with its tokenizer and a card. A dry run does all but the sending."""
    if not hub.is_name(name):
        raise UserError(f"{name} is no name on the hub", mend="a name is user/model: letters, digits, - _ .")
    if not prompt.strip():
        raise UserError("the test prompt is empty", mend="give the model something to continue")
    if not source.exists():
        raise UserError(f"there is no folder {source}")
    origin = card.Origin(Run.open(run)) if run is not None else _origin(source)
    if not dry_run:
        name = _full(name)
    with _as_hugging_face(source) as folder:
        paths, left_out = _publishable(folder)
        text = try_out(folder, prompt)
        contents: dict[str, Path | bytes] = dict(paths)
        if CARD not in paths or new_card:
            sample = card.Sample(prompt, text)
            contents[CARD] = card.render(name, folder, weights.measure(folder), origin, sample).encode()
        for each in left_out:
            console.say(f"not published: {each}")
        result = {"name": name, "generated": text, "left_out": left_out, "dry_run": dry_run}
        if dry_run:
            return result | {"files": _sizes(contents), "card": _card(contents)}
        # A card that was written by hand on the hub's own page outweighs one that was made here.
        keep = (CARD,) if CARD not in paths and not new_card else ()
        return result | hub.send(name, contents, private, keep)


def try_out(folder: Path, prompt: str) -> str:
    """Load the folder as a user would, and let it continue the prompt by at least a token. What fails is a `Fault`."""
    try:
        return _with_transformers(folder, prompt)
    except SteelyardError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise Fault(f"the model in {folder} does not work: {reason}", mend="nothing was uploaded") from error


def _with_transformers(folder: Path, prompt: str) -> str:
    import torch

    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        raise UserError("trying the model out needs transformers", mend="pip install transformers") from None
    console.say(f"trying out {folder}")
    with _hushed(transformers.utils.logging):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are listed below with the other misfits.
        )
        _refuse_misfits(folder, loading)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            made = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
    new_ids = made.sequences[0, ids.shape[1] :]
    if len(new_ids) == 0:
        raise Fault(f"the model in {folder} adds nothing to the prompt", mend="nothing was uploaded")
    if not all(math.isfinite(float(logits_BV.sum())) for logits_BV in made.logits):
        raise Fault(f"the model in {folder} gives logits that are not finite", mend="nothing was uploaded")
    return str(tokenizer.decode(made.sequences[0], skip_special_tokens=True))


def _refuse_misfits(folder: Path, loading: dict[str, Any]) -> None:
    kinds = {"missing_keys": "missing", "unexpected_keys": "unknown", "mismatched_keys": "of another size"}
    wrong = [f"{_key(item)}: {told}" for kind, told in kinds.items() for item in sorted(loading.get(kind) or ())]
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        listed = "\n  ".join(wrong[:10])
        raise Fault(
            f"the weights in {folder} are not those of its config.json:\n  {listed}{more}", mend="nothing was uploaded"
        )


def _key(item: str | tuple[Any, ...]) -> str:
    """The name of a misfit, which may come with its sizes."""
    return item if isinstance(item, str) else str(item[0])


@contextlib.contextmanager
def _hushed(logging: Any) -> Iterator[None]:
    """No bars and no advice from the library while it loads."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _origin(source: Path) -> card.Origin | None:
    """The run that a run folder or a checkpoint inside of one stands for."""
    if (source / MANIFEST).is_file():
        return card.Origin(Run.open(source))
    if (source / STATE).is_file() and (source.resolve().parents[1] / MANIFEST).is_file():
        saved = checkpoint.source(source.resolve())
        return card.Origin(saved.run, saved.step)
    return None


@contextlib.contextmanager
def _as_hugging_face(source: Path) -> Iterator[Path]:
    """The model as a Hugging Face folder: the source itself, or what it is converted to for as long as it is needed."""
    if (source / "config.json").is_file():
        yield source
        return
    from steelyard.checkpoint.formats import open_source
    from steelyard.checkpoint.formats.write import Target, convert

    opened = open_source(source)
    # Beside the source, where there is room for models.
    with tempfile.TemporaryDirectory(dir=source.resolve().parent, prefix=files.TEMPORARY) as place:
        folder = Path(place) / source.resolve().name
        convert(opened, folder, Target("hf"))
        yield folder


def _publishable(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """The files that make the model, and those that stay here."""
    names = {path.name for path in folder.iterdir() if path.is_file()}
    chosen = hub.model_files(names)
    if not any(name.endswith(".safetensors") for name in chosen):
        raise UserError(
            f"{folder} has no weights in safetensors", mend="steelyard checkpoint convert --to hf writes them"
        )
    if not names & set(TOKENIZERS):
        raise UserError(f"{folder} has no tokenizer", mend="steelyard tokenizer export writes one")
    secret = hub.token()
    for name in chosen:
        path = folder / name
        if secret and path.stat().st_size <= SCANNED and secret.encode() in path.read_bytes():
            raise UserError(f"{path} holds your token of the hub", mend="take it out; nothing was uploaded")
    others = {path.name for path in folder.iterdir()} - set(chosen)
    return {name: folder / name for name in chosen}, sorted(others)


def _full(name: str) -> str:
    """A name without its owner is the user's own."""
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
