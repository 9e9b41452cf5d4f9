import time
from pathlib import Path

import pytest

from steelyard.doctor.checks import external_programs
from steelyard.doctor.python_info import PythonInfo
from tests.doctor.conftest import named

CUDA_12 = PythonInfo({"torch": "2.13.0+cu126", "torch_cuda": "12.6", "prefix": "/venv"})


def found(bench, name, **environment):
    return named(external_programs.check(bench.machine(**environment), CUDA_12), name)


def test_nothing_on_path_is_no_failure(bench):
    assert {finding.verdict for finding in external_programs.check(bench.machine(), CUDA_12)} == {"absent"}


def test_an_nvcc_of_another_cuda_is_named(bench):
    bench.says("nvcc", "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 11.8, V11.8.89\n")
    finding = found(bench, "nvcc")
    assert finding.verdict == "warn"
    assert "11.8" in finding.words
    bench.says("nvcc", "Cuda compilation tools, release 12.4, V12.4.131\n")
    assert found(bench, "nvcc").verdict == "ok"


def test_a_cuda_home_without_nvcc_is_named_before_something_fails_on_it(bench):
    finding = found(bench, "nvcc", CUDA_HOME="/data/apps/cuda/12.4")
    assert finding.verdict == "warn"
    assert "/data/apps/cuda/12.4" in finding.words
    assert "FileNotFoundError" in finding.words
    assert finding.unset == ("CUDA_HOME",)


def test_a_torchrun_of_another_python_is_named(bench):
    path = bench.says("torchrun", "")
    finding = found(bench, "torchrun")
    assert finding.verdict == "warn"
    assert str(path) in finding.words


def test_an_mpirun_without_its_libraries_is_told(bench):
    bench.program("mpirun", "echo 'mpirun: error while loading libopen-rte.so.40' >&2; exit 127")
    finding = found(bench, "mpirun")
    assert finding.verdict == "warn"
    assert "libopen-rte.so.40" in finding.words
    bench.says("mpirun", "mpirun (Open MPI) 5.0.5\n")
    assert found(bench, "mpirun").words == "mpirun (Open MPI) 5.0.5"


@pytest.mark.parametrize(
    ("version", "sinfo", "code", "verdict", "words"),
    [
        ("slurm 19.05.3", "gpu*|4|idle", 0, "warn", "20.11 is the oldest"),
        ("slurm 20.11.4", "gpu2*|8|idle\ngpu1|1|idle", 0, "ok", "partitions gpu2, gpu1"),
        (
            "slurm-wlm 22.05.8",
            "slurm_load_partitions: Unable to contact slurm controller",
            1,
            "warn",
            "the controller does not answer",
        ),
        ("command not working", "", 1, "warn", "does not print its version"),
    ],
)
def test_slurm_is_judged_by_its_version_and_its_controller(bench, version, sinfo, code, verdict, words):
    bench.says("sbatch", version)
    bench.says("sinfo", sinfo, code)
    finding = found(bench, "Slurm")
    assert finding.verdict == verdict
    assert words in finding.words


def test_a_docker_without_its_daemon_is_not_a_container_runtime(bench):
    bench.program("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    assert found(bench, "containers").verdict == "warn"
    bench.says("apptainer", "apptainer version 1.3.0\n")
    finding = found(bench, "containers")
    assert finding.verdict == "ok"
    assert "Cannot connect to the Docker daemon" in finding.words


def test_a_podman_without_an_init_is_told_before_a_job_is(bench):
    bench.says("podman", "host:\n")
    assert "catatonit" in found(bench, "containers").hint
    init = bench.machine().at("/usr/libexec/podman/catatonit")
    init.parent.mkdir(parents=True)
    init.touch()
    assert found(bench, "containers").verdict == "ok"


def test_the_gist_of_an_answer_is_its_last_line_without_colours(bench):
    bench.says("loud", "\x1b[31mFATAL: no image\n\x1b[0m\n", 1)
    answer = bench.machine().run(["loud"])
    assert answer is not None
    assert answer.gist == "FATAL: no image"
    assert bench.machine().run(["not-there"]) is None


def test_a_program_that_hangs_is_ended_with_what_it_started(bench):
    pid = bench.path / "pid"
    bench.program("sleeper", f"sleep 300 & echo $! > {pid}; sleep 300")
    answer = bench.machine(PATH=f"{bench.path}/bin:/bin:/usr/bin").run(["sleeper"], seconds=0.3)
    assert answer is not None
    assert answer.gist == "it timed out"
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    until = time.monotonic() + 5
    while time.monotonic() < until and _lives(state):
        time.sleep(0.02)
    assert not _lives(state)


def _lives(state: Path) -> bool:
    try:
        return state.read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
