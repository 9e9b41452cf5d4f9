"""Tests a model before it is published: it is loaded from its folder as a user would, and must continue a prompt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelyard import model
from steelyard.checkpoint.formats import load_into, open_source
from steelyard.core.console import console
from steelyard.core.errors import RuntimeFailure, SteelyardError

NEW_TOKENS = 20


def try_out(folder: Path, prompt: str) -> str:
    """Load the folder as a user would and continue the prompt by at least one token. Errors are `RuntimeFailure`."""
    console.say(f"testing {folder}")
    try:
        transformers: Any = import_module("transformers")
    except ImportError:
        transformers = None
    try:
        return _with_transformers(transformers, folder, prompt) if transformers else _with_steelyard(folder, prompt)
    except SteelyardError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise RuntimeFailure(f"the model in {folder} does not work: {reason}", hint="nothing was uploaded") from error


def _with_transformers(transformers: Any, folder: Path, prompt: str) -> str:
    with _quiet(transformers.utils.logging):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are listed below with the other mismatches.
        )
        _refuse_misfits(folder, loading)
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            output = network.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
    new_ids = output.sequences[0, ids.shape[1] :]
    if len(new_ids) == 0:
        raise RuntimeFailure(f"the model in {folder} generates nothing for the prompt", hint="nothing was uploaded")
    for logits_BV in output.logits:
        _refuse_non_finite(folder, logits_BV)
    return str(tokenizer.decode(output.sequences[0], skip_special_tokens=True))


def _with_steelyard(folder: Path, prompt: str) -> str:
    """The same without transformers. The loader raises an error for unknown and missing tensors."""
    source = open_source(folder)
    network = model.build(source.config)
    load_into(source, network)
    tokenizer = source.load_tokenizer()
    ids = tokenizer.encode(prompt)
    network.eval()
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            logits_V = network(torch.tensor([ids]))[0, -1]
            _refuse_non_finite(folder, logits_V)
            ids.append(int(logits_V.argmax()))
    return tokenizer.decode(ids)


def _refuse_non_finite(folder: Path, logits: Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise RuntimeFailure(f"the model in {folder} computes logits that are not finite", hint="nothing was uploaded")


def _refuse_misfits(folder: Path, loading: dict[str, Any]) -> None:
    kinds = {"missing_keys": "missing", "unexpected_keys": "unknown", "mismatched_keys": "wrong size"}
    wrong = [
        f"{_key(item)}: {reported}" for kind, reported in kinds.items() for item in sorted(loading.get(kind) or ())
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        listed = "\n  ".join(wrong[:10])
        raise RuntimeFailure(
            f"the weights in {folder} do not match its config.json:\n  {listed}{more}", hint="nothing was uploaded"
        )


def _key(item: str | tuple[Any, ...]) -> str:
    """The name of a mismatched tensor, which may come with its sizes."""
    return item if isinstance(item, str) else str(item[0])


@contextlib.contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Disable the library's progress bars and messages while it loads."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
