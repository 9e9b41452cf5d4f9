"""Perplexity of a dense model and of a pruned one with 8-bit values in the matrices of their layers.

    python benchmarks/sparse_values.py DENSE PRUNED --text measure.txt --windows 16 --length 512

Prints one line of JSON per model and format. The weights are those that `export-sparse --values` stores: one scale per
row, zeros stay zeros. Embeddings, head, and the 16-bit row are bf16; products are computed in fp32 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, open_source
from steelyard.checkpoint.formats.compressed_tensors import matrices
from steelyard.checkpoint.formats.row_scales import DTYPES, ValueFormat, dequantized, quantized
from steelyard.evaluate import eval_tokens
from steelyard.evaluate.load_model import loaded
from steelyard.evaluate.perplexity import summed_loss
from steelyard.evaluate.windows import plan
from steelyard.sparsity.pruned_source import SourceView
from steelyard.training.device import device_for


class Rounded(SourceView):
    """A source whose layer matrices are rounded to an 8-bit format, or like the rest to bf16."""

    def __init__(self, source: CheckpointSource, kind: ValueFormat | None) -> None:
        super().__init__(source)
        self.kind, self.matrices = kind, frozenset(matrices(source.sizes()))

    def tensor(self, name: str) -> Tensor:
        """The rounded tensor."""
        whole = self.source.tensor(name)
        if self.kind is None or name not in self.matrices:
            return whole.bfloat16()
        return dequantized(*quantized(whole, self.kind))


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense")
    parser.add_argument("pruned")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    device = device_for("auto")
    for path in (options.pruned, options.dense):
        source = open_source(path)
        tokens = eval_tokens.from_text(options.text, source.load_tokenizer()).tokens[: options.windows * options.length]
        cut = plan(len(tokens), options.length, None, "hf")
        plain = math.nan
        for kind in (None, *DTYPES):
            network = loaded(Rounded(source, kind), device, torch.float32)
            found = math.exp(summed_loss(network, tokens, cut.windows, device).item() / cut.divisor)
            plain = found if kind is None else plain
            row = {"model": path, "values": kind or "bf16", "perplexity": found, "ratio_to_bf16": found / plain}
            print(json.dumps(row | {"windows": len(cut.windows)}), flush=True)


if __name__ == "__main__":
    main()
