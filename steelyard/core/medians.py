"""A median in which each value counts as often as its weight."""

from __future__ import annotations

from collections.abc import Sequence


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest value up to which half of the weight lies. With equal weights it is the lower median."""
    half, passed = sum(weights) / 2, 0.0
    pairs = sorted(zip(values, weights, strict=True))
    for value, weight in pairs:
        passed += weight
        if passed >= half:
            return value
    return pairs[-1][0]
