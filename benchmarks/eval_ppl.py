"""Perplexity, side by side with transformers on the same windows of the same weights, in one run.

    python benchmarks/eval_ppl.py SmolLM2-135M-Instruct.Q4_1.gguf --length 1024

transformers is asked as its users ask it: `model(ids, labels=ids).loss`, a window at a time. Ours reads as many windows
at once as `steelyard eval ppl` does. The two take turns, and the best of the turns counts; seconds are also given as
this process's own time, which another's load changes less. The two losses are printed and must agree.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peers import both

from steelyard.evaluate.perplexity import summed_loss
from steelyard.evaluate.windows import plan


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a GGUF or a Hugging Face folder")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small random model: does it run?")
    options = parser.parse_args()
    if options.tiny == (options.model is not None):
        parser.error("name a model, or --tiny")
    with tempfile.TemporaryDirectory(prefix="steelyard-ppl-") as folder:
        measure(options, options.model or small(Path(folder)))


def small(folder: Path) -> str:
    """A model that a CPU gets through at once."""
    from steelyard.checkpoint.formats.write import Target, convert
    from tests.checkpoint.models import SHAPES, Held

    convert(Held(SHAPES["llama"].model_copy(update={"vocab": 200})), folder / "model", Target("hf"))
    return str(folder / "model")


def measure(options: argparse.Namespace, model: str) -> None:
    """Both, in turns."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    ours, theirs = both(model, device, torch.bfloat16 if is_gpu else torch.float32, compiled=is_gpu)
    ids = np.random.RandomState(0).randint(100, ours.config.vocab, options.length * options.windows)
    rows = torch.from_numpy(ids).view(options.windows, 1, options.length).to(device)
    cut = plan(len(ids), options.length, None, "hf")

    def score_ours() -> float:
        return summed_loss(ours, ids, cut.windows, device).item() / cut.divisor

    def score_theirs() -> float:
        with torch.inference_mode():
            return torch.stack([theirs(row, labels=row).loss.double() for row in rows]).mean().item()

    score_ours(), score_theirs()  # What is compiled or tuned once is not counted.
    turns = [(timed(score_ours), timed(score_theirs)) for _ in range(options.turns)]
    for side, runs in zip(("steelyard", "transformers"), zip(*turns, strict=True), strict=True):
        wall, own = (min(seconds[kind] for seconds, _ in runs) for kind in (0, 1))
        line = {
            "what": side,
            "tokens_per_second": round(len(ids) / wall),
            "tokens_per_own_second": round(len(ids) / own),
        }
        print(json.dumps(line | {"loss": round(runs[0][1], 6), "device": device.type}))


def timed(score: Callable[[], float]) -> tuple[tuple[float, float], float]:
    """Seconds by the clock and of this process, and the score."""
    clock, own = time.perf_counter(), time.process_time()
    loss = score()
    return (time.perf_counter() - clock, time.process_time() - own), loss


if __name__ == "__main__":
    main()
