import json
import time

import numpy as np
import pytest

from tests.conftest import kill


@pytest.mark.slow
def test_the_quickstart_survives_being_killed_at_random_moments(workplace):
    words = ["quickstart", "train.steps=40", "checkpoint.every=5", "eval.batches=1"]
    random = np.random.RandomState(0)
    for _ in range(6):
        process = workplace.start(*words)
        time.sleep(random.uniform(0.5, 9))
        kill(process)
    done = workplace.steelyard(*words, "--json", timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["valid_loss_after"] < result["valid_loss_before"] - 0.5
    assert result["sample"].startswith("def read(self, ")
    assert "<html" in (workplace.path / result["report"]).read_text()[:100]


@pytest.mark.slow
@pytest.mark.timeout(900)  # Two minutes on two cores of its own, much more beside others.
def test_the_quickstart_learns_by_two_nats(workplace):
    done = workplace.steelyard("quickstart", "--json", timeout=890, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["valid_loss_before"] - result["valid_loss_after"] >= 2
