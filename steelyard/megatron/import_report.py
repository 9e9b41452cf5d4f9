"""The result of a conversion as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steelyard.megatron.import_script import ImportResult


def lines(imported: ImportResult) -> Iterator[str]:
    """The report on a conversion: notes, questions, flags that are lost, and flags that are not needed."""
    yield from (f"note: {note}" for note in imported.notes)
    yield from (f"question: {question}" for question in imported.questions)
    lost = [left for left in imported.left if left.matters]
    if lost:
        yield f"not carried over ({len(lost)}):"
        yield from (f"  {f'{left.flag} {left.value}'.strip()}: {left.reason}" for left in lost)
    groups: dict[str, list[str]] = {}
    for left in imported.left:
        if not left.matters:
            groups.setdefault(left.reason, []).append(left.flag)
    if groups:
        yield f"not needed here ({sum(map(len, groups.values()))}):"
        yield from (f"  {' '.join(flags)}: {reason}" for reason, flags in groups.items())
    if imported.recipe is not None:
        yield from (f"command: {command}" for command in imported.commands)


def result(imported: ImportResult) -> dict[str, Any]:
    """The same as a JSON object. `recipe` has only keys that the script or Megatron sets; `toml` has the reasons."""
    return {
        "recipe": imported.written,
        "toml": imported.recipe,
        "commands": imported.commands,
        "carried": imported.carried,
        "not_carried": [vars(left) for left in imported.left],
        "questions": imported.questions,
        "unsound": imported.unsound,
        "notes": imported.notes,
    }
