"""Perplexity after magnitude pruning of a quantised model, by the rule that decides between equal magnitudes.

    python benchmarks/prune_ties.py MODEL --text wikitext2-valid.txt

Prints one line of JSON per rule. MODEL has a tokenizer, and should come from a quantised file (GGUF Q4 or Q8), where
many groups of four have equal magnitudes at the cut.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable

import torch
from torch import Tensor

from steelyard.checkpoint.formats import CheckpointSource, SourceView, open_source
from steelyard.evaluate import eval_tokens
from steelyard.evaluate.load_model import loaded
from steelyard.evaluate.perplexity import summed_loss
from steelyard.evaluate.windows import plan
from steelyard.sparsity.patterns import Pattern, place_hash
from steelyard.sparsity.target_modules import maskable
from steelyard.training.device import device_for

TWO_OF_FOUR = Pattern(2, 4)


def random_order(weight_OI: Tensor) -> Tensor:
    """A seeded random order, which depends on how often it was called."""
    return torch.randint(-(1 << 30), 1 << 30, weight_OI.shape, generator=GENERATOR, dtype=torch.int32)


def by_column(weight_OI: Tensor) -> Tensor:
    """The higher column first."""
    return torch.arange(weight_OI.shape[1], dtype=torch.int32).expand(weight_OI.shape)


GENERATOR = torch.Generator().manual_seed(0)
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "hash of row and column": lambda weight: place_hash(weight.shape, weight.device),
    "random": random_order,
    "lower index stays": lambda weight: -by_column(weight),
    "higher index stays": by_column,
    "positive weight stays": lambda weight: weight.sign().int() * 4096 + by_column(weight) % 4,
}


class PrunedByRule(SourceView):
    """A source whose matrices keep the two largest of four, with ties decided by a rule."""

    def __init__(self, source: CheckpointSource, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__(source)
        self.rule, self.matrices, self.tied = rule, maskable(source.config), [0, 0]

    def tensor(self, name: str) -> Tensor:
        """The tensor, pruned if it is a matrix of a layer."""
        weight_OI = self.origin.tensor(name).float()
        if name not in self.matrices:
            return weight_OI
        mask_OI = TWO_OF_FOUR.keep_best(weight_OI.abs(), self.rule(weight_OI))
        tied_G = TWO_OF_FOUR.ties(weight_OI.abs(), mask_OI)
        self.tied = [self.tied[0] + int(tied_G.sum()), self.tied[1] + tied_G.numel()]
        return weight_OI.masked_fill(~mask_OI, 0)


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    options = parser.parse_args()
    source, device = open_source(options.model), device_for("auto")
    tokens = eval_tokens.from_text(options.text, source.load_tokenizer()).tokens[: options.windows * options.length]
    cut = plan(len(tokens), options.length, None, "hf")

    def perplexity(view: CheckpointSource) -> float:
        network = loaded(view, device, torch.float32)
        return math.exp(summed_loss(network, tokens, cut.windows, device).item() / cut.divisor)

    print(json.dumps({"rule": "dense", "perplexity": perplexity(source), "windows": len(cut.windows)}), flush=True)
    for name, rule in RULES.items():
        view = PrunedByRule(source, rule)
        result = {"rule": name, "perplexity": perplexity(view), "tied_groups": view.tied[0] / view.tied[1]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
