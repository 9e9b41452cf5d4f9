"""a * b - c of arrays with a single rounding, as a fused multiply-add computes it, on every machine.

numpy has no such operation, and `math.fma` requires Python 3.13. So the product and the difference are computed with
their exact rounding errors (Dekker, Veltkamp, Knuth), and the terms are added so that only the last addition rounds.
This is exact unless a product underflows, which cannot happen with weights above 1e-280.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
SPLITTER = 2.0**27 + 1


def halves(values: Floats) -> tuple[Floats, Floats]:
    """Two numbers of at most 26 bits with the same sum; products of such numbers are exact."""
    scaled = SPLITTER * values
    high = scaled - (scaled - values)
    return high, values - high


def multiply_subtract(a: Floats, b: Floats, c: Floats, a_halves: tuple[Floats, Floats] | None = None) -> Floats:
    """a * b - c, rounded once. Pass `a_halves` if the same `a` is used several times."""
    (a_high, a_low), (b_high, b_low) = a_halves or halves(a), halves(b)
    product = a * b
    product_error = a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)
    difference, difference_error = _exact_sum(product, -c)
    # If product and c are within a factor of two of each other, the difference is exact, so its error is zero and the
    # sum of both errors is exact. Otherwise the errors are below the last bits of the difference, and their sum is
    # rounded to odd: it is a midpoint between two neighbours of the difference only if the exact sum is.
    return difference + _sum_rounded_to_odd(difference_error, product_error)


def _exact_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The rounded sum and its rounding error."""
    total = a + b
    b_taken = total - a
    return total, (a - (total - b_taken)) + (b - b_taken)


def _sum_rounded_to_odd(a: Floats, b: Floats) -> Floats:
    """The sum if it is exact; otherwise its neighbour whose last bit is set (Boldo and Melquiond)."""
    if not a.any():
        return b
    total, error = _exact_sum(a, b)
    is_even = total.view(np.int64) & 1 == 0
    return np.where((error != 0) & is_even, np.nextafter(total, np.copysign(np.inf, error)), total)
