"""Perplexity of a dense model and of a pruned one with 8-bit values in the matrices of their layers.

    python benchmarks/sparse_values.py DENSE PRUNED --text measure.txt --windows 16 --length 512 --calibration learn.txt

Prints one line of JSON per model and format. The weights are those that `export-sparse --values` stores: one scale per
row, zeros stay zeros; with `--calibration` also those that it stores with that option. Embeddings, head, and the 16-bit
row are bf16; products are computed in fp32 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, SourceView, open_source
from steelyard.checkpoint.formats.compressed_tensors import matrices
from steelyard.checkpoint.formats.row_scales import DTYPES, ValueFormat, dequantized, quantized
from steelyard.evaluate import eval_tokens
from steelyard.evaluate.load_model import loaded
from steelyard.evaluate.perplexity import summed_loss
from steelyard.evaluate.windows import plan
from steelyard.sparsity.calibration import Calibration, windows_of
from steelyard.sparsity.layerwise import Task, pruned_layers
from steelyard.sparsity.pruned_source import PartlyPrunedSource
from steelyard.sparsity.semi_structured import PATTERN
from steelyard.training.device import device_for


class Rounded(SourceView):
    """A source whose layer matrices are rounded to an 8-bit format, or like the rest to bf16."""

    def __init__(self, source: CheckpointSource, kind: ValueFormat | None) -> None:
        super().__init__(source)
        self.kind, self.matrices = kind, frozenset(matrices(source.sizes()))

    def tensor(self, name: str) -> Tensor:
        """The rounded tensor."""
        whole = self.origin.tensor(name)
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
    parser.add_argument("--calibration", help="text by which values are also rounded together")
    parser.add_argument("--samples", type=int, default=48, help="its windows, of --length tokens")
    options = parser.parse_args()
    device = device_for("auto")
    for path in (options.pruned, options.dense):
        source = open_source(path)
        tokens = eval_tokens.from_text(options.text, source.load_tokenizer()).tokens[: options.windows * options.length]
        cut = plan(len(tokens), options.length, None, "hf")
        views: dict[str, CheckpointSource] = {kind or "bf16": Rounded(source, kind) for kind in (None, *DTYPES)}
        if options.calibration:
            asked = Calibration(options.calibration, options.samples, options.length)
            rows = windows_of(source, asked, None).tokens_BL
            views |= {f"{kind}, calibrated": calibrated(source, kind, rows, device) for kind in DTYPES}
        plain = math.nan
        for name, view in views.items():
            network = loaded(view, device, torch.float32)
            found = math.exp(summed_loss(network, tokens, cut.windows, device).item() / cut.divisor)
            plain = found if name == "bf16" else plain
            row = {"model": path, "values": name, "perplexity": found, "ratio_to_bf16": found / plain}
            print(json.dumps(row | {"windows": len(cut.windows)}), flush=True)


def calibrated(source: CheckpointSource, kind: ValueFormat, tokens: Tensor, device: torch.device) -> CheckpointSource:
    """The source with values rounded together, layer by layer when it is read."""
    names = matrices(source.sizes())
    task = Task("magnitude", PATTERN, names, device=device, dtype=torch.float32, value_format=kind)
    return PartlyPrunedSource(Rounded(source, None), pruned_layers(source, task, tokens), names)


if __name__ == "__main__":
    main()
