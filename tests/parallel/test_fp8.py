"""fp8 on sharded and tensor-parallel ranks, with the products that a CPU computes from rounded values.

A rank with part of a tensor scales it by another maximum, so that curves differ by the rounding of fp8.
"""

import pytest

from steelyard.core.run import Run
from tests.parallel import jobs
from tests.parallel.conftest import TWO_STEPS, Layouts, difference
from tests.parallel.test_layouts import LAYOUTS
from tests.parallel.test_settings import SGD

WIDE = "model={family='llama', layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=97, tied=false}"
ROUNDING = 1e-2
CHOSEN = ["zero 3 on 2", "sequence"]


def train(layouts: Layouts, size: int, name: str, *overrides: str) -> list[dict]:
    path = f"fp8-{name}".replace(" ", "-")
    settings = [*TWO_STEPS, WIDE, *SGD, *overrides]
    layouts.ranks.do(size, jobs.training_in_fp8, settings, path)
    return Run.open(layouts.folder / path).metrics()


@pytest.mark.parametrize("layout", CHOSEN)
def test_row_scaled_products_train_alike_on_a_layout(layouts: Layouts, layout: str):
    size, overrides = LAYOUTS[layout]
    row = ["train.fp8_scaling=row"]
    if not (layouts.folder / "fp8-alone").exists():
        train(layouts, 1, "alone", *row)
    alone = Run.open(layouts.folder / "fp8-alone").metrics()
    found = difference(train(layouts, size, layout, *row, *overrides), alone)
    assert found < ROUNDING, found
