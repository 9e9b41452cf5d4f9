import json
from itertools import pairwise

import pytest

from tests.parallel.conftest import Layouts
from tests.parallel.test_layouts import parallel

KEYS = {"step", "name", "stage", "micro_batch", "start_ns", "end_ns"}


def spans(run, rank: int) -> list[dict]:
    return [json.loads(line) for line in (run.path / "timeline" / f"rank-{rank:05d}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_every_rank_of_a_pipeline_tells_what_it_does_when(layouts: Layouts, schedule: str):
    run = layouts.run(2, "gpt", *parallel(pipeline=2, schedule=schedule), "log.timeline=[3, 4]", "train.steps=5")
    for rank in range(2):
        found = spans(run, rank)
        assert all(span.keys() == KEYS for span in found)
        assert {span["step"] for span in found} == {3, 4}
        names = {span["name"] for span in found}
        assert names == {"data", "forward", "backward", "send", "receive", "gradients", "optimizer"}
        assert all(span["end_ns"] >= span["start_ns"] for span in found)
        assert all(
            before["end_ns"] == after["start_ns"]
            for before, after in pairwise(found)
            if before["step"] == after["step"]
        )
        for step in (3, 4):
            forward = [span["micro_batch"] for span in found if span["name"] == "forward" and span["step"] == step]
            assert sorted(forward) == list(range(8))
        assert {span["stage"] for span in found if span["name"] in ("forward", "backward")} == {rank}
    # Both ranks' clocks are rank 0's: what the second computes first comes after the first's, and both end together.
    first, second = (
        min(span["start_ns"] for span in spans(run, rank) if span["name"] == "forward" and span["step"] == 3)
        for rank in range(2)
    )
    assert first < second


def test_a_single_process_has_a_timeline_too_and_without_the_key_there_is_none(layouts: Layouts):
    run = layouts.run(1, "llama", "log.timeline=[2, 2]", "train.steps=3")
    found = spans(run, 0)
    assert {span["name"] for span in found} == {"data", "forward", "backward", "gradients", "optimizer"}
    assert [span["micro_batch"] for span in found if span["name"] == "backward"] == list(range(8))
    assert not (layouts.run(1, "llama", "train.steps=3").path / "timeline").exists()


def test_steps_that_are_done_again_are_told_once(layouts: Layouts):
    run = layouts.run(1, "llama", "log.timeline=[2, 5]", "train.steps=4", "checkpoint.every=3", "optim.decay_steps=9")
    newest = run.checkpoints / "step-00000004"
    (newest / "state.json").unlink()  # as if it had been killed behind step 3
    layouts.run(1, "llama", "log.timeline=[2, 5]", "train.steps=5", "optim.decay_steps=9", path=run.path.name)
    steps = [span["step"] for span in spans(run, 0) if span["name"] == "optimizer"]
    assert steps == [2, 3, 4, 5]
