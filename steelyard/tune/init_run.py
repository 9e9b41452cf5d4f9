"""`steelyard init`: looks at the text, the model and the machine, and writes a first recipe. It never overwrites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.core import files
from steelyard.core.errors import UserError
from steelyard.core.recipe.toml import to_toml
from steelyard.text.survey import Survey, survey
from steelyard.tune import first_recipe

PLACES = ("data", ".")  # Where text is looked for if none is named.
PLAIN_TEMPLATE = "alpaca"  # For a model without a chat template: it needs no special tokens.


def init(data: str | None, task: str | None, model: str | None, out: Path | None, hours: float) -> dict[str, Any]:
    """Write a recipe, and return its path, what it was derived from, and the next commands."""
    found = survey(data or _text_here())
    task = task or ("sft" if is_conversation(found) else "pretrain")
    recipe = out or Path(f"{task}.toml")
    for path in (recipe, *([] if task == "sft" else [recipe.with_suffix("")])):
        if path.exists():
            raise UserError(f"{path} already exists", hint="choose another name with --out")
    machine = first_recipe.this_machine()
    if task == "pretrain":
        made = first_recipe.pretraining(found, machine, recipe, hours)
    else:
        made = _from_model(task, found, machine, recipe, model)
    comments = "".join(f"# {line}\n" for line in ("Written by steelyard init.", *made.reasons))
    settings = {key: value for key, value in made.settings.items() if key != "name"}
    files.write_text(recipe, comments + to_toml(settings))
    return {"recipe": str(recipe), "task": task, "reasons": made.reasons, "commands": made.commands}


def is_conversation(found: Survey) -> bool:
    """Whether the rows are conversations rather than texts."""
    from steelyard.finetuning.dataset_formats import Markers, format_of

    try:
        name = format_of(found.rows[0], "")
    except UserError:
        return False
    return name != "marked" or Markers().user in str(found.rows[0]["text"])


def _from_model(
    task: str, found: Survey, machine: first_recipe.Hardware, recipe: Path, model: str | None
) -> first_recipe.FirstRecipe:
    from steelyard.checkpoint.formats import open_source
    from steelyard.checkpoint.formats.hf_config import positions_of
    from steelyard.evaluate.load_model import tokenizer_for

    if model is None:
        raise UserError(f"--task {task} starts from a model", hint="name a checkpoint or a model on the hub: --model")
    if task == "sft" and not is_conversation(found):
        raise UserError(
            "these are texts, not conversations", where=str(found.files[0]), hint="docs/finetune.md shows the formats"
        )
    if task == "prune" and found.key != "text":
        raise UserError(
            f"the text has the key {found.key!r}", where=str(found.files[0]), hint="steelyard data convert renames it"
        )
    source = open_source(model)
    make = first_recipe.finetuning if task == "sft" else first_recipe.pruning
    made = make(found, machine, recipe, model, positions_of(source.config, source.hf_metadata), source.config)
    if task == "sft" and tokenizer_for(source, None).chat_template() is None:
        made.settings["finetune"]["template"] = PLAIN_TEMPLATE
    return made


def _text_here() -> str:
    for place in PLACES:
        if Path(place).is_dir():
            try:
                survey(place)
            except UserError:
                continue
            return place
    raise UserError(
        "there is no text in this folder or in data/",
        hint="name it with --data; steelyard data download wikitext-2-raw-v1 --out data gets some",
    )
