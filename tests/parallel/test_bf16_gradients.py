"""Gradients in bf16 on layouts: the tensors of every rank, and the curve of one process within bf16."""

import pytest

from steelyard.core.run import Run
from tests.parallel import jobs
from tests.parallel.conftest import FAMILIES, TWO_STEPS, Layouts, difference
from tests.parallel.test_layouts import LAYOUTS
from tests.parallel.test_settings import SGD

SETTINGS = [*SGD, "train.precision=bf16", "optim.gradients=bf16"]
ROUNDING = 5e-3
CHOSEN = ["zero 0 on 2", "zero 1 on 2", "zero 2 on 2", "zero 3 on 2", "sequence", "pipeline 2 1f1b"]


@pytest.mark.parametrize("layout", CHOSEN)
def test_gradients_are_bf16_on_a_layout(layouts: Layouts, layout: str):
    size, overrides = LAYOUTS[layout]
    path = f"bf16-gradients-{layout}".replace(" ", "-")
    settings = [*TWO_STEPS, FAMILIES["gpt"], *SETTINGS, *overrides]
    for found in layouts.ranks.do(size, jobs.training_with_gradient_dtypes, settings, path):
        assert found == ["torch.bfloat16"]
    curve = Run.open(layouts.folder / path).metrics()
    assert difference(curve, layouts.alone("gpt", *SETTINGS)) < ROUNDING
