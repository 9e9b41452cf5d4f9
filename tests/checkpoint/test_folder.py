import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from steelyard import checkpoint
from steelyard.checkpoint.metadata import _Unpickler
from steelyard.core.errors import UserError


def save(folder, step, value=0.0):
    return checkpoint.save(folder, {"w": torch.full((8,), value + step)}, {"step": step}, keep_last=3)


def loaded(saved):
    tensors = {"w": torch.zeros(8)}
    checkpoint.load(saved, tensors)
    return tensors["w"][0].item()


def test_the_newest_is_loaded_and_only_the_last_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"step-{step:08d}" for step in (3, 4, 5)]
    assert loaded(checkpoint.latest(tmp_path)) == 5


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, capsys, file, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / file
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    else:
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else content)
    assert loaded(checkpoint.latest(tmp_path)) == 1
    assert "step-00000002 is damaged" in capsys.readouterr().err


def test_a_pickle_that_wants_to_run_something_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="no place in a checkpoint"):
        checkpoint.load(checkpoint.Checkpoint(path, {"step": 1}), {"w": torch.zeros(8)})
    assert not (tmp_path / "owned").exists()


class Attribute:
    def __init__(self, owner, name):
        self.owner, self.name = owner, name

    def __reduce__(self):
        return getattr, (self.owner, self.name)


def test_members_of_enumerations_are_read_as_early_pythons_write_them_and_no_other_attribute(tmp_path):
    def read(written):
        return _Unpickler(io.BytesIO(pickle.dumps(written))).load()

    assert read(Attribute(WriteItemType, "TENSOR")) is WriteItemType.TENSOR
    for hostile in (Attribute(Metadata, "__init__"), Attribute(WriteItemType, "__class__"), Attribute("", "join")):
        with pytest.raises((pickle.UnpicklingError, KeyError)):
            read(hostile)


def test_paths_are_read_as_python_3_13_writes_them_and_no_other_name_of_that_module():
    path = b"cpathlib._local\n%s\n(Vfolder\ntR."
    assert _Unpickler(io.BytesIO(path % b"PosixPath")).load() == Path("folder")
    with pytest.raises(pickle.UnpicklingError):
        _Unpickler(io.BytesIO(path % b"os")).load()


def test_a_checkpoint_names_no_path_that_only_one_python_can_read(tmp_path):
    assert b"pathlib" not in (save(tmp_path, 1) / ".metadata").read_bytes()


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(UserError, match=r"w: \(8,\) in the checkpoint, \(9,\) wanted"):
        checkpoint.load(checkpoint.latest(tmp_path), {"w": torch.zeros(9)})


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither"):
        checkpoint.source(tmp_path)
