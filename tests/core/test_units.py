import pytest

from steelyard.core import units


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (999.96, "1.00k"),
        (1000, "1.00k"),
        (124_439_808, "124M"),
        (6_738_415_616, "6.74B"),
        (0.5, "0.50"),
    ],
)
def test_counts_keep_three_digits(number, text):
    assert units.count(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65, "1:05"), (3849, "1:04:09"), (-3, "0:00")])
def test_durations_read_like_a_clock(seconds, text):
    assert units.duration(seconds) == text


def test_sizes_are_binary():
    assert units.size(1536) == "1.50 KiB"
    assert units.size(24 * 2**30) == "24.0 GiB"
