from steelyard.doctor.checks import python
from steelyard.doctor.python_info import PythonInfo, read_python_info
from tests.doctor.conftest import named

GOOD = PythonInfo({"python": [3, 12, 1], "prefix": "/venv"})


def test_a_python_that_is_too_old_is_named_with_the_container_that_helps(bench):
    old = bench.says("oldpython", '{"python": [3, 6, 8]}')
    machine = bench.machine()
    seen = read_python_info(type(machine)(machine.environment, python=str(old)))
    finding = named(python.check(machine, seen), "Python")
    assert finding.verdict == "fail"
    assert "3.6.8 is too old" in finding.words
    assert "containers/steelyard.def" in finding.hint


def test_a_python_newer_than_those_tested_is_a_warning(bench):
    finding = named(python.check(bench.machine(), PythonInfo({"python": [3, 15, 0], "prefix": "/venv"})), "Python")
    assert finding.verdict == "warn"
    assert "3.11 to 3.14" in finding.words


def test_a_python_that_does_not_run_is_told_in_its_own_words(bench):
    broken = bench.program("python", "echo 'libpython3.11.so.1.0: not there' >&2; exit 127")
    seen = read_python_info(type(bench.machine())({}, python=str(broken)))
    finding = named(python.check(bench.machine(), seen), "Python")
    assert finding.verdict == "fail"
    assert "libpython3.11.so.1.0: not there" in finding.words


def test_an_old_c_library_needs_a_container(bench):
    bench.says("getconf", "glibc 2.17\n")  # CentOS 7
    finding = named(python.check(bench.machine(), GOOD), "C library")
    assert finding.verdict == "fail"
    assert "2.28" in finding.words
    assert "containers/" in finding.hint
    bench.says("getconf", "glibc 2.36\n")
    assert named(python.check(bench.machine(), GOOD), "C library").verdict == "ok"


def test_a_conda_that_another_python_runs_under_is_to_be_cleared(bench):
    machine = bench.machine(CONDA_PREFIX="/opt/conda", CONDA_SHLVL="1")
    finding = named(python.check(machine, GOOD), "environment")
    assert finding.verdict == "warn"
    assert finding.unset == ("CONDA_PREFIX", "CONDA_SHLVL")
    own = PythonInfo({"python": [3, 12, 1], "prefix": "/opt/conda/envs/a"})
    assert named(python.check(machine, own), "environment").verdict == "ok"


def test_a_python_home_of_another_python_is_named(bench):
    finding = named(python.check(bench.machine(PYTHONHOME="/elsewhere"), GOOD), "environment")
    assert (finding.verdict, finding.unset) == ("fail", ("PYTHONHOME",))
