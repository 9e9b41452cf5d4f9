"""Samples of a host's devices, and what they tell of its logs."""

import json
import time
from pathlib import Path

from steelyard.launch.sampling import Sampler


def test_each_sample_tells_how_long_the_error_log_was_by_then(tmp_path: Path):
    log, samples = tmp_path / "logs" / "h.err", tmp_path / "logs" / "h.gpu"
    log.parent.mkdir()
    with Sampler(tmp_path, list, "h", every=0.02):
        _until(lambda: samples.exists() and samples.read_text().count("\n") > 1)
        log.write_text("ValueError: x\n")
        written, seen = time.time(), samples.read_text().count("\n")
        _until(lambda: samples.read_text().count("\n") > seen + 2)
    told = [json.loads(line) for line in samples.read_text().splitlines()]
    assert told[0]["logged"] == 0
    assert told[-1]["logged"] == len("ValueError: x\n")
    first = next(sample for sample in told if sample["logged"])
    assert abs(first["time"] - written) < 5


def _until(holds, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
