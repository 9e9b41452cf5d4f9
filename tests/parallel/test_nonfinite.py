"""Values that are not finite on one of several ranks: all ranks stop together, and the rank is named."""

import math
import os

import pytest
import torch

from steelyard import checkpoint
from steelyard.training.extension import Extension
from tests.parallel import jobs
from tests.parallel.conftest import FAMILIES, TWO_STEPS, Layouts
from tests.parallel.test_layouts import parallel

FEW = ["train.steps=4", "eval.every=0", "train.micro_batch=2"]
SAMPLE = 22  # Of the third step: the second micro-batch of the second of two data-parallel ranks.
CAUSES = {
    "zero 0": (2, parallel(zero=0)),
    "zero 3": (2, parallel(zero=3)),
    "tensor x data": (4, parallel(tensor=2, zero=0)),
    "pipeline x data": (4, parallel(pipeline=2, zero=1)),
    "tensor": (2, parallel(tensor=2)),
    "pipeline": (2, parallel(pipeline=2)),
}


class Faulty(Extension):
    """The last layer's output is NaN for one sample, or in the third step for all samples of some ranks."""

    needs_samples = True

    def __init__(self, sample: int | None = None, ranks: tuple[str, ...] = ()) -> None:
        self.sample, self.ranks, self.step = sample, ranks, 0

    def transform(self, model):
        if "3" in model.layers:
            model.layers["3"].register_forward_hook(self.spoil)

    def begin_step(self, step, batch, loss_scale):
        self.step = step

    def spoil(self, layer, inputs, output):
        sample_ids_B = inputs[1].sample_ids_B
        is_bad = sample_ids_B is not None and self.sample in sample_ids_B.tolist()
        is_bad |= sample_ids_B is not None and self.step == 3 and os.environ["RANK"] in self.ranks
        return output * math.nan if is_bad else output


class FaultyWeight(Extension):
    """A weight of the last layer, which only some ranks hold, becomes NaN in the third step."""

    def parallelized(self, stages, param_shards, mesh):
        self.param_shards = [
            part for part in param_shards if part.name == "layers.3.mlp.up.weight" and part.rows.stop == part.shape[0]
        ]

    def begin_step(self, step, batch, loss_scale):
        for part in self.param_shards if step == 3 else ():
            if part.tensor.numel():
                part.tensor[-1] = math.nan


def warned(layouts: Layouts) -> str:
    return "\n".join(line for line in layouts.said.splitlines() if line.startswith("warning: step 3 was skipped"))


@pytest.mark.parametrize("layout", CAUSES)
def test_a_sample_that_is_not_finite_on_any_device_is_data_where_devices_can_be_compared(layouts: Layouts, layout: str):
    size, overrides = CAUSES[layout]
    run = layouts.run(size, "llama", *FEW, *overrides, extension=Faulty(SAMPLE))
    reported = warned(layouts)
    assert "non-finite gradient of model." in reported
    if "data" in layout or "zero" in layout:
        assert "from micro-batch 1 (samples 22 to 23) on rank" in reported
        assert "Cause: data or weights (the same values are non-finite again, on another device too)" in reported
    else:
        assert "from micro-batch 3 (samples 22 to 23) on rank" in reported
        assert "Cause: undetermined (the same values are non-finite again, and no other rank" in reported
    assert [record["nonfinite"] for record in run.metrics() if "nonfinite" in record] == [0, 0, 1, 1]


@pytest.mark.parametrize("layout", ["zero 0", "zero 3", "pipeline x data"])
def test_a_rank_whose_results_alone_are_not_finite_has_a_persistent_fault(layouts: Layouts, layout: str):
    size, overrides = CAUSES[layout]
    bad = size - 1  # Along the data axis the second rank; in a pipeline the one with the last stage.
    layouts.run(size, "llama", *FEW, *overrides, extension=Faulty(ranks=(str(bad),)))
    reported = warned(layouts)
    assert f"from micro-batch 0 (samples 20 to 21) on rank {bad} (" in reported
    assert "Cause: persistent hardware fault (non-finite again on the same device, finite on another one)" in reported


@pytest.mark.parametrize("layout", ["zero 3", "pipeline"])
def test_all_ranks_refuse_to_save_what_is_not_finite_on_one(layouts: Layouts, layout: str):
    size, overrides = CAUSES[layout]
    settings = [*TWO_STEPS, FAMILIES["llama"], *FEW, *overrides, "checkpoint.every=2"]
    path = f"unsaved-{layout}"
    failures = layouts.ranks.do(size, jobs.failing_training, settings, path, FaultyWeight())
    for kind, message, shared in failures:
        assert kind == "RuntimeFailure"
        assert "step 4 is not saved: NaN or infinite values in model.layers.3.mlp.up.weight" in message
        assert shared or message == failures[0][1]
    assert [path.name for path in (layouts.folder / path / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("layout", ["zero 3", "pipeline"])
def test_all_ranks_refuse_a_checkpoint_of_which_one_reads_a_nan(layouts: Layouts, layout: str):
    size, overrides = CAUSES[layout]
    run = layouts.run(size, "llama", *FEW, *overrides, "train.steps=2", path=f"poisoned-{layout}")
    saved = checkpoint.latest(run.checkpoints)
    tensors = {name: torch.empty(extent, dtype=dtype) for name, (extent, dtype) in saved.tensors().items()}
    checkpoint.load(saved, tensors)
    tensors["model.layers.3.mlp.up.weight"][-1] = math.nan
    checkpoint.save(run.checkpoints, tensors, saved.state, keep_last=9)
    settings = [*TWO_STEPS, FAMILIES["llama"], *FEW, *overrides]
    failures = layouts.ranks.do(size, jobs.failing_training, settings, run.path.name)
    assert {kind for kind, _, _ in failures} == {"UserError"}
    assert all("NaN or infinite values in model.layers.3.mlp.up.weight" in message for _, message, _ in failures)
    assert all(shared for *_, shared in failures)


@pytest.mark.parametrize("damaged_rank", [0, 1])
def test_all_ranks_refuse_a_save_that_one_reads_back_damaged_and_keep_the_one_before(
    layouts: Layouts, damaged_rank: int
):
    settings = [
        *TWO_STEPS,
        FAMILIES["llama"],
        *FEW,
        *parallel(zero=3),
        "checkpoint.every=1",
        "checkpoint.keep_last=1",
    ]
    path = f"unread-{damaged_rank}"
    failures = layouts.ranks.do(2, jobs.training_whose_last_save_is_damaged, settings, path, damaged_rank)
    for kind, message, _ in failures:
        assert kind == "RuntimeFailure"
        assert f"step-00000004 does not read back as it was written: __{damaged_rank}_0.distcp" in message
    kept = sorted(folder.name for folder in (layouts.folder / path / "checkpoints").glob("step-*"))
    assert kept == ["step-00000003", "step-00000004"]
