"""Files from strangers: a clear refusal, nothing run, nothing allocated that the file does not hold."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.checkpoint.formats import load_into, open_source, safetensors
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.model import build
from tests.checkpoint.models import written

RELAXED = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def with_header(path: Path, header: bytes, data: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def entry(**change) -> bytes:
    table = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | change
    return json.dumps({"w": table}).encode()


@pytest.mark.parametrize(
    ("header", "length", "complaint"),
    [
        (b"{}", 1 << 62, "would have"),
        (b"{}", 200_000_000, "would have"),
        (b"not json", None, "not JSON"),
        (b"[" * 100_000, None, "not JSON"),
        (b"[]", None, "not a table"),
        (b'{"w": 3}', None, "does not describe"),
        (entry(dtype="I64"), None, "has the dtype I64"),
        (entry(dtype=["F32"]), None, "has the dtype"),
        (entry(shape=[1 << 40, 1 << 40]), None, "which does not match F32"),
        (entry(shape=[-2, -2]), None, "not integers"),
        (entry(shape=[2.0, 2]), None, "not integers"),
        (entry(data_offsets=[0, 32]), None, "which does not match F32"),
        (entry(shape=[1 << 40], data_offsets=[0, 1 << 42]), None, "ends at byte"),
        (entry(data_offsets=[16, 0]), None, "which does not match F32"),
        (entry(data_offsets=[0]), None, "does not describe"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, length, complaint):
    file = with_header(tmp_path / "model.safetensors", header, bytes(16), length)
    with pytest.raises(UserError, match=complaint):
        safetensors.extents(file)


@RELAXED
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.integers(0, 300))
def test_any_bytes_for_safetensors_are_read_or_refused(tmp_path, data, length):
    """Any error but a refusal fails this."""
    file = with_header(tmp_path / "model.safetensors", data, b"", length)
    try:
        for extent in safetensors.extents(file).values():
            extent.read()
    except UserError:
        pass


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/passwd", "a/../../b.bin", "..", "", "x.txt", 7, None])
def test_an_index_cannot_point_out_of_its_folder(tmp_path, shard):
    folder = written(tmp_path, "llama", shard_bytes=20_000)
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(table))
    with pytest.raises(UserError, match="is not a file of this folder"):
        open_source(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path, name):
    folder, elsewhere = written(tmp_path, "llama"), tmp_path / "elsewhere"
    if (folder / name).exists():
        (folder / name).rename(elsewhere)
    else:
        elsewhere.write_text("a private key")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(UserError, match="is a link that leaves its folder"):
        convert(open_source(folder), tmp_path / "copy", Target("hf"))


def test_links_inside_the_folder_and_into_a_cache_of_the_hub_are_followed(tmp_path):
    model = written(tmp_path, "llama")
    (model / "chat_template.jinja").write_text("a template")
    blobs = tmp_path / "models--someone--small" / "blobs"
    snapshot = blobs.with_name("snapshots") / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "merges.txt").symlink_to("chat_template.jinja")
    (tmp_path / "named").symlink_to(snapshot)
    convert(open_source(tmp_path / "named"), tmp_path / "copy", Target("hf"))
    assert (tmp_path / "copy" / "chat_template.jinja").read_text() == "a template"
    (blobs / "key").symlink_to("/etc/hostname")
    (snapshot / "vocab.json").symlink_to("../../blobs/key")
    with pytest.raises(UserError, match="is a link that leaves its folder"):
        open_source(snapshot)


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-dist", "steelyard"])
def test_a_truncated_shard_is_named(tmp_path, to):
    folder = written(tmp_path, "llama", to)
    largest = max((file for file in folder.rglob("*") if file.is_file()), key=os.path.getsize)
    os.truncate(largest, os.path.getsize(largest) * 2 // 3)
    with pytest.raises(UserError) as refused:
        source = open_source(folder)
        load_into(source, build(source.config))
    assert largest.name in str(refused.value) or ".metadata" in str(refused.value)
    assert "copy or download it again" in str(refused.value)
    assert "miniz" not in str(refused.value)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-dist", "deepspeed"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, to):
    folder = written(tmp_path, "llama", "hf" if to == "deepspeed" else to)
    evil = {"args": Evil(tmp_path / "owned"), "model": {}}
    if to == "hf":
        (folder / "model.safetensors").unlink()
        torch.save(evil, folder / "pytorch_model.bin")
    elif to == "megatron":
        torch.save(evil, folder / "iter_0000001/mp_rank_00/model_optim_rng.pt")
    elif to == "megatron-dist":
        (folder / "iter_0000001/.metadata").write_bytes(pickle.dumps(evil))
    else:
        folder = tmp_path / "global_step1"
        folder.mkdir()
        torch.save(evil, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="not allowed in a checkpoint"):
        open_source(folder)
    assert not (tmp_path / "owned").exists()


def test_classes_of_megatron_in_args_become_inert(tmp_path):
    """A settings class that this process could import is still not imported, only stood in for."""
    folder = written(tmp_path, "llama", "megatron")
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    enums = pytest.importorskip("megatron.core.transformer.enums")
    state["args"].attention_backend = enums.AttnBackend.flash
    state["rng_state"] = [{"np_rng_state": __import__("numpy").random.get_state()}]
    torch.save(state, file)
    assert open_source(folder).config.layers == 4


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_a_dtype_that_is_no_weight_is_refused(tmp_path, dtype):
    folder = written(tmp_path, "llama", "megatron")
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"] = torch.zeros(32).to(dtype)
    torch.save(state, file)
    with pytest.raises(UserError, match="of the dtype"):
        open_source(folder)


@pytest.mark.parametrize("to", ["hf", "megatron", "megatron-dist", "steelyard"])
@RELAXED
@given(data=st.data())
def test_flipped_bytes_are_read_or_refused(tmp_path, to, data):
    """Damage anywhere in any file ends in an answer or in a refusal, never in another error."""
    folder = tmp_path / f"llama-{to}"
    if not folder.exists():
        written(tmp_path, "llama", to)
    # The weights themselves may be anything; what surrounds them may not.
    file = data.draw(st.sampled_from(sorted(file for file in folder.rglob("*") if file.is_file())))
    content = file.read_bytes()
    place = data.draw(st.integers(0, min(len(content), 3000) - 1))
    new = data.draw(st.binary(min_size=1, max_size=8))
    try:
        file.write_bytes(content[:place] + new + content[place + len(new) :])
        source = open_source(folder)
        for name in source.names()[:3]:
            source.tensor(name)
    except UserError:
        pass
    finally:
        file.write_bytes(content)


def gguf(tensors: int, settings: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + rest


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (gguf(1 << 60, 0, b""), "the header announces"),
        (gguf(0, 1 << 60, b""), "the header announces"),
        (gguf(0, 1, struct.pack("<Q", 1 << 60) + b"x" * 30), "bytes are expected"),
        (gguf(0, 1, struct.pack("<Q1sIIQ", 1, b"a", 9, 6, 1 << 50)), "values"),
        (gguf(0, 1, struct.pack("<Q1sI", 1, b"a", 99)), "type 99"),
        (gguf(1, 0, struct.pack("<Q1sI", 1, b"a", 1000) + bytes(40)), "1000 dimensions"),
        (gguf(1, 0, struct.pack("<Q1sIQQIQ", 1, b"a", 2, 1 << 40, 1 << 40, 0, 0)), "does not fit in the file"),
        (gguf(1, 0, struct.pack("<Q1sIQIQ", 1, b"a", 1, 32, 16, 0)), "quantization type 16"),
        (gguf(1, 0, struct.pack("<Q1sIQIQ", 1, b"a", 1, 256, 14, 0) + bytes(200)), "does not fit in the file"),
        (gguf(1, 0, struct.pack("<Q1sIQIQ", 1, b"a", 1, 32, 14, 0) + bytes(300)), "does not fit in the file"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (gguf(0, 0, b""), "architecture None"),
        (b"GGUF\x03", "bytes are expected"),
        (b"", "not a GGUF file: it is empty"),
        (b"<html>", "not a GGUF file: it starts with b'<htm'"),
    ],
)
def test_a_gguf_that_lies_is_refused(tmp_path, content, complaint):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        open_source(tmp_path / "m.gguf")


@RELAXED
@given(st.binary(max_size=300))
def test_any_bytes_for_gguf_are_refused(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(gguf(2, 3, data))
    with pytest.raises(UserError):
        open_source(tmp_path / "m.gguf")


def test_a_latest_file_cannot_point_elsewhere(tmp_path):
    folder = written(tmp_path, "llama", "megatron")
    (folder / "latest_checkpointed_iteration.txt").write_text("../../etc")
    with pytest.raises(UserError, match="not an iteration"):
        open_source(folder)
