"""Steps as people name them on a command line: `10-12` is 10 and 11, for the end is left out."""

from __future__ import annotations

import re

from steelyard.core.errors import UserError

MOST = 100_000


def steps_in(text: str, option: str) -> list[int]:
    """The steps of a list like `10-12,500`, ascending."""
    found: set[int] = set()
    for part in text.split(","):
        matched = re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part)
        first = int(matched[1]) if matched else 0
        end = int(matched[2]) if matched and matched[2] else first + 1
        if not 0 < first < end or end - first > MOST:
            raise UserError(
                f"{option}: {part.strip() or 'nothing'} names no steps",
                hint="write them like 10-12, which is steps 10 and 11: the end is left out",
            )
        found.update(range(first, end))
    return sorted(found)
