"""Formats numbers for messages: `12.3k`, `1.5 GiB`, `1:04:09`."""

from __future__ import annotations

import math


def count(number: float) -> str:
    """A count with three significant digits and a metric suffix: 6738415616 is `6.74B`."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit * 0.9995:
            return f"{_three_digits(number / limit)}{suffix}"
    return f"{number:.0f}" if number == int(number) else _three_digits(number)


def size(bytes_: float) -> str:
    """A size in binary units: 1536 is `1.50 KiB`."""
    for limit, suffix in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(bytes_) >= limit:
            return f"{_three_digits(bytes_ / limit)} {suffix}"
    return f"{bytes_:.0f} B"


def duration(seconds: float) -> str:
    """A duration in hours, minutes and seconds: 3849 is `1:04:09`, 65 is `1:05`."""
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def perplexity(loss: float) -> str:
    """The perplexity of a loss in nats; that of an untrained or diverged model may be too large to print."""
    return f"{math.exp(loss):.2f}" if loss < 50 else "too large"


def _three_digits(number: float) -> str:
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{digits}f}"
