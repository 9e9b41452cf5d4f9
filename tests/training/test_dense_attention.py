"""A GPU in 16 bits never computes a dense mask without saying so."""

from types import SimpleNamespace

import pytest
import torch

from steelyard.core.recipe import load_recipe
from steelyard.model import windowed_attention
from steelyard.training.engine import Engine

PACKED = ["data.mask_documents=true", "data.end_of_document=0", "train.precision=bf16"]


@pytest.mark.parametrize(
    ("preset", "overrides", "context", "has_kernels", "reason"),
    [
        ("gemma3-1b", PACKED, 1, True, None),
        ("gemma3-1b", PACKED, 2, True, "with context parallelism"),
        ("gemma3-1b", ["train.precision=bf16"], 2, False, "windows and soft caps"),
        ("gemma3-1b", ["train.precision=fp32"], 2, False, None),
        ("gpt2-small", ["model.attention_dropout=0.1", "train.precision=bf16"], 1, True, "attention_dropout"),
        ("gpt2-small", ["train.precision=bf16"], 1, False, None),
    ],
)
def test_the_reason_is_named(monkeypatch, preset, overrides, context, has_kernels, reason):
    """A stand-in for an engine on a GPU, which this machine need not have."""
    monkeypatch.setattr(windowed_attention, "has_window_kernels", lambda width: has_kernels)
    engine = SimpleNamespace(
        recipe=load_recipe(preset, overrides),
        device=torch.device("cuda"),
        mesh=SimpleNamespace(context=SimpleNamespace(size=context)),
        end_of_document=0 if "data.mask_documents=true" in overrides else None,
        _uses_varlen_attention=lambda: context == 1 and has_kernels,
    )
    found = Engine.dense_attention(engine)
    assert found is None if reason is None else reason in found
