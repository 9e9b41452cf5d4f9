"""A checkpoint knows no layout: two steps on one, two on another, and the curve is that of an undisturbed run."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from steelyard.checkpoint.dcp_metadata import SafeReader
from steelyard.core.run import Run
from tests.parallel.conftest import Layouts, difference
from tests.parallel.test_layouts import LARGER, ROUNDING, parallel

ALONE = (1, [])
BOTH = (4, [*parallel(tensor=2, pipeline=2), LARGER])
SHARDED = (4, parallel(zero=3))
PIPELINE = (2, parallel(pipeline=2))
HORIZON = ["train.steps=4", "eval.every=2", "optim.decay_steps=4"]
EVERY_LAYOUT = {
    "alone to tensor x pipeline": (ALONE, BOTH),
    "tensor x pipeline to alone": (BOTH, ALONE),
    "zero 3 to pipeline": (SHARDED, PIPELINE),
    "pipeline to zero 1": (PIPELINE, (2, parallel(zero=1))),
    "virtual stages to sequence": (
        (2, parallel(pipeline=2, schedule="interleaved", virtual=2)),
        (2, [*parallel(tensor=2, sequence_parallel="true"), "train.micro_batch=4"]),
    ),
    "context to hybrid": ((2, parallel(context=2)), (4, parallel(zero=2, replicate=2, data=4))),
}


def halves(layouts: Layouts, family: str, first: tuple, second: tuple, *settings: str) -> Run:
    """Two steps on the first layout, two more on the second."""
    run = layouts.run(first[0], family, *HORIZON, *settings, *first[1], "train.steps=2")
    layouts.run(second[0], family, *HORIZON, *settings, *second[1], path=run.path.name)
    assert "resumed at step 2" in layouts.said
    return run


@pytest.mark.parametrize("pair", EVERY_LAYOUT)
def test_a_run_goes_on_where_it_was_on_another_layout(layouts: Layouts, pair: str):
    family = "llama" if "context" in pair else "gpt"
    run = halves(layouts, family, *EVERY_LAYOUT[pair])
    assert difference(run.metrics(), layouts.alone(family, *HORIZON)) < ROUNDING[family]


@pytest.mark.parametrize(
    "settings",
    [
        ["optim.name=sgd-sai", "optim.learning_rate=3e-3"],
        ["optim.offload=true"],
        ["optim.state=bf16"],
        ["train.precision=fp16", "optim.name=sgd", "optim.learning_rate=0.1"],
        ["optim.name=sgd", "model.dropout=0.1", "train.batch_ramp={start=4, increment=2, samples=30}"],
    ],
    ids=["sgd-sai", "offload", "bf16 state", "fp16", "dropout and ramp-up"],
)
def test_what_is_not_a_weight_comes_along(layouts: Layouts, settings: list[str]):
    run = halves(layouts, "llama", (2, parallel(zero=3)), PIPELINE, *settings)
    tolerance = 3e-4 if "train.precision=fp16" in settings else ROUNDING["llama"]
    assert difference(run.metrics(), layouts.alone("llama", *HORIZON, *settings)) < tolerance


def shards(run: Run, step: int) -> list[Path]:
    return sorted((run.checkpoints / f"step-{step:08d}").glob("*.distcp"))


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_is_used(layouts: Layouts, damage: str):
    run = layouts.run(4, "llama", *HORIZON, *parallel(zero=3), "train.steps=2", "checkpoint.every=1")
    sums = json.loads((run.checkpoints / "step-00000002" / "state.json").read_text())["files"]
    assert sorted(sums) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]
    shard = shards(run, 2)[2]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    if damage == "remove":
        shard.unlink()
    layouts.run(2, "llama", *HORIZON, path=run.path.name)
    how = "is missing" if damage == "remove" else "does not match its checksum"
    assert f"step-00000002 is damaged: {shard.name} {how}" in layouts.said
    assert (run.checkpoints / "damaged" / "step-00000002").is_dir()
    assert "resumed at step 1" in layouts.said
    assert difference(run.metrics(), layouts.alone("llama", *HORIZON)) < ROUNDING["llama"]


@pytest.mark.parametrize("layout", [SHARDED, (4, parallel(zero=0)), BOTH], ids=["zero 3", "zero 0", "both"])
def test_ranks_write_every_element_once_and_none_writes_all(layouts: Layouts, layout: tuple):
    size, overrides = layout
    run = layouts.run(size, "gpt", *overrides, "train.steps=2", "eval.every=0")
    metadata = SafeReader(str(run.checkpoints / "step-00000002")).read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        pieces = {tuple(chunk.offsets): math.prod(chunk.sizes) for chunk in entry.chunks}
        assert len(pieces) == len(entry.chunks), f"{name} has a piece twice"
        assert sum(pieces.values()) == math.prod(entry.size), f"{name} is not whole"
    writers = Counter(info.relative_path for info in metadata.storage_data.values())
    assert len(writers) == size
    assert max(writers.values()) < 0.6 * len(metadata.storage_data)
