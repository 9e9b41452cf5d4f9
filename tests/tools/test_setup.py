import http.server
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "setup.py"


@pytest.fixture
def setup():
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cuda", "variant"),
    [(None, "cpu"), ((11, 8), "cpu"), ((12, 6), "cu126"), ((12, 7), "cu126"), ((12, 9), "cu128"), ((13, 1), "cu130")],
)
def test_auto_takes_the_newest_build_the_driver_serves(setup, cuda, variant):
    assert setup.fitting_variant(cuda) == variant


def test_the_driver_is_asked_for_its_cuda(setup, tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho '| NVIDIA-SMI 570.1  Driver Version: 570.1   CUDA Version: 12.8  |'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert setup.driver_cuda() == (12, 8)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(setup, "WSL_DRIVER", str(fake))
    assert setup.driver_cuda() == (12, 8)
    fake.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert setup.driver_cuda() is None


def test_pytorchs_index_is_used_where_it_answers_and_the_configured_one_otherwise(setup, tmp_path, monkeypatch):
    (tmp_path / "cu128" / "torch").mkdir(parents=True)
    handler = lambda *a: http.server.SimpleHTTPRequestHandler(*a, directory=tmp_path)  # noqa: E731
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    index = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("STEELYARD_TORCH_INDEX", index)
    calls = []
    monkeypatch.setattr(setup, "pip", lambda *words: calls.append(words))
    try:
        setup.install_torch("cu128")
        setup.install_torch("cu126")
    finally:
        server.shutdown()
        server.server_close()
    assert calls == [
        ("install", "--index-url", f"{index}/cu128", "torch==2.13.0"),
        ("install", "torch==2.13.0"),
    ]


def test_a_python_without_venv_gets_one_clear_message(setup, tmp_path, monkeypatch, capsys):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(setup, "VENV", tmp_path / "venv")
    with pytest.raises(SystemExit):
        setup.make_venv(str(python))
    assert "apt-get install python3-venv" in capsys.readouterr().err


def test_an_unsupported_python_gets_one_clear_message(setup, monkeypatch, capsys):
    monkeypatch.setattr(setup, "version_of", lambda python: (3, 9))
    with pytest.raises(SystemExit):
        setup.find_python()
    assert "3.11 to 3.14" in capsys.readouterr().err


def test_the_script_runs_on_the_standard_library_alone():
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("system", "machine", "macos", "message"),
    [
        ("Darwin", "x86_64", "14.5", "a Mac with Apple silicon"),
        ("Darwin", "arm64", "13.7.1", "needs macOS 14 or newer; this is 13.7.1"),
        ("Windows", "AMD64", "", "install WSL2"),
    ],
)
def test_a_platform_without_wheels_of_torch_gets_one_clear_message(setup, capsys, system, machine, macos, message):
    with pytest.raises(SystemExit):
        setup.refuse_platform(system, machine, macos)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("platform", [("Linux", "x86_64", ""), ("Linux", "aarch64", ""), ("Darwin", "arm64", "15.1")])
def test_platforms_with_wheels_of_torch_are_not_refused(setup, capsys, platform):
    setup.refuse_platform(*platform)  # It would print an error and exit.
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("system", "is_there"), [("Linux", True), ("Darwin", False)])
def test_what_only_linux_has_wheels_of_is_installed_there_alone(setup, monkeypatch, system, is_there):
    calls = recorded(setup, monkeypatch)
    monkeypatch.setattr(setup.platform, "system", lambda: system)
    setup.install_for_work("cpu")
    by_uv = next(call for call in calls if " uv pip " in call)
    assert ("triton" in by_uv, "requirements-peers.txt" in by_uv) == (is_there, is_there)
    assert "requirements-dev.txt" in by_uv


@pytest.mark.parametrize("missing", ["pip --disable-pip-version-check -q install uv", " uv pip "])
def test_pip_installs_what_uv_cannot(setup, monkeypatch, missing):
    calls = recorded(setup, monkeypatch, fails=missing)
    setup.install_pinned([Path("requirements.txt")], ["six"])
    assert calls[-1].endswith("install --no-deps --requirement=requirements.txt six")
    assert " uv pip " not in calls[-1]


def test_uv_takes_the_index_that_pip_is_configured_with(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "VENV", Path(sys.prefix))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text("[global]\nextra-index-url = http://127.0.0.1:9/more\n")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    assert "http://127.0.0.1:9/more" not in setup.pip_index()
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/file\n")
    assert setup.pip_index() == ["--default-index", "http://127.0.0.1:9/file"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert setup.pip_index() == ["--default-index", "http://127.0.0.1:9/simple"]


def recorded(setup, monkeypatch, fails=None):
    """The commands that the environment's Python would run; one of them fails."""
    calls = []

    def run(*words):
        calls.append(" ".join(words))
        return fails is None or fails not in calls[-1]

    monkeypatch.setattr(setup, "python", run)
    return calls
