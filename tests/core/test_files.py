import subprocess
import sys

import pytest

from steelyard.core.files import atomic_file, atomic_folder, sweep_leftovers

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
    ended = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(path)], timeout=60)
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
