import os
import sys
from pathlib import Path

import pytest

from steelyard.doctor.checks import all_reduce
from steelyard.doctor.machine import Machine
from steelyard.doctor.python_info import PythonInfo
from steelyard.planning.communication import REACHED

A100 = ["NVIDIA A100-SXM4-80GB"] * 8
MEASURED = {
    "ranks": 8,
    "hosts": 1,
    "device": "cuda",
    "bytes": 1 << 28,
    "seconds": 2.4e-3,
    "bandwidth": 196e9,
    "right": True,
}


def test_an_exchange_is_judged_by_the_links_of_the_gpu():
    good = all_reduce.judge(MEASURED, A100)
    assert good.verdict == "ok"
    assert f"of about {300 * REACHED['nvlink']:.0f} GB/s" in good.words
    slow = all_reduce.judge(MEASURED | {"bandwidth": 9e9}, A100)
    assert slow.verdict == "warn"
    assert "a100-80" in slow.words
    assert all_reduce.judge(MEASURED | {"right": False}, A100).verdict == "fail"
    assert all_reduce.judge(MEASURED | {"bandwidth": 9e9}, ["NVIDIA Unheard-of"]).verdict == "ok"
    assert "on 2 machines" in all_reduce.judge(MEASURED | {"hosts": 2, "bandwidth": 9e9}, A100).words


def test_ranks_that_do_not_meet_are_told_and_explained(bench):
    machine = bench.machine()
    broken = bench.program("python", "echo 'error: Gloo connectFullMesh failed with timeout' >&2; exit 1")
    [finding] = all_reduce.check(Machine(machine.environment, python=str(broken)), PythonInfo({"torch": "2.13.0"}))
    assert finding.verdict == "fail"
    assert "connectFullMesh" in finding.words
    assert "GLOO_SOCKET_IFNAME" in finding.hint


def test_variables_of_a_launcher_that_are_set_by_half_are_named(bench):
    [finding] = all_reduce.check(bench.machine(RANK="0"), PythonInfo({"torch": "2.13.0"}))
    assert finding.verdict == "fail"
    assert "RANK is set" in finding.words
    assert "unset RANK" in finding.hint


def test_without_torch_no_rank_is_started(bench):
    [finding] = all_reduce.check(bench.machine(), PythonInfo())
    assert finding.verdict == "absent"


@pytest.mark.slow
def test_two_ranks_really_sum(tmp_path):
    machine = Machine(dict(os.environ) | {"OMP_NUM_THREADS": "1"}, python=sys.executable, folder=tmp_path)
    [finding] = all_reduce.check(machine, PythonInfo({"torch": "2.13.0", "gpus": []}))
    assert finding.verdict == "ok", finding.words
    assert finding.facts["right"]
    assert finding.facts["ranks"] == 2
    assert Path(tmp_path).exists()
