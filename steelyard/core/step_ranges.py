"""Parses step ranges of the command line. `10-12` is steps 10 and 11: the end is exclusive."""

from __future__ import annotations

import re

from steelyard.core.errors import UserError

MOST = 100_000


def steps_in(text: str, option: str) -> list[int]:
    """The steps of a list like `10-12,500`, ascending."""
    steps: set[int] = set()
    for part in text.split(","):
        matched = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        first = int(matched[1]) if matched else 0
        end = int(matched[2]) if matched and matched[2] else first + 1
        if not 0 < first < end or end - first > MOST:
            raise UserError(
                f"{option}: {part.strip() or 'an empty value'} is not a range of steps",
                hint="10-12 is steps 10 and 11: the end is exclusive",
            )
        steps.update(range(first, end))
    return sorted(steps)
