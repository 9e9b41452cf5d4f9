"""Edits the site profiles (`launch/sites.py` reads them) and keeps the user's comments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.core.errors import UserError
from steelyard.core.recipe.toml import parse
from steelyard.core.safe_parse import toml_values
from steelyard.doctor import undo_log
from steelyard.launch import sites


def edited(path: Path, site: str, container: Mapping[str, str], binds: Sequence[str], environment: Mapping[str, str],
           prepend: Mapping[str, Sequence[str]]) -> str:  # fmt: skip
    """The file's text with these values in the site's table. Binds are keyed by target; folders are prepended."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    text = undo_log.text_of(path) if path.exists() else ""
    mark = "\ufeff" if text.startswith("\ufeff") else ""  # Some editors write a byte order mark.
    parse(text.removeprefix(mark), str(path))  # Rejects input that tomlkit cannot handle.
    try:
        document = tomlkit.parse(text.removeprefix(mark))
    except TOMLKitError as error:
        raise UserError(f"this is not TOML: {error}", where=str(path)) from None
    table = _table(document, site, path, is_super=True)
    inside = _table(table, "container", path)
    for name, value in container.items():
        if inside.get(name) != value:
            inside[name] = value
    ours = {_place(bind): bind for bind in binds}
    kept = [str(bind) for bind in inside.get("binds", []) if _place(str(bind)) not in ours]
    _put(inside, "binds", [*kept, *ours.values()])
    variables = _table(table, "environment", path) if environment else {}
    for name, value in environment.items():
        if variables.get(name) != value:
            variables[name] = value
    before = _table(table, "prepend", path) if prepend else {}
    for name, folders in prepend.items():
        _put(before, name, list(dict.fromkeys([*folders, *map(str, before.get(name, []))])))
    return mark + tomlkit.dumps(document)


def default(path: Path) -> str | None:
    """The default site."""
    try:
        named = toml_values(path.read_text(encoding="utf-8-sig")).get(sites.DEFAULT)
    except (FileNotFoundError, ValueError):
        return None  # The error is reported when the file is edited.
    return named if isinstance(named, str) else None


def _place(bind: str) -> str:
    """The target of a bind inside the container: `/data` for `/data`, `/b` for `/a:/b`."""
    parts = bind.split(":")
    return parts[1] if len(parts) > 1 else parts[0]


def _put(table: Any, name: str, values: list[str]) -> None:
    import tomlkit

    if [str(value) for value in table.get(name, [])] == values:
        return
    array = tomlkit.array()
    array.extend(values)
    table[name] = array.multiline(len(values) > 2)


def _table(parent: Any, name: str, path: Path, is_super: bool = False) -> Any:
    import tomlkit

    if name not in parent:
        parent[name] = tomlkit.table(is_super_table=is_super or None)
    if not isinstance(parent[name], dict):
        raise UserError(f"{name} exists, but is not a table", where=str(path))
    return parent[name]
