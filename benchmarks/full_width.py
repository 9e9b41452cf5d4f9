"""Logits of every family at its published width against transformers: two layers, random weights, fp32 on the CPU.

Prints the largest difference relative to the largest logit. Experts are limited to 8 and the vocabulary to 8,192, which
bounds the memory to about 12 GB, and to half of that with one layer. Run it from the checkout:

    python benchmarks/full_width.py [--only mixtral-8x7b] [--layers 1]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import transformers

from steelyard import model
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.hf_config import config_to_hf
from steelyard.checkpoint.formats.source import load_into
from steelyard.core.recipe import load_recipe

PRESETS = (
    "gpt2-xl", "llama2-7b", "llama3.1-8b", "mistral-7b", "qwen2-7b", "qwen3-8b", "gemma2-2b", "gemma3-4b", "olmo2-7b",
    "smollm3-3b", "mixtral-8x7b", "qwen3-30b-a3b",
)  # fmt: skip
TOKENS = 48


def difference(preset: str, layers: int) -> float:
    """The largest difference of the logits, relative to the largest logit."""
    config = load_recipe(preset).model
    changes = {"layers": layers, "vocab": 8192}
    if hasattr(config, "experts"):
        changes |= {"experts": min(config.experts, 8), "experts_per_token": min(config.experts_per_token, 4)}
    config = config.model_copy(update=changes)
    values = config_to_hf(config, torch.float32, {})
    kind = getattr(transformers, values["architectures"][0])
    torch.manual_seed(0)
    theirs = kind(kind.config_class(**values)).eval()
    tokens = torch.randint(0, config.vocab, (1, TOKENS))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        theirs.save_pretrained(folder)
        expected = theirs(tokens).logits
        del theirs
        ours = model.build(config).eval()
        load_into(open_source(Path(folder)), ours)
        found = ours(tokens)
    return ((found - expected).abs().max() / expected.abs().max()).item()


def main() -> None:
    """Compare the presets of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=PRESETS)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    for preset in options.only:
        line = {"preset": preset, "layers": options.layers, "difference": difference(preset, options.layers)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
