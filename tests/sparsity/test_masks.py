import json

import pytest
import torch

from steelyard.checkpoint.formats import safetensors
from steelyard.core.errors import UserError
from steelyard.sparsity import mask_file
from steelyard.sparsity.mask_file import MaskFile
from steelyard.sparsity.patterns import Pattern

BASE = {"path": "models/base", "sha256": "0" * 64}


def made(pattern: str, *shapes: tuple[int, int]) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(len(shapes))
    chosen = Pattern.parse(pattern)
    return {
        f"layers.{n}.mlp.up.weight": chosen.keep_best(torch.rand(shape, generator=random))
        for n, shape in enumerate(shapes)
    }


@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8", "0.3"])
def test_masks_come_back_bit_for_bit(tmp_path, pattern):
    written = made(pattern, (3, 8), (64, 48), (1, 24))
    mask_file.write(tmp_path / "m.mask", written.items(), Pattern.parse(pattern), BASE, {"method": "wanda"})
    found = MaskFile(tmp_path / "m.mask")
    assert (found.names(), str(found.pattern), found.base) == (list(written), pattern, BASE)
    assert found.made_by == {"method": "wanda"}
    for name, mask in written.items():
        assert found.shape(name) == tuple(mask.shape)
        assert torch.equal(found.mask(name), mask)


@pytest.mark.parametrize(("pattern", "most"), [("2:4", 0.80), ("1:4", 0.80), ("4:8", 1.05)])
def test_a_mask_takes_less_than_a_bit_a_weight(tmp_path, pattern, most):
    written = made(pattern, (256, 512), (512, 256))
    size = mask_file.write(tmp_path / "m.mask", written.items(), Pattern.parse(pattern), BASE)
    assert size * 8 / sum(mask.numel() for mask in written.values()) <= most


def test_the_layout_of_the_bits_is_the_one_that_is_documented():
    # Groups 1100, 0011, 1001 have the numbers 0, 5 and 2: low bits 0 1 0, second bits 0 0 1, third bits 0 1 0.
    mask = torch.tensor([[1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 1]]).bool()
    assert mask_file.pack(mask, Pattern.parse("2:4")).tolist() == [0b010, 0b100, 0b010]
    assert mask_file.pack(torch.tensor([[1, 0, 0, 0, 0, 0, 1, 0]]).bool(), Pattern.parse("1:4")).tolist() == [
        0b00,
        0b10,
    ]
    assert mask_file.pack(torch.tensor([[1, 1, 0, 0]]).bool(), Pattern.parse("0.5")).tolist() == [0b0011]


def test_a_mask_that_is_not_of_the_pattern_is_not_written(tmp_path):
    with pytest.raises(UserError, match="does not follow 2:4"):
        mask_file.write(tmp_path / "m.mask", [("w", torch.ones(2, 8).bool())], Pattern.parse("2:4"), BASE)
    assert not list(tmp_path.iterdir())


def test_every_damaged_byte_of_the_masks_is_noticed(tmp_path):
    path = tmp_path / "m.mask"
    mask_file.write(path, made("2:4", (4, 16)).items(), Pattern.parse("2:4"), BASE)
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    assert len(whole) > start
    for place in range(start, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match="checksum"):
            MaskFile(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "pt"}, "not a mask file"),
        ({"version": "2"}, "version 2"),
        ({"shapes": "[]"}, "does not match the header"),
        ({"shapes": '{"w": [2]}'}, "header of the mask file is not valid"),
        ({"shapes": '{"w": [20, 16]}'}, "does not match the header"),
        ({"shapes": '{"w": [-2, -8]}'}, "does not match the header"),
        ({"shapes": '{"w": [4, 4]}'}, "checksum"),
        ({"pattern": "9:4"}, "not a sparsity pattern"),
        ({"pattern": "1:4"}, "does not match the header"),
        ({"base": "x"}, "header of the mask file is not valid"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, change, complaint):
    packed = mask_file.pack(Pattern.parse("2:4").keep_best(torch.rand(2, 8)), Pattern.parse("2:4"))
    shapes = {"w": [2, 8]}
    about = {
        "format": mask_file.FORMAT, "version": mask_file.VERSION, "pattern": "2:4",
        "shapes": json.dumps(shapes), "base": "{}", "made_by": "{}",
        "sha256": mask_file._checksum({"w": packed}, shapes, "2:4"),
    }  # fmt: skip
    path = tmp_path / "m.mask"
    list(safetensors.write(path, {"w": tuple(packed.shape)}, torch.uint8, [packed], about))
    MaskFile(path)
    list(safetensors.write(path, {"w": tuple(packed.shape)}, torch.uint8, [packed], about | change))
    with pytest.raises(UserError, match=complaint):
        MaskFile(path)


def test_a_file_of_weights_is_no_mask_file(tmp_path):
    list(safetensors.write(tmp_path / "w.safetensors", {"w": (2, 2)}, torch.float32, [torch.ones(2, 2)]))
    assert not mask_file.is_mask_file(tmp_path / "w.safetensors")
    with pytest.raises(UserError, match="not a mask file"):
        MaskFile(tmp_path / "w.safetensors")
