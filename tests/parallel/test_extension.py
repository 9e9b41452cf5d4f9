"""An extension changes the model, the loss, the records and the checkpoints, on any layout alike."""

import math
import os
import signal

import pytest
import torch
from torch import Tensor, nn

from steelyard.checkpoint.dcp_metadata import SafeReader
from steelyard.model import LanguageModel
from steelyard.parallel.param_shards import ParamShard
from steelyard.training.extension import Extension
from tests.parallel import jobs
from tests.parallel.conftest import FAMILIES, TWO_STEPS, Layouts, difference
from tests.parallel.test_layouts import parallel
from tests.parallel.test_settings import SGD, SGD_ROUNDING

LAYOUTS = {
    "zero 0": (2, parallel(zero=0)),
    "zero 3": (2, parallel(zero=3)),
    "pipeline": (2, parallel(pipeline=2)),
    "pipeline x data": (4, parallel(pipeline=2, zero=0)),
    "pipeline x data zero 1": (4, parallel(pipeline=2, zero=1)),
}


class Gain(Extension):
    """Each layer's output is scaled by a parameter that checkpoints do not hold, and matrices are pulled to zero."""

    strength = 0.5

    def transform(self, model: LanguageModel) -> None:
        for layer in model.layers.values():
            layer.register_parameter("gain", nn.Parameter(torch.empty(1, device="meta")))
            layer.mlp.register_forward_hook(Scaling(layer))

    def loss(self, stage: LanguageModel) -> Tensor | None:
        pulled = [layer.mlp.down.weight.square().sum() for layer in stage.layers.values()]
        return self.strength * sum(pulled) if pulled else None

    def metrics(self) -> dict[str, float]:
        return {"strength": self.strength}

    def saves(self, part: ParamShard) -> bool:
        return not part.name.endswith("gain")


class Scaling:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
        return output * (1.5 + self.layer.gain)


class Untouched(Gain):
    """The same model without the loss."""

    def loss(self, stage: LanguageModel) -> Tensor | None:
        return None


def test_an_extension_changes_model_and_loss_and_adds_to_records(layouts: Layouts):
    plain = layouts.alone("llama", *SGD)
    transformed, pulled = (layouts.run(1, "llama", *SGD, extension=kind()).metrics() for kind in (Untouched, Gain))
    assert plain[0]["valid_loss"] != transformed[0]["valid_loss"] == pulled[0]["valid_loss"]
    assert transformed[1]["loss"] == pulled[1]["loss"]
    assert difference(pulled, transformed) > 1e-3
    assert all(record["strength"] == 0.5 for record in pulled if "loss" in record)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [Untouched, Gain])
def test_an_extension_means_the_same_on_a_layout(layouts: Layouts, layout: str, kind: type):
    size, overrides = LAYOUTS[layout]
    alone = layouts.run(1, "llama", *SGD, extension=kind()).metrics()
    curve = layouts.run(size, "llama", *SGD, *overrides, extension=kind()).metrics()
    assert difference(curve, alone) < SGD_ROUNDING


@pytest.mark.parametrize("layout", [(1, []), LAYOUTS["pipeline x data"]], ids=["alone", "pipeline x data"])
def test_what_an_extension_leaves_out_is_not_saved_and_begins_anew(layouts: Layouts, layout: tuple):
    size, overrides = layout
    run = layouts.run(size, "llama", *SGD, *overrides, "train.steps=2", extension=Gain())
    saved = SafeReader(str(run.checkpoints / "step-00000002")).read_metadata().state_dict_metadata
    assert "model.layers.0.mlp.down.weight" in saved
    assert not [name for name in saved if "gain" in name]
    layouts.run(size, "llama", *SGD, *overrides, "train.steps=4", path=run.path.name, extension=Gain())
    losses = [record["loss"] for record in run.metrics() if "loss" in record]
    assert len(losses) == 4
    assert all(math.isfinite(loss) and abs(loss - losses[0]) < 0.5 for loss in losses)


class RankOneSignalled(Extension):
    """Sends one of the ranks a signal during the first part of the second validation."""

    def __init__(self) -> None:
        self.parts = 0

    def weigh(self, engine, batch):
        if not next(iter(engine.parallel_model.stages.values())).training:
            self.parts += 1
            if self.parts == 1 + PARTS and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGTERM)
        return batch, None


PARTS = 4
VALIDATED_HALF_WAY = ["train.steps=4", "eval.every=2"]


@pytest.mark.parametrize("layout", ["zero 3", "pipeline"])
def test_ranks_agree_to_stop_in_a_validation_when_one_of_them_is_signalled(layouts: Layouts, layout: str):
    size, overrides = LAYOUTS[layout]
    # With two ranks of data a part is 2 x 2 samples, in a pipeline 8 samples.
    batches = {"zero 3": 2, "pipeline": 4}[layout]
    overrides = [*overrides, f"eval.batches={batches}", *VALIDATED_HALF_WAY]
    settings = [*TWO_STEPS, FAMILIES["gpt"], *overrides]
    path = f"signalled-{layout.replace(' ', '-')}"
    said = layouts.ranks.do(size, jobs.interrupted_training, settings, path, RankOneSignalled())
    assert [message.split(";")[0] for message in said] == ["saved step 2 of 4"] * size
    run = layouts.run(size, "gpt", *overrides, path=path)
    alone = layouts.alone("gpt", f"eval.batches={batches}", *VALIDATED_HALF_WAY)
    assert difference(run.metrics(), alone) < 10 * SGD_ROUNDING  # AdamW
