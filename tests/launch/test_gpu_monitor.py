"""Samples of a host's devices, and what they tell of its logs."""

import json
import signal
import subprocess
import time
from pathlib import Path

from steelyard.launch.gpu_monitor import Sampler


def test_each_sample_tells_how_long_the_error_log_was_by_then(tmp_path: Path):
    log, samples = tmp_path / "logs" / "h.err", tmp_path / "logs" / "h.gpu"
    log.parent.mkdir()
    with Sampler(tmp_path, list, "h", every=0.02):
        _until(lambda: samples.exists() and samples.read_text().count("\n") > 1)
        log.write_text("ValueError: x\n")
        written, seen = time.time(), samples.read_text().count("\n")
        _until(lambda: samples.read_text().count("\n") > seen + 2)
    reported = [json.loads(line) for line in samples.read_text().splitlines()]
    assert reported[0]["logged"] == 0
    assert reported[-1]["logged"] == len("ValueError: x\n")
    first = next(sample for sample in reported if sample["logged"])
    assert first["time"] >= written


def test_a_process_that_was_stopped_is_marked_while_it_is(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    samples = tmp_path / "logs" / "h.gpu"
    sleeper = subprocess.Popen(["sleep", "60"])

    def stands() -> list[bool]:
        lines = samples.read_text().splitlines() if samples.exists() else []
        devices = [json.loads(line)["devices"][0] for line in lines if line.endswith("}")]
        return [device["processes"][0].get("stopped", False) for device in devices if device["processes"]]

    try:
        with Sampler(tmp_path, lambda: [sleeper.pid], "h", every=0.02):
            _until(lambda: stands()[-1:] == [False])
            sleeper.send_signal(signal.SIGSTOP)
            _until(lambda: stands()[-1] is True)
            sleeper.send_signal(signal.SIGCONT)
            _until(lambda: stands()[-1] is False)
    finally:
        sleeper.kill()
        sleeper.wait(10)


def _until(holds, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)
