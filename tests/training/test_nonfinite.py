"""Values that are not finite: weights with them are neither loaded nor saved, and skipped steps are attributed."""

import math
import re
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steelyard import checkpoint, training
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.core.recipe import load_recipe
from steelyard.core.recipe.families.llama import LlamaConfig
from steelyard.core.run import Run
from steelyard.evaluate import perplexity
from steelyard.text import tokenizer as tokenizers
from steelyard.training import nonfinite
from steelyard.training.extension import Extension
from steelyard.training.nonfinite import NonfiniteFindings, classify
from steelyard.training.train_state import TrainState
from tests.checkpoint.models import SHAPES, Held

QUICK = ["eval.every=0", "checkpoint.every=0", "log.every=1", "optim.schedule=constant"]
HERE = f"rank 0 ({socket.gethostname()})"


class Faulty(Extension):
    """The second layer's output is NaN for one sample, as often as `times` says."""

    needs_samples = True

    def __init__(self, sample: int, times: float = math.inf) -> None:
        self.sample, self.times = sample, times

    def transform(self, model):
        if "1" in model.layers:
            model.layers["1"].register_forward_hook(self.spoil)

    def spoil(self, layer, inputs, output):
        sample_ids_B = inputs[1].sample_ids_B
        if sample_ids_B is None or self.sample not in sample_ids_B.tolist() or self.times <= 0:
            return output
        self.times -= 1
        return output * math.nan


class FaultyGradient(Extension):
    """The gradient of one matrix is infinite in the second micro-batch of the third step."""

    name = "layers.0.mlp.down.weight"

    def parallelized(self, stages, param_shards, mesh):
        next(part.parameter for part in param_shards if part.name == self.name).register_hook(self.spoil)

    def begin_step(self, step, batch, loss_scale):
        self.step, self.backwards = step, 0

    def spoil(self, gradient):
        self.backwards += 1
        return gradient * math.inf if (self.step, self.backwards) == (3, 2) else gradient


class FaultyWeight(Extension):
    """A weight becomes NaN, as a fault of the memory would have it."""

    def parallelized(self, stages, param_shards, mesh):
        self.part = next(part for part in param_shards if part.name == "layers.1.mlp.up.weight")

    def begin_step(self, step, batch, loss_scale):
        if step == 4:
            self.part.tensor[0, 0] = math.nan


def warnings(capsys) -> str:
    return "\n".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: step"))


def test_a_skipped_step_is_attributed_to_parameter_micro_batch_and_rank(in_workplace, capsys):
    run = training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=4"]), extension=Faulty(sample=10))
    reported = warnings(capsys)
    assert "step 3 was skipped: non-finite gradient of model.embed.weight, model.layers.0." in reported
    assert f"from micro-batch 1 (samples 10 to 11) on {HERE}. Cause: data or weights (computed again" in reported
    assert [record["nonfinite"] for record in run.metrics() if "nonfinite" in record] == [0, 0, 1, 1]


def test_a_fault_that_does_not_repeat_is_transient_and_changes_nothing_else(in_workplace, capsys):
    run = training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=5"]), extension=Faulty(sample=10, times=1))
    assert f"(samples 10 to 11) on {HERE}. Cause: transient hardware fault (computed again" in warnings(capsys)
    kept = [record["loss"] for record in run.metrics() if "loss" in record]
    again = training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=5", "name=again"]), extension=Faulty(sample=10))
    assert kept == [record["loss"] for record in again.metrics() if "loss" in record]


def test_a_fault_that_repeats_only_once_is_transient(in_workplace, capsys):
    training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=3"]), extension=Faulty(sample=10, times=2))
    assert "Cause: transient hardware fault (computed twice on the same device" in warnings(capsys)


def test_a_gradient_that_alone_is_not_finite_is_named_with_its_micro_batch(in_workplace, capsys):
    training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=4"]), extension=FaultyGradient())
    reported = warnings(capsys)
    assert f"non-finite gradient of model.layers.0.mlp.down.weight, from micro-batch 1 on {HERE}" in reported
    assert "data or weights" in reported


def test_weights_that_became_nan_are_not_saved_and_the_checkpoint_before_stays(in_workplace):
    recipe = load_recipe("tiny.toml", ["eval.every=0", "train.nonfinite_limit=20"])
    with pytest.raises(
        RuntimeFailure, match=r"step 6 is not saved: NaN or infinite values in model.layers.1.mlp.up.weight"
    ):
        training.run(recipe, extension=FaultyWeight())
    assert [path.name for path in Run.open("runs/tiny").checkpoints.iterdir()] == ["step-00000003"]


def test_the_error_of_a_limit_names_parameter_and_cause(in_workplace):
    settings = [*QUICK, "train.nonfinite_limit=1"]
    with pytest.raises(
        RuntimeFailure, match=r"by step 5, and the last 2 steps were skipped: non-finite gradient of"
    ) as fault:
        training.run(load_recipe("tiny.toml", settings), extension=FaultyWeight())
    assert "micro-batch 0 (samples 16 to 17)" in str(fault.value)
    assert "Cause: data or weights" in str(fault.value)


def skipping(tally: TrainState, steps: int, is_skipped) -> int | None:
    """Count steps of which some are skipped; the one that exceeds a limit."""
    for step in range(1, steps + 1):
        norm = torch.tensor(math.nan if is_skipped(step) else 1.0)
        tally.add(torch.tensor(1.0), norm, ~torch.isfinite(norm), 4, 64)
        tally.settle()
        if tally.exceeded() is not None:
            return step
    return None


def test_a_run_that_skips_83_of_396_steps_is_stopped(in_workplace):
    tally = TrainState(load_recipe("tiny.toml", []), torch.device("cpu"))
    stopped = skipping(tally, 396, lambda step: step * 83 // 396 > (step - 1) * 83 // 396)
    assert stopped == 53
    assert tally.exceeded() == (
        "11 of the last 53 steps were skipped by step 53: train.max_skipped_fraction = 0.1 allows 10 of 100"
    )
    assert (
        skipping(TrainState(load_recipe("tiny.toml", []), torch.device("cpu")), 396, lambda step: step % 10 == 0)
        is None
    )
    unlimited = TrainState(load_recipe("tiny.toml", ["train.max_skipped_fraction=1"]), torch.device("cpu"))
    assert skipping(unlimited, 396, lambda step: step % 4 == 0) is None


def test_fp16_steps_count_toward_the_fraction_only_at_the_smallest_scale(in_workplace):
    recipe = load_recipe("tiny.toml", ["train.precision=fp16", "train.nonfinite_limit=50"])
    tally = TrainState(recipe, torch.device("cpu"))
    assert skipping(tally, 40, lambda step: step <= 16) is None
    assert (tally.loss_scale.scale, tally.counters.skipped, tally.counters.recent_skips) == (1.0, 16, [])
    assert skipping(tally, 40, lambda step: step % 2 == 0) == 22


def test_the_fraction_is_remembered_over_a_restart(in_workplace):
    tally = TrainState(load_recipe("tiny.toml", []), torch.device("cpu"))
    assert skipping(tally, 40, lambda step: step % 4 == 0) is None
    resumed = TrainState(load_recipe("tiny.toml", []), torch.device("cpu"))
    resumed.restore(tally.state())
    assert skipping(resumed, 40, lambda step: step % 4 == 0) == 4


def found(data: int = 0, *micro_batches: int, gradients: bool = True) -> NonfiniteFindings:
    return NonfiniteFindings(data, micro_batches, ((0, "model.norm.weight"),) if gradients else ())


CLEAN = found(gradients=False)


@pytest.mark.parametrize(
    ("first", "second", "swapped", "same_weights", "kind"),
    [
        ([found(0, 1)], [found(0, 1)], None, True, nonfinite.DATA_OR_WEIGHTS),
        ([CLEAN], [CLEAN], None, True, nonfinite.TRANSIENT),
        ([CLEAN], [CLEAN], None, False, nonfinite.UNDETERMINED),
        ([found(0, 1)], [CLEAN], None, True, nonfinite.TRANSIENT),
        # Data-parallel ranks: the second rank's rows, computed by the first one when swapped.
        ([found(0), found(1, 0)], [found(0), found(1, 0)], [found(0), found(1, 0)], True, nonfinite.PERSISTENT),
        ([found(0), found(1, 0)], [found(0), found(1, 0)], [found(0, 0), found(1)], True, nonfinite.DATA_OR_WEIGHTS),
        ([found(0), found(1)], [found(0), found(1)], [found(0), found(1)], True, nonfinite.UNDETERMINED),
        ([found(0, 0), found(1, 0)], [found(0, 0), found(1, 0)], [found(0), found(1, 0)], True,
         nonfinite.UNDETERMINED),
        # Ranks that share one model: no other device computes the same.
        ([found(0, 1), found(0, 1)], [found(0, 1), found(0, 1)], None, True, nonfinite.UNDETERMINED),
    ],
)  # fmt: skip
def test_a_cause_is_told_only_where_recomputing_shows_it(first, second, swapped, same_weights, kind):
    assert classify(first, second, swapped, same_weights).kind == kind


def poisoned_checkpoint(folder: Path, name: str = "model.layers.1.mlp.up.weight") -> Path:
    """Put a NaN into the newest checkpoint of a run, whose checksums are right all the same."""
    saved = checkpoint.latest(folder)
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in saved.tensors().items()}
    checkpoint.load(saved, tensors)
    tensors[name].view(-1)[5] = math.nan
    return checkpoint.save(folder, tensors, saved.state, keep_last=9)


def test_a_checkpoint_with_a_nan_is_refused_by_the_parameters_name(in_workplace):
    run = training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=2"]))
    path = poisoned_checkpoint(run.checkpoints)
    named = "NaN or infinite values in model.layers.1.mlp.up.weight"
    with pytest.raises(UserError, match=named) as error:
        training.run(load_recipe("tiny.toml", [*QUICK, "train.steps=3"]))
    assert path.name in str(error.value)
    with pytest.raises(UserError, match=named):
        training.run(load_recipe("tiny.toml", [*QUICK, "name=other", f"train.init_from={run.path}"]))
    with pytest.raises(UserError, match=named):
        convert(open_source(run.path), Path("converted"), Target("hf"))
    assert not Path("converted").exists()


def test_a_hugging_face_model_with_an_infinite_weight_is_refused_by_every_command(in_workplace):
    tokenizers.train_byte_bpe(["once upon a time"], 260).save(Path("tokenizer"))
    shape = LlamaConfig(family="llama", layers=2, hidden=32, heads=4, vocab=260)
    convert(Held(shape), Path("model"), Target("hf", tokenizer="tokenizer"))
    tensors = load_file("model/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = math.inf
    save_file(tensors, "model/model.safetensors", metadata={"format": "pt"})
    named = "NaN or infinite values in model.layers.1.mlp.up_proj.weight (here layers.1.mlp.up.weight)"
    done = in_workplace.steelyard("generate", "model", "--prompt", "once")
    assert (done.returncode, named in done.stderr) == (2, True), done.stderr
    with pytest.raises(UserError, match=re.escape(named)):
        convert(open_source("model"), Path("copy"), Target("steelyard"))
    assert not Path("copy").exists()
    with pytest.raises(UserError, match=re.escape(named)):
        perplexity.perplexity(perplexity.PerplexityRequest("model", "tokens_text_document"))
    settings = ["model={family='llama', layers=2, hidden=32, heads=4, vocab=260}", "train.init_from=model"]
    with pytest.raises(UserError, match=re.escape(named)):
        training.run(load_recipe("tiny.toml", settings))


def test_a_weight_too_large_for_fp16_is_not_converted_to_infinity(tmp_path):
    source = Held(SHAPES["llama"])
    source.parameters["norm.weight"][3] = 1e6
    with pytest.raises(UserError, match=r"NaN or infinite values in norm.weight\n  hint: as float16"):
        convert(source, tmp_path / "half", Target("hf", dtype=torch.float16))
    assert not (tmp_path / "half").exists()
