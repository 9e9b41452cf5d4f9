"""`steelyard sft`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard.cli.options import AllowUnknownOption, JsonOption, Overrides, RunOption, print_result
from steelyard.cli.relaunch import NprocOption, launch
from steelyard.cli.train import DryRunOption, GpuOption, ResumeOption, WorldOption, print_dry_run
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe
from steelyard.parallel.world import detect, raise_on_all_ranks

RecipeOrNone = Annotated[
    str | None,
    typer.Argument(metavar="[RECIPE]", help="A recipe with [finetune], or use --model and --data.", show_default=False),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="CKPT", help="The model to fine-tune: any checkpoint, or a name on the hub.")
]
DataOption = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="Conversations: jsonl, parquet, or a dataset on the hub.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="The Hugging Face folder to write.  [default: hf in the run]", show_default=False),
]
# Defaults for --model and --data without a recipe.
DEFAULTS: dict[str, Any] = {
    "train": {"global_batch": 8, "micro_batch": 1},
    "optim": {"learning_rate": 2e-5, "weight_decay": 0.0, "warmup_share": 0.03},
    "checkpoint": {"every": 200, "keep_best": True, "keep_last": 1},
    "eval": {"every": 50},
    "log": {"every": 5},
}
ADAPTER_RATE = 2e-4


def run(
    recipe: RecipeOrNone = None,
    overrides: Overrides = None,
    model: ModelOption = None,
    data: DataOption = None,
    out: OutOption = None,
    run: RunOption = None,
    nproc: NprocOption = None,
    resume: ResumeOption = "auto",
    dry_run: DryRunOption = False,
    world: WorldOption = None,
    gpu: GpuOption = None,
    allow_unknown: AllowUnknownOption = False,
    json: JsonOption = False,
) -> None:
    """Fine-tune a model on conversations, with a recipe or default settings, and export it as a Hugging Face folder.

    The word run is optional. Example: steelyard sft --model models/base --data talks.jsonl --out models/tuned
    """
    ranks = detect(os.environ)
    with raise_on_all_ranks(ranks):
        loaded = recipe_for(recipe, overrides, model, data, allow_unknown)
        if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} already exists", hint="give a new folder")
    if dry_run or world is not None or gpu is not None:
        return print_dry_run(loaded, dry_run, world, gpu, json)
    from steelyard.finetuning import sft

    if nproc is not None and nproc > 1:
        loaded.parallel.data_for(nproc)
        sft.prepare(loaded, nproc)  # The ranks reuse the encoded data, and errors are printed once.
        raise typer.Exit(launch(nproc))
    from steelyard.observe import report
    from steelyard.training import run_status

    with raise_on_all_ranks(ranks):
        prepared = sft.prepare(loaded)
    if ranks.is_rank0:
        console.say(prepared.described())
    folder = sft.run(prepared, run, resume)
    if not ranks.is_rank0:
        return
    if folder.state != "finished":  # train.max_hours ended it: the same command resumes it.
        return
    written = sft.export(prepared, folder, out)
    result = run_status.results(folder) | {"out": written["path"], "exported_step": written["step"]}
    report.write(folder)
    print_result(result, json, f"run     {folder.path}\nmodel   {written['path']}, of step {written['step']}")


def preview(
    recipe: RecipeOrNone = None,
    overrides: Overrides = None,
    model: ModelOption = None,
    data: DataOption = None,
    samples: Annotated[int, typer.Option(min=1, help="Conversations to show.")] = 3,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a page.", show_default=False)] = None,
    json: JsonOption = False,
) -> None:
    """Show the decoded tokens of conversations or preference pairs, their loss positions, and the packing of rows.

    Example: steelyard sft preview my.toml --samples 3 --html preview.html
    """
    from steelyard.finetuning import preview, sft

    prepared = sft.prepare(recipe_for(recipe, overrides, model, data, allow_unknown=True))
    shown = preview.preview(prepared, samples)
    if html is not None:
        preview.write_html(shown, html)
    print_result(preview.as_result(shown), json, preview.as_text(shown))


def recipe_for(
    recipe: str | None,
    overrides: list[str] | None,
    model: str | None,
    data: list[str] | None,
    allow_unknown: bool = False,
) -> Recipe:
    """The recipe of the command line; the model config comes from the checkpoint if the recipe has none."""
    words = list(overrides or ())
    if recipe is not None and "=" in recipe and not Path(recipe).exists():
        words.insert(0, recipe)
        recipe = None
    if recipe is None and (model is None or not data):
        raise UserError("there is no model or data to fine-tune", hint="give a recipe, or --model and --data")

    def complete(values: dict[str, Any]) -> None:
        from steelyard.checkpoint.formats import open_source

        train, tune = values.setdefault("train", {}), values.setdefault("finetune", {})
        if model is not None:
            train["init_from"] = model
        if data:
            tune["data"] = data
        if allow_unknown:
            tune["allow_unknown"] = True
        if "model" not in values and isinstance(train.get("init_from"), str):
            values["model"] = open_source(train["init_from"]).config.model_dump(exclude_none=True)

    if recipe is not None:
        return load_recipe(recipe, words, complete)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{Path(str(model)).name}-{Path(str((data or [''])[0])).stem}").strip("-.")
    values: dict[str, Any] = {"name": name or "sft", **{section: dict(keys) for section, keys in DEFAULTS.items()}}
    if any(word.startswith("finetune.adapter") for word in words):
        values["optim"]["learning_rate"] = ADAPTER_RATE
    if any(word.startswith("optim.warmup_") for word in words):
        del values["optim"]["warmup_share"]
    return load_recipe(values, words, complete)


SUBCOMMANDS = (run, preview)
