"""A reading as a person and as a program sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steelyard.megatron.import_script import Reading
from steelyard.megatron.tool_commands import LATER


def lines(reading: Reading) -> Iterator[str]:
    """What a person should know beside the recipe: questions first, what is lost, then what is not."""
    yield from (f"note: {note}" for note in reading.notes)
    yield from (f"question: {question}" for question in reading.questions)
    lost = [left for left in reading.left if left.matters]
    if lost:
        yield f"not carried over ({len(lost)}):"
        yield from (f"  {f'{left.flag} {left.value}'.strip()}: {left.reason}" for left in lost)
    groups: dict[str, list[str]] = {}
    for left in reading.left:
        if not left.matters:
            groups.setdefault(left.reason, []).append(left.flag)
    if groups:
        yield f"not needed here ({sum(map(len, groups.values()))}):"
        yield from (f"  {' '.join(flags)}: {reason}" for reason, flags in groups.items())
    if reading.recipe is not None:
        yield from (f"command: {command}" for command in reading.commands)
    if any(command.startswith("steelyard checkpoint convert") for command in reading.commands):
        yield f"note: {LATER}"


def result(reading: Reading) -> dict[str, Any]:
    """The same as one object. `recipe` holds only what the script or Megatron sets, and `toml` says why."""
    return {
        "recipe": reading.written,
        "toml": reading.recipe,
        "commands": reading.commands,
        "carried": reading.carried,
        "not_carried": [vars(left) for left in reading.left],
        "questions": reading.questions,
        "notes": reading.notes,
    }
