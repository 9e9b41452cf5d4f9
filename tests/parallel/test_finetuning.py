"""Tuning on packed conversations is the same on every layout, in full and by adapters.

Rows are filled unevenly, so a rank that weighed by rows instead of learned tokens would be off by percents.
"""

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.core.run import Run
from tests.finetuning.conftest import bases, expert_bases, talks, write_jsonl  # noqa: F401
from tests.finetuning.test_dpo import pairs
from tests.parallel import jobs
from tests.parallel.conftest import Layouts, difference
from tests.parallel.test_layouts import parallel

COMMON = ["train.steps=2", "train.global_batch=8", "eval.every=2", "optim.learning_rate=1e-3",
          "parallel.timeout_minutes=3"]  # fmt: skip
KINDS = {
    "full": [],
    "lora": ["finetune.adapter.rank=4", "optim.learning_rate=1e-2"],
    "noise": ["finetune.neftune=50.0"],
    "dpo": ["finetune.dpo.beta=0.3"],
    "dora": ["finetune.adapter.kind=dora", "finetune.adapter.rank=4", "optim.learning_rate=1e-2"],
}
KINDS["nf4"] = [*KINDS["dora"], "finetune.base_precision=nf4", "finetune.double_quant=true"]
KINDS["int8"] = [*KINDS["lora"], "finetune.base_precision=int8"]
LAYOUTS = {
    "zero 0": (2, parallel(zero=0)),
    "zero 1": (2, parallel(zero=1)),
    "zero 2": (2, parallel(zero=2)),
    "zero 3": (2, parallel(zero=3)),
    "tensor": (2, parallel(tensor=2)),
    "sequence": (2, parallel(tensor=2, sequence_parallel="true")),
    "context": (2, parallel(context=2)),
    "pipeline": (2, parallel(pipeline=2)),
    "zero bubble": (2, parallel(pipeline=2, schedule="zero-bubble")),
    "data x tensor zero 3": (4, parallel(tensor=2, zero=3)),
    "all of them": (8, parallel(tensor=2, pipeline=2, zero=1)),
}
ROUNDING = {"llama": 2e-5, "gpt": 2e-4}


def tune(layouts: Layouts, bases, size: int, family: str, kind: str, name: str, *overrides: str) -> Run:  # noqa: F811
    if not (layouts.folder / "talks.jsonl").exists():
        write_jsonl(layouts.folder / "talks.jsonl", talks(60))
        write_jsonl(layouts.folder / "pairs.jsonl", pairs(20))
    path = f"tuned-{family}-{kind}-{name}".replace(" ", "-")
    if not (layouts.folder / path).exists():
        data = "pairs.jsonl" if kind == "dpo" else "talks.jsonl"
        settings = [*COMMON, *KINDS[kind], *layouts.always, *overrides]
        layouts.ranks.do(size, jobs.tuned, str(bases / family), settings, path, data)
    return Run.open(layouts.folder / path)


# A quantized base differs from others only in how matrices are stored and sharded, so fewer of these are enough.
QUANTIZED = {"nf4": ("llama", LAYOUTS), "int8": ("gpt", ("zero 3", "tensor", "pipeline"))}
CASES = [
    (family, kind, layout)
    for family in ROUNDING
    for kind in KINDS
    for layout in LAYOUTS
    if kind not in QUANTIZED or (QUANTIZED[kind][0] == family and layout in QUANTIZED[kind][1])
]


@pytest.mark.parametrize(("family", "kind", "layout"), CASES)
def test_tuning_is_alike_on_a_layout(layouts: Layouts, bases, family: str, kind: str, layout: str):  # noqa: F811
    size, overrides = LAYOUTS[layout]
    alone = tune(layouts, bases, 1, family, kind, "alone")
    run = tune(layouts, bases, size, family, kind, layout, *overrides)
    assert len(run.metrics()) == 4
    assert difference(run.metrics(), alone.metrics()) < ROUNDING[family]
    for ours, theirs in zip(run.metrics(), alone.metrics(), strict=True):
        for key in ("reward_margin", "reward_accuracy"):
            assert ours.get(key) == pytest.approx(theirs.get(key), abs=1e-4)
    assert run.metrics()[-1]["valid_loss"] < run.metrics()[0]["valid_loss"]
    ours, theirs = open_source(run.path), open_source(alone.path)
    assert ours.sizes() == theirs.sizes()
    assert all(torch.allclose(ours.tensor(name), theirs.tensor(name), atol=2e-3) for name in ours.names())


KINDS["experts"] = [*KINDS["lora"], "finetune.adapter.targets=['attention', 'experts']"]
EXPERT_LAYOUTS = {
    "expert zero 0": (2, parallel(expert=2, zero=0)),
    "expert zero 2": (2, parallel(expert=2, zero=2)),
    "tensor": (2, parallel(tensor=2)),
    "expert zero 3 on 4": (4, parallel(expert=2, zero=3)),
    "expert x tensor": (4, parallel(expert=2, tensor=2, sequence_parallel="true", zero=1)),
}


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_adapters_of_experts_are_alike_on_a_layout(layouts: Layouts, expert_bases, layout: str):  # noqa: F811
    size, overrides = EXPERT_LAYOUTS[layout]
    alone = tune(layouts, expert_bases, 1, "mixtral", "experts", "alone")
    run = tune(layouts, expert_bases, size, "mixtral", "experts", layout, *overrides)
    assert difference(run.metrics(), alone.metrics()) < ROUNDING["llama"]
    ours, theirs = open_source(run.path), open_source(alone.path)
    assert ours.sizes() == theirs.sizes()
    assert all(torch.allclose(ours.tensor(name), theirs.tensor(name), atol=2e-3) for name in ours.names())


def test_conversations_named_by_where_they_begin_go_through_every_stage(layouts: Layouts, bases):  # noqa: F811
    alone = tune(layouts, bases, 1, "llama", "full", "alone")
    words = [*COMMON, *KINDS["full"], *parallel(tensor=2, pipeline=2, sequence_parallel="true")]
    layouts.ranks.do(4, jobs.tuned_by_starts, str(bases / "llama"), words, "by-starts", "talks.jsonl")
    assert difference(Run.open(layouts.folder / "by-starts").metrics(), alone.metrics()) < ROUNDING["llama"]


def test_noise_is_more_than_what_layouts_are_held_to(layouts: Layouts, bases):  # noqa: F811
    plain, noisy = (tune(layouts, bases, 1, "gpt", kind, "alone") for kind in ("full", "noise"))
    assert difference(noisy.metrics(), plain.metrics()) > 10 * ROUNDING["gpt"]
