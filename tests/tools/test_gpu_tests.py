"""`make test-gpu` where there is no GPU: it says why it cannot run, and its slices continue behind what is done."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import preloaded

ROOT = Path(__file__).parents[2]
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then sleep 600 & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"; exit 0; fi
read words; echo "$words" >> "$SAID"
if [ "$words" = quit ]; then kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"); fi
"""


def gpu_tests(*words, **environment):
    command = [sys.executable, ROOT / "tools" / "gpu_tests.py", *words]
    return preloaded.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.fixture
def shared_gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import shared_gpu

    return shared_gpu


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def test_without_a_driver_it_says_so_and_runs_nothing(tmp_path):
    reported = gpu_tests("--out", tmp_path / "gpu.json", PATH=str(tmp_path))
    assert reported.returncode == 2
    assert reported.stderr.startswith("cannot run: nvidia-smi is not on the PATH")
    assert "hint: " in reported.stderr
    assert not (tmp_path / "gpu.json").exists()


def test_a_driver_that_does_not_answer_is_quoted(tmp_path, shared_gpu, monkeypatch):
    program(tmp_path, "nvidia-smi", "#!/bin/sh\necho no devices were found; exit 6\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(shared_gpu.CannotRun, match="nvidia-smi fails: no devices were found"):
        shared_gpu.gpus()


@pytest.mark.parametrize(("number", "reported"), [(22809, "is 2.28.9"), (23102, None)])
def test_an_nccl_that_is_too_old_is_named_with_a_way_out(tmp_path, shared_gpu, monkeypatch, number, reported):
    source = tmp_path / "nccl.c"
    source.write_text(f"int ncclGetVersion(int *number) {{ *number = {number}; return 0; }}\n")
    library = tmp_path / "libnccl.so.2"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    monkeypatch.setenv(shared_gpu.OVERRIDE, str(library))
    if reported is None:
        assert shared_gpu.nccl() == (library, (2, 31, 2))
        return
    with pytest.raises(shared_gpu.CannotRun, match=reported) as reason:
        shared_gpu.nccl()
    assert "pip download" in reason.value.hint


def test_mps_is_started_with_a_share_for_each_rank_and_stopped(tmp_path, shared_gpu, monkeypatch):
    program(tmp_path / "bin", shared_gpu.CONTROL, CONTROL)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    mps = shared_gpu.Mps(ranks=4)
    mps.start()
    daemon = int(Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"], f"{shared_gpu.CONTROL}.pid").read_text())
    found = shared_gpu.environment(tmp_path / "libnccl.so.2", mps)
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert found["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert found["LD_PRELOAD"].split()[0] == str(tmp_path / "libnccl.so.2")
    mps.stop()
    assert (tmp_path / "said").read_text().splitlines() == ["set_default_active_thread_percentage 25", "quit"]
    assert mps.environment == {}
    deadline = time.monotonic() + 60
    while b"sleep" in command_of(daemon):  # A signal is delivered some time after it is sent.
        assert time.monotonic() < deadline, "the daemon of MPS goes on"
        time.sleep(0.01)


def command_of(pid):
    """The command line of a process; empty for one that has ended, though nobody may have collected it yet."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def test_a_machine_without_mps_is_time_sliced_and_says_so(shared_gpu, monkeypatch):
    monkeypatch.setattr(shared_gpu.shutil, "which", lambda *_, **__: None)
    mps = shared_gpu.Mps(ranks=2)
    mps.start()
    assert "time-sliced" in mps.why_not
    assert mps.environment == {}


def test_every_kind_of_case_is_there():
    from tests.parallel.gpu_cases import cases

    known = cases()
    assert len({case.name for case in known}) == len(known)
    assert {case.ranks for case in known} == {2, 4}
    assert sum(case.compiled for case in known) == 8
    assert sum(case.name.startswith("muon") for case in known) >= 6
    assert {case.precision for case in known} == {"fp32", "bf16", "fp8"}
    assert sum(case.kind == "masks" for case in known) >= 2
    assert sum(case.kind == "lora" for case in known) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slice_continues_behind_what_is_done(tmp_path):
    out = tmp_path / "gpu.json"
    words = ("--device", "cpu", "--out", out, "--only", "zero 1 on 2*", "tensor, llama, fp8")
    assert gpu_tests(*words, "--minutes", "0").returncode == 2  # Nothing fits, and a CPU has no fp8.
    for _ in range(2):
        reported = gpu_tests(*words)
        assert "1 passed, 0 failed, 1 left" in reported.stdout, reported.stderr
        found = {case["name"]: case for case in json.loads(out.read_text())["cases"]}
    case = found["zero 1 on 2, llama"]
    assert case["state"] == "passed"
    assert 0 < case["difference"] < case["tolerance"] == 1e-5
    assert (case["ranks"], case["precision"], case["compiled"], case["layout"]) == (2, "fp32", False, "parallel.zero=1")
    assert found["tensor, llama, fp8"]["state"] == "left out: a CPU has no fp8"
    assert "passed   zero 1" not in reported.stdout  # The second call has run nothing.
