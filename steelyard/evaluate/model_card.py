"""The model card: architecture, training data, losses and how to load the model, as Markdown for the hub.

The same model gives the same card, byte for byte. Of the machine it was trained on, only library versions are included:
absolute paths in the recipe are reduced to their last part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.core import secrets, units
from steelyard.core.errors import UserError
from steelyard.core.recipe import to_toml
from steelyard.core.run import Run
from steelyard.core.safe_parse import read_json_object
from steelyard.evaluate.weight_stats import Weights

FRONT = """---
license: unknown
library_name: transformers
pipeline_tag: text-generation
tags:
- steelyard
---"""
LICENSE = (
    "> **License: not chosen yet.** The publisher of this model has to choose one: set `license:` at the top of "
    "this file, and replace this paragraph. Until then, assume no right to use it."
)


@dataclass(frozen=True)
class Origin:
    """The run that trained the model, and the step, if it is not the last one."""

    run: Run
    step: int | None = None

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics up to that step."""
        return [record for record in self.run.metrics() if self.step is None or record["step"] <= self.step]


@dataclass(frozen=True)
class Sample:
    """The model's continuation of a prompt, from the test before publishing."""

    prompt: str
    text: str


def render(
    name: str, folder: Path, weights: Weights, origin: Origin | None = None, sample: Sample | None = None
) -> str:
    """The card of the model in a Hugging Face folder, with its training if the run is known."""
    sections = [FRONT, f"# {name.rpartition('/')[2]}", LICENSE, _table(_model(folder, weights)), _loading(name)]
    if origin is not None:
        sections += ["## Training", _table(_training(origin)), "### Recipe", _fenced(_recipe(origin.run), "toml")]
    else:
        sections += ["## Training", "The folder that this model was published from has no record of its training."]
    if sample is not None:
        sections += ["## Sample", f"Continued from `{_one_line(sample.prompt)}`, with greedy decoding:"]
        sections.append(_fenced(sample.text, "text"))
    sections.append("Published with Steelyard.")
    return secrets.scrub("\n\n".join(sections)) + "\n"


def _model(folder: Path, weights: Weights) -> dict[str, str]:
    try:
        config = read_json_object(folder / "config.json")
        config.get("model_type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"config.json cannot be read: {error}", where=str(folder)) from None
    named = {
        "Architecture": (config.get("architectures") or [config.get("model_type")])[0],
        "Layers": config.get("num_hidden_layers", config.get("n_layer")),
        "Hidden size": config.get("hidden_size", config.get("n_embd")),
        "Attention heads": config.get("num_attention_heads", config.get("n_head")),
        "Key-value heads": config.get("num_key_value_heads"),
        "Context": config.get("max_position_embeddings", config.get("n_positions")),
        "Vocabulary": config.get("vocab_size"),
    }
    rows = {key: str(value) for key, value in named.items() if value is not None}
    return rows | {
        "Parameters": f"{units.count(weights.parameters)} ({weights.parameters})",
        "Dtype": weights.dtype,
        "Sparsity": _sparsity(weights),
    }


def _sparsity(weights: Weights) -> str:
    """The sparsity as measured in the weights."""
    text = f"{100 * weights.sparsity:.2f}% of the elements of the layers' {weights.matrices} matrices are zero"
    if weights.two_of_four:
        text += f"; {weights.two_of_four} of them have two zeros in every group of four (2:4)"
    return text


def _training(origin: Origin) -> dict[str, str]:
    recipe, records, manifest = origin.run.recipe(), origin.metrics(), origin.run.manifest()
    sources = [_last_part(source.prefix) for source in recipe.data.train]
    total = sum(source.weight for source in recipe.data.train)
    if len(sources) > 1:
        shares = (100 * source.weight / total for source in recipe.data.train)
        sources = [f"{name} ({share:.1f}%)" for name, share in zip(sources, shares, strict=True)]
    rows = {"Data": ", ".join(sources) or "not recorded", "Sequence length": str(recipe.data.sequence_length)}
    if recipe.data.tokenizer:
        rows["Tokenizer"] = _last_part(recipe.data.tokenizer)
    trained = [record for record in records if "loss" in record]
    valid = [record for record in records if "valid_loss" in record]
    if trained:
        last = trained[-1]
        rows["Steps"] = f"{last['step']} of {recipe.train.steps}"
        rows["Tokens"] = f"{units.count(last['tokens'])} ({last['tokens']})"
        rows["Training loss"] = _loss(last["loss"])
    if valid:
        rows["Validation loss"] = f"{_loss(valid[-1]['valid_loss'])} at step {valid[-1]['step']}"
    versions = manifest.get("versions", {})
    rows["Versions"] = ", ".join(f"{name} {version}" for name, version in versions.items()) or "not recorded"
    return rows


def _loss(loss: float) -> str:
    return f"{loss:.4f} (perplexity {units.perplexity(loss)})"


def _recipe(run: Run) -> str:
    settings: dict[str, Any] = _without_absolute_paths(run.recipe().settings())
    settings["checkpoint"].pop("memory_dir", None)  # must be absolute, so it cannot be reduced to its last part
    return to_toml(settings)


def _without_absolute_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_absolute_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_absolute_paths(each) for each in value]
    return _last_part(value) if isinstance(value, str) else value


def _last_part(text: str) -> str:
    """The last part of an absolute path; any other text unchanged."""
    return Path(text).name if text.startswith(("/", "~")) else text


def _loading(name: str) -> str:
    python = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n'
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n'
        'ids = tokenizer("Once upon a time,", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**ids, max_new_tokens=50)[0]))"
    )
    folder = name.rpartition("/")[2]
    shell = f'steelyard hub pull {name} {folder}\nsteelyard generate {folder} --prompt "Once upon a time,"'
    return "\n\n".join(
        ["## Use", "With transformers:", _fenced(python, "python"), "With Steelyard:", _fenced(shell, "sh")]
    )


def _table(rows: dict[str, str]) -> str:
    cells = (f"| {key} | {_one_line(value)} |" for key, value in rows.items())
    return "\n".join(["| | |", "|---|---|", *cells])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")


def _fenced(text: str, kind: str) -> str:
    """A code block, with a fence longer than any inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text.strip(chr(10))}\n{fence}"
