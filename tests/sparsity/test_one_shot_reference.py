"""The one-file reference of `benchmarks/` and `steelyard prune` keep the same weights of a small model."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.sparsity.calibration import Calibration, windows
from steelyard.sparsity.prune import prune
from steelyard.sparsity.prune_request import PruneRequest
from tests.checkpoint.models import SHAPES, Held
from tests.sparsity.small import LENGTH, write_text

FILE = Path(__file__).parents[2] / "benchmarks" / "one_shot_reference.py"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_the_reference_prunes_the_same(tmp_path, method):
    spec = importlib.util.spec_from_file_location("one_shot_reference", FILE)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    convert(Held(SHAPES["llama-tied"]), tmp_path / "hf", Target("hf"))
    text = write_text(tmp_path)
    prune(PruneRequest(str(tmp_path / "hf"), tmp_path / "ours", method, calibration=text, samples=4, length=LENGTH))
    model = reference.load(str(tmp_path / "hf"), "cpu")
    rows = windows(Calibration(text, 4, LENGTH, 0), None, 100).tokens_BL
    reference.prune(model, method, None if method == "magnitude" else rows)
    ours = open_source(tmp_path / "ours")
    for name, part in (("attention.query", "self_attn.q_proj"), ("mlp.down", "mlp.down_proj")):
        for number in range(4):
            expected = model.get_parameter(f"model.layers.{number}.{part}.weight").detach().numpy()
            found = ours.tensor(f"layers.{number}.{name}.weight").numpy()
            assert np.count_nonzero(expected) == expected.size // 2
            np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())
    assert torch.equal(model.model.embed_tokens.weight[:100], ours.tensor("embed.weight")[:100])
