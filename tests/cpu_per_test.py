"""CPU seconds of each test, all its processes included: those that it starts, forks of loaded ones and ranks of a pool.

    pytest -p tests.cpu_per_test ...       # as root, on Linux; then sort -rn cpu-per-test.*.log

Each pytest process puts itself, and so everything it starts, into a control group of its own and reads the group's time
before and after a test. A line is: CPU seconds, seconds, test.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")
GROUP = (V1 if V1.is_dir() else V2) / f"steelyard-tests-{os.getpid()}"
LOG = Path(f"cpu-per-test.{os.getpid()}.log").resolve()


def used() -> float:
    if V1.is_dir():
        return int((GROUP / "cpuacct.usage").read_text()) / 1e9
    return int((GROUP / "cpu.stat").read_text().split()[1]) / 1e6


def pytest_configure(config: pytest.Config) -> None:
    GROUP.mkdir()
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before, begun = used(), time.monotonic()
    result = yield
    with LOG.open("a") as log:
        log.write(f"{used() - before:.3f} {time.monotonic() - begun:.3f} {item.nodeid}\n")
    return result
