import contextlib
import errno
import os
import stat
import subprocess
import sys

import pytest

from steelyard.core.files import atomic_file, atomic_folder, free_space, sweep_leftovers, write_text

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from steelyard.core.files import atomic_file
with atomic_file(Path(sys.argv[1])) as file:
    file.write("half of")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_the_old_file_and_a_leftover_that_can_be_swept(tmp_path):
    path = tmp_path / "result.txt"
    path.write_text("old")
    ended = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], timeout=600)
    assert ended.returncode == -9
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2
    sweep_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_writer_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), atomic_file(tmp_path / "a") as file:
        file.write("x")
        raise RuntimeError
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "b") as folder:
        (folder / "c").touch()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_of_a_folder_goes_when_it_is_written_again(tmp_path, capsys):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=600)
    dead, other, alive = f".tmp-{ended.pid}-out", f".tmp-{ended.pid}-out-2", f".tmp-{os.getppid()}-out"
    for name in (dead, other, alive):
        (tmp_path / name / "inner").mkdir(parents=True)
    with atomic_folder(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other, alive, "out"])
    assert f"removing {tmp_path / dead}" in capsys.readouterr().err


def test_free_space_is_that_of_the_nearest_folder_that_is_there(tmp_path):
    assert free_space(tmp_path / "a" / "b") > 0


@pytest.mark.parametrize(("number", "is_refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_that_cannot_sync_folders_is_written_to_all_the_same(tmp_path, monkeypatch, number, is_refused):
    """As Windows drives under WSL may be; a disk that fails is another matter."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="error") if is_refused else contextlib.nullcontext():
        write_text(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_a_private_file_is_readable_by_its_owner_alone_from_its_first_byte(tmp_path):
    path = tmp_path / "secret.json"
    path.write_text("an earlier one")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        with atomic_file(path, private=True) as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
            file.write("new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == "new"
