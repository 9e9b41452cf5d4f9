"""Perplexity, compared with transformers on the same windows and weights, in one run.

    python benchmarks/eval_ppl.py SmolLM2-135M-Instruct.Q4_1.gguf --length 1024

transformers is called as usual: `model(ids, labels=ids).loss`, one window at a time. Ours uses the batches of
`steelyard eval ppl`. The two alternate, and the best turn counts. Rates per CPU second of this process are also given,
since other load on the machine affects them less. The two losses are printed and must agree.
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
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a GGUF or a Hugging Face folder")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small random model, as a smoke test")
    options = parser.parse_args()
    if options.tiny == (options.model is not None):
        parser.error("pass a model, or --tiny")
    with tempfile.TemporaryDirectory(prefix="steelyard-ppl-") as folder:
        measure(options, options.model or small(Path(folder)))


def small(folder: Path) -> str:
    """A model that is small enough for a CPU."""
    from steelyard.checkpoint.formats.write import Target, convert
    from tests.checkpoint.models import SHAPES, Held

    convert(Held(SHAPES["llama"].model_copy(update={"vocab": 200})), folder / "model", Target("hf"))
    return str(folder / "model")


def measure(options: argparse.Namespace, model: str) -> None:
    """Measure both, alternating."""
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

    score_ours(), score_theirs()  # Warm-up: compilation and autotuning do not count.
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
    """Wall seconds and CPU seconds of this process, and the score."""
    clock, own = time.perf_counter(), time.process_time()
    loss = score()
    return (time.perf_counter() - clock, time.process_time() - own), loss


if __name__ == "__main__":
    main()
