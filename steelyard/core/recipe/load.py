"""Loads a recipe: reads a file or shipped recipe and those it extends, applies overrides, and validates the result."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import islice, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from steelyard.core.errors import UserError
from steelyard.core.recipe.families import FAMILIES
from steelyard.core.recipe.recipe import Recipe
from steelyard.core.recipe.renamed_keys import is_own, migrate_values, renamed
from steelyard.core.recipe.site_section import SiteSection
from steelyard.core.recipe.toml import leaves, name_after, parse_value, place_of, read
from steelyard.core.safe_parse import MOST_DEPTH

COMMAND_LINE = "command line"
REMOVED = "none"  # The value of an override that removes an optional key or section.
PREFIXES = {Recipe: "", SiteSection: "site."}  # In renamed_keys, of the keys of a section with its own file.
MOST_PROBLEMS, LONGEST_KEY, LONGEST_MESSAGE = 20, 200, 1000  # problems of a file, and characters of one
NAMES_ELSEWHERE = {
    "lr": "optim.learning_rate",
    "min_lr": "optim.min_learning_rate",
    "train_iters": "train.steps",
    "max_steps": "train.steps",
    "batch_size": "train.global_batch",
    "num_layers": "model.layers",
    "hidden_size": "model.hidden",
    "intermediate_size": "model.ffn",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "vocab_size": "model.vocab",
    "seq_length": "data.sequence_length",
}


def load_recipe(
    source: str | Path | dict[str, Any],
    overrides: Sequence[str] = (),
    complete: Callable[[Any], None] | None = None,
    override_places: Sequence[str] = (),
) -> Recipe:
    """Load a recipe from a path, a shipped name or a dict of values, and apply overrides such as `train.steps=50`.

    `complete` may add derived values before validation. `override_places` are the places of the first overrides, if
    they come from another file; the others come from the command line.
    """
    values, places = (source, {}) if isinstance(source, dict) else _read(str(source), ())
    for override, place in zip_longest(overrides, override_places[: len(overrides)], fillvalue=COMMAND_LINE):
        _override(values, places, override, place)
    if not isinstance(source, dict):
        values.setdefault("name", name_after(source, "recipe"))
    if complete is not None:
        complete(values)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise explained(error, values, places, COMMAND_LINE if isinstance(source, dict) else str(source)) from None
    recipe._places = places
    return recipe


def written(source: str | Path) -> dict[str, Any]:
    """The values that a recipe and those it extends set, without defaults and derived values, to store elsewhere."""
    values, _ = _read(str(source), ())
    return values | {"name": values.get("name", name_after(source, "recipe"))}


def shipped() -> dict[str, Path]:
    """The recipes of this package, by name."""
    folder = Path(str(files("steelyard") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _read(source: str, below: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    path = _find(source, below[-1] if below else None)
    if str(path) in below:
        raise UserError("recipes extend each other in a cycle", where=str(path), hint=" -> ".join([*below, str(path)]))
    values, places = read(path, "a recipe")
    if is_own(path):
        values = migrate_values(values)
    parent = values.pop("extends", None)
    if parent is None:
        return values, places
    if not isinstance(parent, str):
        raise UserError("extends must be one name or path", where=places.get("extends"))
    inherited, inherited_places = _read(parent, (*below, str(path)))
    inherited.pop("name", None)
    return _merged(inherited, values), inherited_places | places


def _find(source: str, extended_by: str | None) -> Path:
    path = Path(source).expanduser()
    beside = Path(extended_by).parent / path if extended_by else path
    if beside.is_file():
        return beside
    known = shipped()
    if source in known:
        return known[source]
    near = difflib.get_close_matches(source, known, n=1)
    hint = f"did you mean the shipped recipe {near[0]}?" if near else f"shipped recipes: {', '.join(known)}"
    what = "is a folder, not a recipe" if beside.is_dir() else "there is no such file or shipped recipe"
    raise UserError(f"{source}: {what}", where=extended_by, hint=hint)


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in top.items():
        below = base.get(key)
        both[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return both


def _override(values: dict[str, Any], places: dict[str, str], override: str, place: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        where = None if place == COMMAND_LINE else place
        hint = "write section.key=value, like train.steps=50"
        raise UserError(f"{override!r} is not an override", where=where, hint=hint)
    if text.strip() == REMOVED and _is_optional(key.strip()):
        _remove(values, key.strip().split("."))
        return
    table = values
    *sections, last = key.strip().split(".")
    if len(sections) > MOST_DEPTH:
        raise UserError(f"{key:.40}... is not a key: it has {len(sections) + 1} parts", where=place)
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"{section} is not a section", where=place, hint="write section.key=value")
    try:
        table[last] = parse_value(text.strip())
    except UserError as error:
        error.where = f"{place}: {key.strip()}"
        raise
    places[key.strip()] = place


def _remove(values: dict[str, Any], path: Sequence[str]) -> None:
    below = values.get(path[0])
    if len(path) == 1:
        values.pop(path[0], None)
    elif isinstance(below, dict):
        _remove(below, path[1:])


def _is_optional(key: str) -> bool:
    """Whether a key or section may be left out, and `none` is not one of its own values."""
    options: list[Any] = [Recipe]
    for part in key.split("."):
        fields = [option.model_fields.get(part) for option in options if _is_section(option)]
        options = [option for field in fields if field is not None for option in _options(field.annotation)]
    return type(None) in options and not any(REMOVED in get_args(option) for option in options)


def explained(
    error: ValidationError,
    values: dict[str, Any],
    places: dict[str, str],
    source: str,
    section: type[BaseModel] = Recipe,
) -> UserError:
    """One error that lists every problem of a file, each with its place and a hint."""
    problems = (problem for detail in error.errors() for problem in _problems(detail, values, section))
    texts = []
    for key, message, hint in islice(problems, MOST_PROBLEMS):
        place = place_of(key, places) or place_of(f"{key}.0", places) or source
        texts.append(
            f"{place}: {key:.{LONGEST_KEY}}: {message:.{LONGEST_MESSAGE}}" + (f"\n  hint: {hint}" if hint else "")
        )
    more = ["there are more problems"] if next(problems, None) else []
    return UserError("\n".join([*texts, *more]))


def problems(values: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The problems of the values of a recipe: key, message and hint; empty if they are valid."""
    try:
        Recipe.model_validate(values)
    except ValidationError as error:
        return [problem for detail in error.errors() for problem in _problems(detail, values, Recipe)]
    return []


def _problems(detail: ErrorDetails, values: dict[str, Any], section: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    kind, context = detail["type"], detail.get("ctx", {})
    key = ".".join(str(part) for part in _without_family(detail["loc"]))
    if kind == "contradiction":
        yield context["key"], context["message"], context["hint"]
    elif kind == "default_factory_not_called":
        return  # The key that the default depends on is wrong itself, and already listed.
    elif kind == "extra_forbidden":
        table = detail["input"]
        unknown = [f"{key}.{leaf}" for leaf, _ in leaves(table)] if isinstance(table, dict) and table else [key]
        for name in unknown:
            prefix = PREFIXES.get(section, "-")
            new = renamed(prefix + name)
            if new is None:
                yield name, "unknown key", nearest(name, values, section)
            else:
                message = f"this key is now called {new.removeprefix(prefix)}"
                yield name, message, "steelyard recipe migrate FILE rewrites it"
    elif kind == "missing":
        needs = "a model needs at least family, layers, hidden, heads and vocab" if key.startswith("model") else ""
        yield key, "is missing", needs
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield f"{key}.family", f"must be one of {', '.join(FAMILIES)}", ""
    elif kind in ("model_type", "model_attributes_type"):
        yield key, f"must be a table, not {_shown(detail['input'])}", ""
    elif kind == "string_pattern_mismatch":
        yield key, f"{detail['input']!r} may contain only letters, digits, dots, dashes and underscores", ""
    else:
        message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "should be")
        yield key, f"{message}, not {_shown(detail['input'])}", ""


def _without_family(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Remove the family, which pydantic inserts between `model` and its key."""
    return (location[0], *location[2:]) if location[:1] == ("model",) and len(location) > 1 else location


def nearest(key: str, values: Mapping[str, Any] = MappingProxyType({}), section: type[BaseModel] = Recipe) -> str:
    """A hint with the valid key closest to a misspelt one: the same word in another section, or a similar word."""
    if len(key) > LONGEST_KEY:
        return ""
    family = values.get("model", {}).get("family") if isinstance(values.get("model"), dict) else None
    valid = [name for name in valid_keys(section) if not _of_another_family(name, family)]
    key = ".".join(part for part in key.split(".") if not part.isdigit())
    if section is Recipe and _of_another_family(key, family) and key in valid_keys(Recipe):
        positions = ": rotary positions need no table, and data.sequence_length sets the context"
        return f"family {family} has no such key; remove it" + (positions if key == "model.positions" else "")
    word = key.rpartition(".")[2]
    same_word = [name for name in valid if name.rpartition(".")[2] == word]
    if word in NAMES_ELSEWHERE and not same_word:
        return f"did you mean {NAMES_ELSEWHERE[word]}?"
    near = difflib.get_close_matches(key, same_word or valid, n=1, cutoff=0.5) or same_word[:1]
    if not near and section is not Recipe:
        return f"valid keys are {', '.join(valid)}"
    return f"did you mean {near[0]}?" if near else "steelyard recipe show prints every valid key"


def valid_keys(section: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section and its subsections."""
    for name, field in section.model_fields.items():
        inner = [option for option in _options(field.annotation) if _is_section(option)]
        if inner:
            for option in inner:
                yield from valid_keys(option, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _options(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType, list):
        for option in get_args(annotation):
            yield from _options(option)
    else:
        yield annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _of_another_family(name: str, family: Any) -> bool:
    section, _, key = name.partition(".")
    return section == "model" and family in FAMILIES and key.partition(".")[0] not in FAMILIES[family].model_fields


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
