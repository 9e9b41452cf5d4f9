"""`steelyard recipe`: check, show, list and scale recipes, update renamed keys, convert Megatron scripts."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from steelyard import megatron
from steelyard.cli.options import JsonOption, Overrides, RecipeArgument, parse_count, print_result
from steelyard.core import files, units
from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.core.recipe import Recipe, load_recipe, shipped, to_toml
from steelyard.core.recipe.renamed_keys import RENAMED_KEYS, migrate_text, migrate_values, renamed
from steelyard.core.recipe.toml import parse
from steelyard.sizes.param_count import parameters


class ScaledOptimizer(StrEnum):
    """The optimizer of a scaled recipe."""

    adamw = "adamw"
    muon = "muon"


class SgdChoice(StrEnum):
    """What `--optimizer sgd` means in a script: SGD with momentum, or SGD-SaI in patched versions."""

    sgd = "sgd"
    sgd_sai = "sgd-sai"


def check(recipe: RecipeArgument, overrides: Overrides = None, json: JsonOption = False) -> None:
    """Validate a recipe.

    Example: steelyard recipe check my.toml train.steps=50
    """
    loaded = load_recipe(recipe, overrides or ())
    size = parameters(loaded.model).total
    text = f"{recipe} is valid: {loaded.model.family}, {units.count(size)} parameters, {loaded.train.steps} steps"
    unchecked = _path_keys(loaded)
    if unchecked:
        text += f"\nnot checked: the files of {', '.join(unchecked)}"
    print_result({"recipe": recipe, "valid": True, "parameters": size, "unchecked": unchecked}, json, text)


def _path_keys(recipe: Recipe) -> list[str]:
    """The keys whose values are files, which may or may not exist."""
    values = {
        "data.train": recipe.data.train,
        "data.valid": recipe.data.valid,
        "data.test": recipe.data.test,
        "data.tokenizer": recipe.data.tokenizer,
        "train.init_from": recipe.train.init_from,
        "sparsity.base": recipe.sparsity.base if recipe.sparsity is not None else None,
        "finetune.data": recipe.finetune is not None,
    }
    return [key for key, value in values.items() if value]


def show(recipe: RecipeArgument, overrides: Overrides = None, json: JsonOption = False) -> None:
    """Print the complete recipe: inherited values, overrides and defaults.

    Example: steelyard recipe show llama2-7b train.steps=50 > my.toml
    """
    settings = load_recipe(recipe, overrides or ()).settings()
    print_result(settings, json, to_toml(settings).rstrip())


def list_(json: JsonOption = False) -> None:
    """List the shipped recipes.

    Example: steelyard recipe list
    """
    recipes = {name: load_recipe(name) for name in shipped()}
    width = max(len(name) for name in recipes)
    lines = [
        f"{name:{width}}  {units.count(parameters(recipe.model).total):>6}  {recipe.description}"
        for name, recipe in recipes.items()
    ]
    result = {
        name: {"description": recipe.description, "parameters": parameters(recipe.model).total}
        for name, recipe in recipes.items()
    }
    print_result(result, json, "\n".join(lines))


def scale(
    wanted: Annotated[str, typer.Option("--parameters", metavar="N", help="Parameters of the model, such as 124M.")],
    ratio: Annotated[
        float, typer.Option("--tokens-per-parameter", min=0.01, metavar="X", help="Tokens to train on / parameters.")
    ] = 20.0,
    optimizer: Annotated[ScaledOptimizer, typer.Option(help="The optimizer of the recipe.")] = ScaledOptimizer.adamw,
    vocab: Annotated[int, typer.Option(min=2, help="Ids of the tokenizer.")] = 50257,
    sequence_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sample.  [default: 1024, above 1B parameters 2048 or 4096]")
    ] = None,
    gpu: Annotated[str, typer.Option(help="The GPU to predict time and memory for, as in the catalogue.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="Number of these GPUs, in one node.")] = 1,
    price_hour: Annotated[
        float | None, typer.Option(min=0.0, metavar="USD", help="Price of one GPU for an hour, to predict the cost.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The recipe to write.")] = Path("scaled.toml"),
    json: JsonOption = False,
) -> None:
    """Write a recipe for a number of parameters: width, heads, batch, learning rates and steps by published rules.

    Also predicts time and GPU hours with AdamW and with Muon. Set data.train before training.

    Example: steelyard recipe scale --parameters 124M --tokens-per-parameter 20 --gpu h200 --out 124m.toml
    """
    from steelyard.tune.scaled_recipe import ScaleRequest, scaled

    size = parse_count("--parameters", "parameters", wanted)
    request = ScaleRequest(size, ratio, vocab, sequence_length, gpu, gpus, price_hour)
    runs, reasons = scaled(request, out.stem)
    files.write_text(out, to_toml(runs[optimizer.value].settings))
    console.say(f"wrote {out}: set data.train, then steelyard train {out}")
    result = {"out": str(out), "runs": {name: vars(run) for name, run in runs.items()}, "reasons": reasons}
    print_result(result, json, "\n".join(reasons))


def migrate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A recipe, a tune file or sites.toml.", show_default=False)
    ],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if there are old keys.")] = False,
    json: JsonOption = False,
) -> None:
    """Rename deprecated keys in a file, in place. Comments and order stay.

    Example: steelyard recipe migrate my.toml
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("this is not a text file", where=str(file), hint="a recipe is UTF-8 TOML") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(file)) from None
    parse(text, str(file))
    is_sites = file.name == "sites.toml"
    new, old_keys = migrate_text(text, is_sites)
    values, places = parse(new, str(file))
    if not is_sites and migrate_values(values) != values:
        left = next(key for key in places if renamed(key))
        raise UserError(f"{left} cannot be replaced in this form: write {renamed(left)}", where=places[left])
    if old_keys and not check:
        files.write_text(file, new)
    renames = {old: RENAMED_KEYS[old] for old in old_keys}
    lines = [f"{file}: {old} -> {new_key}" for old, new_key in renames.items()]
    print_result({"file": str(file), "renamed": renames, "written": bool(old_keys) and not check}, json,
                 "\n".join(lines) or f"{file}: no old keys")  # fmt: skip
    if old_keys and check:
        raise typer.Exit(1)


def from_megatron(
    scripts: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT... [-- ARGS]", help="Launch scripts, and their arguments."),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the recipe to this file.", show_default=False)] = None,
    sgd: Annotated[
        SgdChoice | None,
        typer.Option(
            help="Optimizer for --optimizer sgd: sgd (Megatron's) or sgd-sai (patched versions).", show_default=False
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Convert a Megatron launch script to a recipe. The script is read, never run.

    Also lists the commands that replace preprocess_data.py and convert.py, questions, and every flag that is not
    carried over. A key that cannot have the script's value is commented out, with a question; then the exit code is 2.

    Example: steelyard recipe from-megatron train_gpt3.sh --out gpt3.toml -- checkpoints logs vocab.json merges.txt data
    """
    end = scripts.index("--") if "--" in scripts else len(scripts)
    if not end:
        raise typer.BadParameter("give at least one script")
    paths, arguments = [Path(script) for script in scripts[:end]], scripts[end + 1 :]
    imported = megatron.read(paths, arguments, environment=os.environ, sgd=sgd, count=_vocab_size)
    for line in megatron.lines(imported):
        console.say(line)
    if imported.recipe is None:
        console.say("no training command found in the scripts: no recipe was written, only commands")
    elif out is not None:
        files.write_text(out, imported.recipe)
        console.say(f"wrote {out}")
    result: dict[str, Any] = megatron.result(imported)
    lost = sum(left.matters for left in imported.left)
    if console.quiet and (imported.questions or lost):
        console.warn(
            f"{len(imported.questions)} questions, {lost} flags not carried over; run without --quiet to list them"
        )
    text = "\n".join(imported.commands) if imported.recipe is None else imported.recipe.rstrip() if out is None else ""
    if json or text:
        print_result(result, json, text)
    if imported.unsound:
        keys = ", ".join(imported.unsound)
        raise UserError(
            f"the recipe is not complete: {keys} commented out",
            where=imported.where,
            hint="answer the QUESTION beside each of these keys",
        )


def _vocab_size(tokenizer: str) -> int | None:
    """The number of ids of a tokenizer, if it is on this machine."""
    from steelyard.text import tokenizer as tokenizers

    if not all(Path(part).expanduser().exists() for part in tokenizer.split(",")):
        return None
    try:
        return tokenizers.load_tokenizer(tokenizer).vocab_size
    except UserError:
        return None


SUBCOMMANDS = (check, show, list_, scale, migrate, from_megatron)
