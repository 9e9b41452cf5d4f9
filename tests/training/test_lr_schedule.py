import pytest

from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.optim_section import OptimSection
from steelyard.core.recipe.train_section import BatchRamp, TrainSection
from steelyard.training.lr_schedule import TrainProgress, learning_rate

BATCH, LENGTH = 4, 16


def progress(steps: int) -> TrainProgress:
    return TrainProgress(steps, steps * BATCH, steps * BATCH * LENGTH)


def rate(optim: OptimSection, step: int, steps: int) -> float:
    return learning_rate(optim, progress(step), progress(steps))


def test_schedules_climb_and_fall():
    optim = OptimSection(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=10)
    assert rate(optim, 1, 110) == pytest.approx(0.1)
    assert rate(optim, 10, 110) == 1.0
    assert rate(optim, 60, 110) == pytest.approx(0.55)
    assert rate(optim, 110, 110) == pytest.approx(0.1)
    linear = optim.model_copy(update={"schedule": "linear"})
    assert rate(linear, 35, 110) == pytest.approx(0.775)
    assert rate(optim.model_copy(update={"schedule": "constant"}), 99, 110) == 1.0
    wsd = optim.model_copy(update={"schedule": "wsd", "decay_fraction": 0.2})
    assert rate(wsd, 80, 110) == 1.0
    assert rate(wsd, 99, 110) == pytest.approx(0.1 + 0.9 * 0.5)
    assert rate(wsd, 110, 110) == pytest.approx(0.1)


def test_a_climb_may_be_a_share_of_the_run():
    optim = OptimSection(learning_rate=1.0, warmup_share=0.1)
    in_steps = OptimSection(learning_rate=1.0, warmup_steps=11)
    assert [rate(optim, step, 110) for step in range(111)] == [rate(in_steps, step, 110) for step in range(111)]
    assert rate(optim, 1, 5) == rate(OptimSection(learning_rate=1.0, warmup_steps=1), 1, 5)


def test_a_schedule_may_end_before_or_behind_the_run():
    optim = OptimSection(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=3200, decay_steps=320_000)
    assert rate(optim, 50, 50) == pytest.approx(50 / 3200)
    short = OptimSection(learning_rate=1.0, min_learning_rate=0.1, decay_steps=100)
    assert rate(short, 100, 500) == rate(short, 400, 500) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", ["steps", "samples", "tokens"])
@pytest.mark.parametrize("horizon", ["steps", "samples", "tokens"])
def test_steps_samples_and_tokens_give_the_same_rates(schedule, warmup, horizon):
    unit = {"steps": 1, "samples": BATCH, "tokens": BATCH * LENGTH}
    settings = {"learning_rate": 1.0, "min_learning_rate": 0.1, "schedule": schedule}
    in_steps = OptimSection(warmup_steps=7, decay_steps=60, **settings)
    other = OptimSection(**{f"warmup_{warmup}": 7 * unit[warmup], f"decay_{horizon}": 60 * unit[horizon]}, **settings)
    ours, theirs = ([rate(optim, step, 80) for step in range(1, 81)] for optim in (in_steps, other))
    assert ours == pytest.approx(theirs)
    assert min(ours) == pytest.approx(0.1 if schedule != "constant" else 1 / 7)


def test_a_climb_in_samples_takes_more_steps_while_the_batch_is_small():
    optim = OptimSection(learning_rate=1.0, warmup_samples=400)
    assert learning_rate(optim, TrainProgress(50, 200, 3200), progress(1000)) == pytest.approx(0.5)
    assert learning_rate(
        optim, TrainProgress(100, 400, 6400), TrainProgress(100_000, 400_000, 6_400_000)
    ) == pytest.approx(1.0)


@pytest.mark.parametrize(("unit", "length"), [("samples", 100), ("samples", 102), ("tokens", 1600)])
def test_a_run_may_be_measured_in_samples_or_tokens(workplace, unit, length):
    text = workplace.recipe.read_text()
    workplace.recipe.write_text(text.replace("steps = 20\n", f"{unit} = {length}\n"))
    assert load_recipe(workplace.recipe).train.steps == 25
    with pytest.raises(UserError, match=f"set steps or {unit}, not both"):
        load_recipe(workplace.recipe, ["train.steps=20"])


def test_a_growing_batch_makes_more_steps_of_the_same_samples():
    train = TrainSection(global_batch=16, batch_ramp=BatchRamp(start=4, increment=4, samples=36))
    sizes, consumed = [], 0
    while consumed < 36 + 32:
        sizes.append(train.batch_at(consumed))
        consumed += sizes[-1]
    assert sizes == [4, 4, 4, 8, 8, 12, 16, 16]
    assert [train.samples_in(steps) for steps in (1, 3, 4, 8)] == [4, 12, 20, 72]
    assert [train.steps_for(samples) for samples in (4, 12, 20, 72)] == [1, 3, 4, 8]
