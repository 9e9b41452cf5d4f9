"""A base is known by what its weights are, wherever and in whatever format they lie."""

import shutil
from pathlib import Path

import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.megatron_layout import MegatronLayout
from steelyard.core.errors import UserError
from steelyard.sparsity import frozen_base
from tests.checkpoint.models import SHAPES, Held, written


@pytest.mark.parametrize("name", ["gpt", "qwen2"])
def test_a_base_is_the_same_in_every_format_and_place(tmp_path: Path, name: str):
    source = open_source(written(tmp_path, name))
    known = frozen_base.identity(source)
    assert known["sha256"] == frozen_base.fingerprint(Held(SHAPES[name]))
    assert known["sha256"] == frozen_base.fingerprint(
        open_source(written(tmp_path, name, "megatron", layout=MegatronLayout(2)))
    )
    moved = shutil.move(source.path, tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"do not exist at .*hf") as asked:
        frozen_base.found(known, None, "say where")
    assert asked.value.hint == "say where"
    assert frozen_base.found(known, str(moved), "say where").path == moved


def test_other_weights_are_refused(tmp_path: Path):
    source = Held(SHAPES["llama"])
    known = frozen_base.identity(source)
    frozen_base.check(known, source, "")
    with torch.no_grad():
        source.parameters["layers.3.mlp.down.weight"][5, 7] += 1e-6
    with pytest.raises(UserError, match="other weights"):
        frozen_base.check(known, source, "name the right ones")
