"""`--fix` and `--undo`, on a machine whose torch asks for names that nobody has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from steelyard.core.errors import RuntimeFailure, UserError
from steelyard.doctor import diagnose, repair, site_profile, undo_log
from steelyard.doctor.checks import libraries
from steelyard.doctor.finding import Finding
from steelyard.doctor.paths import environment_file, library_folder, record_file
from steelyard.doctor.python_info import PythonInfo
from tests.doctor.conftest import named


@pytest.fixture
def broken(bench):
    """cuDNN by its full name in conda's folder, and conda switched on under another Python."""
    bench.torch("libcudnn.so.8", version="2.12.0", cuda="12.1")
    bench.versioned(bench.path / "conda/lib/libcudnn.so.8.9.7", "libcudnn.so.8", 8907)
    bench.library(bench.path / "conda/lib/libcudnn_ops_infer.so.8.9.7", "libcudnn_ops_infer.so.8")
    bench.environment = {
        "CONDA_PREFIX": str(bench.path / "conda"),
        "CONDA_SHLVL": "1",
        "LD_LIBRARY_PATH": "/some/where",
    }
    return bench


def tree(path: Path) -> dict[str, str]:
    """All that lies below a folder, with contents, modes and targets."""
    return {
        str(one.relative_to(path)): f"-> {one.readlink()}" if one.is_symlink()
        else "folder" if one.is_dir() else f"{one.stat().st_mode:o} {one.read_bytes()!r}"
        for one in path.rglob("*")
    }  # fmt: skip


def sourced(machine, question: str) -> str:
    """What a shell says that has sourced the file."""
    environment = dict(machine.environment) | {"PATH": os.environ["PATH"]}
    script = f". {environment_file(machine)}\n{question}"
    return subprocess.run(
        ["sh", "-uc", script], env=environment, capture_output=True, text=True, check=True, timeout=150
    ).stdout


def test_a_missing_soname_is_linked_and_then_loads_and_undo_leaves_no_trace(broken):
    machine = broken.machine()
    before = tree(broken.path / "home")
    asked = []
    found = diagnose.examine(machine, None, quick=True, fix=True, agree=lambda question: asked.append(question) or True)
    assert len(asked) == 1
    assert named(found.findings, "cuDNN").verdict == "fail"
    assert named(found.after, "cuDNN").verdict == "ok"
    assert "8.9" in named(found.after, "cuDNN").words
    links = {path.name: str(path.readlink()) for path in library_folder(machine).iterdir()}
    assert links == {
        "libcudnn.so.8": str(broken.path / "conda/lib/libcudnn.so.8.9.7"),
        "libcudnn_ops_infer.so.8": str(broken.path / "conda/lib/libcudnn_ops_infer.so.8.9.7"),
    }
    assert sourced(machine, 'echo "$LD_LIBRARY_PATH ${CONDA_PREFIX-gone} ${CONDA_SHLVL-gone}"').strip() == (
        f"{library_folder(machine)}:/some/where gone gone"
    )
    loaded = sourced(
        machine, f"{sys.executable} -S -c \"import ctypes; print(ctypes.CDLL('libcudnn.so.8').cudnnGetVersion())\""
    )
    assert loaded == "8907\n"  # By the loader itself, under the name that torch asks for.
    taken, left = undo_log.undo(machine)
    assert not left
    assert str(environment_file(machine)) in taken
    assert tree(broken.path / "home") == before


def test_nothing_is_changed_without_leave(broken):
    machine = broken.machine()
    before = tree(broken.path)
    found = diagnose.examine(machine, None, quick=True, fix=True, agree=lambda question: False)
    assert found.planned
    assert not found.is_applied
    assert tree(broken.path) == before


def test_a_shell_that_has_not_sourced_the_file_is_told_to(broken):
    machine = broken.machine()
    finding = named(libraries.check(machine, PythonInfo()), "cuDNN")
    undo_log.apply(machine, repair.planned(machine, [finding]))
    finding = named(libraries.check(machine, PythonInfo()), "cuDNN")
    assert finding.verdict == "warn"
    assert f"source {environment_file(machine)}" in finding.hint


def test_a_second_fix_keeps_the_first_and_one_undo_takes_both(broken):
    machine = broken.machine()
    undo_log.apply(machine, repair.planned(machine, [Finding("a", "a", "warn", "", unset=("CONDA_PREFIX",))]))
    assert "LD_LIBRARY_PATH" not in environment_file(machine).read_text()
    undo_log.apply(machine, repair.planned(machine, [Finding("a", "a", "fail", "", links={"libx.so.1": "/x"})]))
    text = environment_file(machine).read_text()
    assert "unset CONDA_PREFIX\n" in text
    assert "LD_LIBRARY_PATH" in text
    assert record_file(machine).stat().st_mode & 0o777 == 0o600  # It holds whole files of the user's.
    assert not repair.planned(machine, [Finding("a", "a", "fail", "", links={"libx.so.1": "/x"})])
    undo_log.undo(machine)
    assert tree(broken.path / "home") == {}


def test_a_file_of_the_users_comes_back_with_its_text_and_its_mode(bench):
    machine = bench.machine()
    place = bench.path / "home" / "sites.toml"
    place.write_text("# mine\n")
    place.chmod(0o600)
    before = tree(bench.path / "home")
    undo_log.apply(machine, undo_log.file(place, "# theirs\n"))
    assert (place.read_text(), place.stat().st_mode & 0o777) == ("# theirs\n", 0o600)
    undo_log.undo(machine)
    assert tree(bench.path / "home") == before


@pytest.mark.parametrize("text", [b"# mine\r\n[a]\r\n", b"\xef\xbb\xbf# mine\n[a]\n"])
def test_a_file_comes_back_byte_for_byte(bench, text):
    machine, place = bench.machine(), bench.path / "home" / "sites.toml"
    place.write_bytes(text)
    wanted = site_profile.edited(place, "a", {"kind": "docker", "image": "x"}, [], {}, {})
    undo_log.apply(machine, undo_log.file(place, wanted))
    assert place.read_bytes() != text
    assert undo_log.undo(machine)[1] == []
    assert place.read_bytes() == text


def test_a_file_that_is_no_text_is_refused_and_never_lost(bench):
    machine, home = bench.machine(), bench.path / "home"
    (home / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        undo_log.file(home / "a", "x")
    undo_log.apply(machine, undo_log.file(home / "b", "x"))
    (home / "b").write_bytes(b"\xff")
    assert "was modified since" in undo_log.undo(machine)[1][0]


def test_what_somebody_changed_since_is_left_and_named(broken):
    machine = broken.machine()
    undo_log.apply(
        machine, repair.planned(machine, [Finding("a", "a", "fail", "", links={"libx.so.1": "/x"}, unset=("A",))])
    )
    link = library_folder(machine) / "libx.so.1"
    link.unlink()
    link.symlink_to("/mine")
    environment_file(machine).write_text("mine\n")
    _, left = undo_log.undo(machine)
    assert f"{link}: now points to /mine" in left
    assert any("was modified since" in path for path in left)
    assert str(link.readlink()) == "/mine"
    assert environment_file(machine).read_text() == "mine\n"
    assert not record_file(machine).exists()
    assert undo_log.undo(machine) == ([], [])


def test_a_repair_that_was_killed_in_the_middle_is_undone(broken, monkeypatch):
    machine = broken.machine()
    planned = repair.planned(machine, [Finding("a", "a", "fail", "", links={"libx.so.1": "/x", "liby.so.1": "/y"})])
    real, made = undo_log._apply, []

    def dies(change):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(change)
        real(change)

    monkeypatch.setattr(undo_log, "_apply", dies)
    with pytest.raises(KeyboardInterrupt):
        undo_log.apply(machine, planned)
    assert len(json.loads(record_file(machine).read_text())["changes"]) > len(made)  # Noted before it was made.
    monkeypatch.setattr(undo_log, "_apply", real)
    undo_log.undo(machine)
    assert tree(broken.path / "home") == {}


def test_a_file_where_a_link_should_go_is_not_replaced(bench):
    (bench.path / "libx.so.1").write_text("mine")
    with pytest.raises(RuntimeFailure, match="not replaced with a link"):
        undo_log.link(bench.path / "libx.so.1", "/x")


def test_a_folder_that_the_loader_cannot_be_told_of_is_refused(bench):
    machine = bench.machine(XDG_DATA_HOME=str(bench.path / "a:b"))
    with pytest.raises(UserError, match="colon"):
        repair.planned(machine, [Finding("a", "a", "fail", "", links={"libx.so.1": "/x"})])


def test_names_of_folders_are_words_to_the_shell_that_sources_the_file(bench):
    place = bench.path / "a b$(touch hacked)'\""
    machine = bench.machine(XDG_DATA_HOME=str(place))
    undo_log.apply(machine, repair.planned(machine, [Finding("a", "a", "fail", "", links={"libx.so.1": "/x"})]))
    done = subprocess.run(
        ["sh", "-c", '. "$1"; echo "$LD_LIBRARY_PATH"', "sh", str(environment_file(machine))],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True, timeout=150, cwd=bench.path,
    )  # fmt: skip
    assert done.stdout.strip() == str(library_folder(machine))
    assert not (bench.path / "hacked").exists()
