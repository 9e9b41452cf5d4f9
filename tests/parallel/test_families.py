"""Current families on several ranks: tensor 2 x pipeline 2 gives the curve of one process, and goes on elsewhere."""

import pytest

from tests.parallel.conftest import Layouts, difference
from tests.parallel.test_layouts import LARGER, parallel
from tests.parallel.test_resume import HORIZON, halves
from tests.parallel.test_settings import SGD, SGD_ROUNDING

FIRST = (4, [*parallel(tensor=2, pipeline=2, sequence_parallel="true"), LARGER])
SECOND = (2, [*parallel(tensor=2), LARGER])


@pytest.mark.parametrize("family", ["mistral", "qwen3", "gemma2", "gemma3", "olmo2", "smollm3", "experts"])
def test_a_family_trains_alike_on_tensor_and_pipeline_ranks_and_goes_on_elsewhere(layouts: Layouts, family: str):
    run = halves(layouts, family, FIRST, SECOND, *SGD)
    assert difference(run.metrics(), layouts.alone(family, *HORIZON, *SGD)) < SGD_ROUNDING


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_a_window_is_the_same_over_parts_of_a_sequence(layouts: Layouts, family: str):
    curve = layouts.run(2, family, *parallel(context=2), LARGER, *SGD).metrics()
    assert difference(curve, layouts.alone(family, *SGD)) < SGD_ROUNDING
