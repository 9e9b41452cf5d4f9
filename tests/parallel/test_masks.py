"""Masks are learned alike on every layout: the same noise, losses, norms and logits, but for rounding.

A micro-batch has its own noise, so all runs have the same micro-batches. A regulariser that is lost on a stage, counted
once more by a rank that shares a sequence, or noise that follows the rank, is off by 1e-3 and more.
"""

import pytest
import torch

from steelyard import checkpoint
from steelyard.checkpoint.formats import open_source
from steelyard.core.run import Run
from steelyard.sparsity import mask_file
from steelyard.sparsity.patterns import Pattern
from steelyard.sparsity.target_modules import maskable
from tests.parallel.conftest import Layouts, difference
from tests.parallel.test_layouts import parallel
from tests.parallel.test_settings import SGD

MASKS = [
    "sparsity.method=learned", "sparsity.temperature=[4.0, 0.5]", "sparsity.weight_reg=[1e-2, 1e-3]",
    "train.global_batch=4", "eval.every=0",
]  # fmt: skip
ROUNDING = 1e-5
FLIPPED = 3e-4  # three groups in ten thousand whose two best logits are as good as equal
LAYOUTS = {
    "zero 0": (2, parallel(zero=0)),
    "zero 1": (2, parallel(zero=1)),
    "zero 2": (2, parallel(zero=2)),
    "zero 3": (2, parallel(zero=3)),
    "tensor": (2, parallel(tensor=2)),
    "sequence": (2, parallel(tensor=2, sequence_parallel="true")),
    "context": (2, parallel(context=2)),
    "pipeline": (2, parallel(pipeline=2)),
    "pipeline that computes again": (2, parallel(pipeline=2, recompute="full")),
    "pipeline of empty ends": (4, parallel(pipeline=4, partition="0-2-2-0")),
    "interleaved": (2, parallel(pipeline=2, virtual=2, schedule="interleaved")),
    "zero bubble": (2, parallel(pipeline=2, schedule="zero-bubble")),
    "data x tensor zero 3": (4, parallel(tensor=2, zero=3)),
    "data x context zero 2": (4, parallel(context=2, zero=2)),
    "all of them": (8, parallel(tensor=2, pipeline=2, zero=1)),
}


def learn(layouts: Layouts, size: int, family: str, *overrides: str, path: str | None = None) -> Run:
    settings = (*MASKS, f"train.init_from={base_of(layouts, family)}", *overrides)
    if size == 1 and path is None:
        return layouts.once(family, *settings)
    return layouts.run(size, family, *settings, path=path)


def base_of(layouts: Layouts, family: str) -> str:
    """Weights that masks are learned for."""
    base = f"base-{family}"
    if not (layouts.folder / base).exists():
        layouts.run(1, family, "train.steps=2", path=base)
    return base


def logits(run: Run) -> dict[str, torch.Tensor]:
    saved = checkpoint.source(run.path)
    shapes = {name: shape for name, shape in saved.shapes().items() if name.startswith("model.")}
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    checkpoint.load(saved, tensors)
    return tensors


def assert_alike(run: Run, other: Run) -> None:
    records, others = run.metrics(), other.metrics()
    assert difference(records, others) < ROUNDING
    for ours, theirs in zip(records, others, strict=True):
        for key in {"mask_max_probability", "temperature", "scale", "weight_reg"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=ROUNDING)
        for key in {"mask_changed", "mask_from_prior"} & ours.keys():
            assert abs(ours[key] - theirs[key]) < FLIPPED
    ours, theirs = logits(run), logits(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) >= 4 * 6
    assert max((ours[name] - theirs[name]).abs().mean().item() for name in ours) < ROUNDING


@pytest.fixture(scope="session")
def alone(layouts: Layouts) -> dict[str, Run]:
    return {family: learn(layouts, 1, family) for family in ("gpt", "llama-bias")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["gpt", "llama-bias"])
def test_masks_are_learned_alike_on_a_layout(layouts: Layouts, alone: dict[str, Run], family: str, layout: str):
    size, overrides = LAYOUTS[layout]
    run = learn(layouts, size, family, *overrides)
    assert_alike(run, alone[family])


@pytest.fixture(scope="session")
def experts_alone(layouts: Layouts) -> Run:
    return learn(layouts, 1, "experts")


EXPERT_LAYOUTS = {
    "tensor": (2, parallel(tensor=2)),
    "pipeline": (2, parallel(pipeline=2)),
    "expert": (2, parallel(expert=2, zero=1)),
    "expert x tensor zero 3": (4, parallel(expert=2, tensor=2, zero=3)),
}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_masks_of_experts_are_learned_alike_on_a_layout(layouts: Layouts, experts_alone: Run, layout: str):
    size, overrides = EXPERT_LAYOUTS[layout]
    run = learn(layouts, size, "experts", *overrides)
    assert_alike(run, experts_alone)
    assert logits(run)["model.layers.3.mlp.experts.down.mask_logits"].shape == (4, 32, 6, 6)


def test_the_regulariser_is_no_smaller_than_what_layouts_are_held_to(layouts: Layouts, alone: dict[str, Run]):
    without = learn(layouts, 1, "gpt", "sparsity.weight_reg=[0.0, 0.0]")
    assert difference(without.metrics(), alone["gpt"].metrics()) > 100 * ROUNDING


DISTILL = ("sparsity.distill=0.5", "sparsity.distill_temperature=2.0", "eval.every=3")
FOR_DISTILLATION = ["context", "sequence", "interleaved", "zero bubble", "all of them"]


@pytest.fixture(scope="session")
def distilled(layouts: Layouts) -> Run:
    return learn(layouts, 1, "llama-bias", *DISTILL)


@pytest.mark.parametrize("layout", FOR_DISTILLATION)
def test_the_dense_model_is_followed_alike_on_a_layout(layouts: Layouts, distilled: Run, layout: str):
    size, overrides = LAYOUTS[layout]
    run = learn(layouts, size, "llama-bias", *DISTILL, *overrides)
    assert_alike(run, distilled)
    apart = [[record["distill_loss"] for record in each.metrics() if "loss" in record] for each in (run, distilled)]
    assert apart[0] == pytest.approx(apart[1], rel=10 * ROUNDING)  # a difference of nearly equal numbers


METHODS = {
    "sr-ste": ["sparsity.decay=0.05"],
    "fixed": ["sparsity.mask=largest.mask"],
    "joint": ["sparsity.mask_every=2", "sparsity.freeze_after=0.75", "sparsity.distill=0.5"],
}
UNDER_MASKS = ["zero 3", "tensor", "pipeline", "context", "all of them"]
JOINT = ["context", "data x tensor zero 3", "all of them"]


@pytest.mark.parametrize(
    ("method", "layout"),
    [(method, layout) for method in METHODS for layout in (JOINT if method == "joint" else UNDER_MASKS)],
)
def test_weights_are_trained_under_masks_alike_on_a_layout(layouts: Layouts, method: str, layout: str):
    base = base_of(layouts, "llama-bias")
    source = open_source(layouts.folder / base)
    largest = ((name, Pattern(2, 4).keep_best(source.tensor(name).abs())) for name in maskable(source.config))
    mask_file.write(layouts.folder / "largest.mask", largest, Pattern(2, 4), {})
    settings = (f"sparsity.method={method}", *METHODS[method], f"train.init_from={base}", "train.steps=4", *SGD)
    size, overrides = LAYOUTS[layout]
    one, run = layouts.once("llama-bias", *settings), layouts.run(size, "llama-bias", *settings, *overrides)
    assert difference(run.metrics(), one.metrics()) < ROUNDING
    for ours, theirs in zip(run.metrics(), one.metrics(), strict=True):
        for key in {"zeros", "mask_scale", "distill_loss"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=10 * ROUNDING, abs=ROUNDING)
    if method == "joint":
        assert run.metrics()[-1].get("zeros", 0.5) == 0.5
        ours, theirs = (open_source(each.path) for each in (run, one))
        same = [
            ((ours.tensor(name) != 0) == (theirs.tensor(name) != 0)).double().mean() for name in maskable(ours.config)
        ]
        assert min(same) > 1 - FLIPPED


# The norms of sharp masks depend on every rounding: bf16 moves the last one by 4e-2 on one rank, fp16 by 1.4e-3.
PRECISIONS = {"bf16": 5e-2, "fp16": 1e-2}
LOSSES_IN_HALF_PRECISION = 1e-3


@pytest.mark.parametrize("layout", ["zero 1", "zero 3", "tensor", "pipeline", "data x tensor zero 3"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_masks_are_learned_in_half_precision_on_a_layout(layouts: Layouts, layout: str, precision: str):
    """Frozen weights lie in half precision beside logits in fp32, whole or in shards."""
    size, overrides = LAYOUTS[layout]
    setting = f"train.precision={precision}"
    one, run = (learn(layouts, ranks, "llama-bias", setting, *more) for ranks, more in ((1, []), (size, overrides)))
    assert difference(run.metrics(), one.metrics()) < PRECISIONS[precision]
    for ours, theirs in zip(run.metrics(), one.metrics(), strict=True):
        key = "loss" if "loss" in ours else "valid_loss"
        assert ours[key] == pytest.approx(theirs[key], rel=LOSSES_IN_HALF_PRECISION)
    assert {tensor.dtype for tensor in logits(run).values()} == {torch.float32}
    apart = [(a - b).abs().mean().item() for a, b in zip(logits(run).values(), logits(one).values(), strict=True)]
    assert max(apart) < 1e-3


@pytest.mark.parametrize(("first", "second"), [("tensor", "zero 3"), ("all of them", "context")])
def test_a_run_of_masks_goes_on_on_another_layout(layouts: Layouts, first: str, second: str):
    name = f"moved-{first}-{second}".replace(" ", "-")
    for layout, steps in ((first, 2), (second, 3)):
        size, overrides = LAYOUTS[layout]
        run = learn(layouts, size, "llama-bias", *overrides, f"train.steps={steps}", path=name)
    assert [record["step"] for record in run.metrics() if "loss" in record] == [1, 2, 3]
    assert all(torch.isfinite(tensor).all() for tensor in logits(run).values())
    learn(layouts, 1, "llama-bias", "train.steps=2", path=f"{name}-alone")
    one = learn(layouts, 1, "llama-bias", "train.steps=3", path=f"{name}-alone")
    assert_alike(run, one)
