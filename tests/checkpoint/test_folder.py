import errno
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from steelyard import checkpoint
from steelyard.checkpoint import folder as folder_module
from steelyard.checkpoint import state_file
from steelyard.checkpoint.dcp_metadata import _Unpickler
from steelyard.core.errors import CorruptFileError, RuntimeFailure, UserError


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


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.slow
def test_no_flipped_bit_of_the_state_is_accepted(tmp_path):
    """A flip in the space between two values changes nothing that is read, and is no damage."""
    path = save(tmp_path, 7) / "state.json"
    whole, known = path.read_bytes(), state_file.read(path.parent)
    accepted = []
    for bit in range(8 * len(whole)):
        flip(path, bit)
        try:
            assert state_file.read(path.parent) == known
            accepted.append(bit // 8)
        except CorruptFileError:
            pass
        path.write_bytes(whole)
    assert all(whole[place : place + 1].isspace() for place in accepted)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[]", "not a JSON object"),
        ('{"files": {}}', "lists no files"),
        ('{"step": 1, "files": {"../../x": "0"}}', "lists no files"),
        ("[" * 200_000, "not JSON"),
        ('{"step": -1, "files": {"a": "0"}}', "step is -1, not a count"),
        ('{"step": true, "files": {"a": "0"}}', "step is True"),
        ('{"samples": 3, "files": {"a": "0"}}', "step is missing"),
        ('{"step": 1, "loss_sum": NaN, "files": {"a": "0"}}', "loss_sum is nan"),
        ('{"format": 2, "step": 1, "files": {"a": "0"}}', "does not match its own checksum"),
    ],
)
def test_a_state_that_makes_no_sense_is_damage(tmp_path, content, why):
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(CorruptFileError, match=why):
        state_file.read(tmp_path)


def test_a_state_of_the_first_format_is_read_and_of_a_later_one_refused(tmp_path, monkeypatch):
    path = save(tmp_path, 3)
    content = json.loads((path / "state.json").read_text())
    monkeypatch.setattr(state_file, "FORMAT", 9)
    monkeypatch.setattr(state_file, "__version__", "7.5.0")
    state_file.write(path, {"step": 3}, content["files"])
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"has format 9, but Steelyard .* reads formats up to 2") as refused:
        checkpoint.latest(tmp_path)
    assert "7.5.0 or newer" in refused.value.hint
    del content["format"], content["checksum"], content["steelyard"]
    (path / "state.json").write_text(json.dumps(content))
    assert loaded(checkpoint.latest(tmp_path)) == 3


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again(tmp_path):
    for step in (1, 2):
        flip(save(tmp_path, step) / "__0_0.distcp", 999)
    for _ in range(2):
        with pytest.raises(RuntimeFailure, match=r"every checkpoint in .* is damaged") as refused:
            checkpoint.latest(tmp_path, set_aside=True)
        assert "--resume never" in refused.value.hint
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_retention_deletes_no_checkpoint_that_it_cannot_read(tmp_path):
    first = save(tmp_path, 1)
    hidden = (first / "state.json").rename(first / "hidden")
    for step in range(2, 7):
        save(tmp_path, step)
    hidden.rename(first / "state.json")
    assert [path.name[-1] for path in sorted(tmp_path.glob("step-*"))] == ["1", "4", "5", "6"]


def test_a_damaged_checkpoint_is_set_aside_and_counts_for_nothing(tmp_path):
    save(tmp_path, 1)
    flip(save(tmp_path, 12) / "__0_0.distcp", 999)
    assert loaded(checkpoint.latest(tmp_path)) == 1
    assert (tmp_path / "step-00000012").exists(), "a reader moves nothing"
    assert loaded(checkpoint.latest(tmp_path, set_aside=True)) == 1
    for step in (2, 3, 4, 5):
        save(tmp_path, step)
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [f"step-{step:08d}" for step in (3, 4, 5)]
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["step-00000012"]


def test_nothing_is_deleted_before_the_new_checkpoint_was_read_back(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    finish = folder_module._finish
    monkeypatch.setattr(
        folder_module, "_finish", lambda path, *rest: (finish(path, *rest), flip(path / "__0_0.distcp", 999))
    )
    with pytest.raises(RuntimeFailure, match="step-00000004 does not read back as it was written"):
        save(tmp_path, 4)
    assert len(list(tmp_path.glob("step-*"))) == 4


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("times", [1, 99])
def test_an_error_of_the_disk_is_no_damage(tmp_path, monkeypatch, number, times):
    save(tmp_path, 1)
    save(tmp_path, 2)
    read, failures = state_file._text, iter(range(times))

    def failing(path):
        if path.parent.name == "step-00000002" and next(failures, None) is not None:
            raise OSError(number, os.strerror(number))
        return read(path)

    monkeypatch.setattr(state_file, "_text", failing)
    monkeypatch.setattr(state_file, "SECONDS_BETWEEN_TRIES", (0, 0, 0))
    if times == 1 and number != errno.EACCES:
        assert loaded(checkpoint.latest(tmp_path)) == 2
    else:
        with pytest.raises(RuntimeFailure, match=f"state.json cannot be read: {os.strerror(number)}"):
            checkpoint.latest(tmp_path)
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_pickle_that_wants_to_run_something_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="not allowed in a checkpoint"):
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
    with pytest.raises(UserError, match=r"w: \(8,\) in the checkpoint, \(9,\) expected"):
        checkpoint.load(checkpoint.latest(tmp_path), {"w": torch.zeros(9)})


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither"):
        checkpoint.source(tmp_path)
