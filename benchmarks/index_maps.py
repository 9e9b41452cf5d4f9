"""Index maps and blends: steelyard compared with megatron-core and its compiled helper.

    python benchmarks/index_maps.py [--documents 10000000] [--datasets 20] [--rounds 5]

In each round both build everything again, save it, and end with arrays ready for use. Rounds alternate, and the median
counts. The token files are sparse: their indexes are real, their tokens take no disk space. The arrays are checked for
equality. Before that, opening the largest pair is timed: its structure, and its checksums on the sample of blocks.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from steelyard.core.recipe import load_recipe
from steelyard.tokens import checksums, indexed_dataset
from steelyard.tokens.merge import write_index
from steelyard.tokens.samples import open_samples

warnings.simplefilter("ignore")
LENGTH = 2048
RECIPE = """
[model]
family = "llama"
layers = 1
hidden = 32
heads = 1
vocab = 50000
"""


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--datasets", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.toml").write_text(RECIPE)
        tokens = make(folder / "one", options.documents, seed=0)
        opening(folder / "one", options.rounds)
        samples = tokens // LENGTH - 10
        compare(
            f"{options.documents} documents, one epoch", folder, {str(folder / "one"): 1.0}, samples, options.rounds
        )
        compare("the same, 1.3 epochs", folder, {str(folder / "one"): 1.0}, int(1.3 * samples), options.rounds)
        random = np.random.RandomState(0)
        weights = random.rand(options.datasets) + 0.05
        parts = {str(folder / f"part{n}"): float(weights[n]) for n in range(options.datasets)}
        for number, prefix in enumerate(parts):
            make(Path(prefix), options.documents // options.datasets, seed=number)
        compare(f"blend of {options.datasets} datasets", folder, parts, samples, options.rounds)


def make(prefix: Path, documents: int, seed: int) -> int:
    """Write token files with real lengths and no content; returns the number of tokens."""
    lengths = np.random.RandomState(seed).randint(1, 2000, size=documents).astype(np.int32)
    dtype = np.dtype(np.uint16)
    tokens = int(lengths.sum(dtype=np.int64))
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(tokens * dtype.itemsize)
    write_index(str(prefix), lambda: iter([lengths]), dtype)
    return tokens


def opening(prefix: Path, rounds: int) -> None:
    """Print the median seconds of opening a pair, without and with its checksums, in a warm page cache."""
    kinds = []
    for _ in ("structure", "structure and checksums"):
        times = []
        for _ in range(rounds + 1):
            indexed_dataset._verified.clear()
            start = time.perf_counter()
            indexed_dataset.IndexedTokens(prefix)
            times.append(time.perf_counter() - start)
        kinds.append(statistics.median(times[1:]))
        checksums.write(prefix)
    print(f"opening: structure {kinds[0]:.2f} s   checksums of the index and of a sample {kinds[1] - kinds[0]:.2f} s")
    checksums.path_of(prefix).unlink()


def compare(title: str, folder: Path, sources: dict[str, float], samples: int, rounds: int) -> None:
    """Build both ways, alternating, and print medians."""
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(timed(folder, lambda cache: megatrons(sources, samples, cache)))
        ours.append(timed(folder, lambda cache: steelyards(folder, sources, samples, cache)))
    a, b = theirs[-1][1], ours[-1][1]
    equal = np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1])
    mine, other = (statistics.median(seconds for seconds, _ in runs) for runs in (ours, theirs))
    print(
        f"{title:35} megatron-core {other:6.2f} s   steelyard {mine:6.2f} s   ratio {mine / other:.2f}   equal {equal}"
    )


def timed(folder: Path, build: Callable[[str], Any]) -> tuple[float, Any]:
    """Seconds to build into an empty cache, and two arrays of the result."""
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    start = time.perf_counter()
    result = build(str(cache))
    return time.perf_counter() - start, arrays(result)


def arrays(built: Any) -> tuple[Any, Any]:
    """Two arrays of the result, for comparison."""
    if hasattr(built, "dataset_index"):
        return built.dataset_index, getattr(built, "dataset_sample_index", getattr(built, "sample_index", None))
    maps = getattr(built, "maps", built)
    return np.asarray(maps.sample_index), np.asarray(maps.shuffle_index)


def steelyards(folder: Path, sources: dict[str, float], samples: int, cache: str) -> Any:
    """Build steelyard's samples."""
    entries = ", ".join(f"{{prefix='{prefix}', weight={weight}}}" for prefix, weight in sources.items())
    overrides = [
        f"data.train=[{entries}]",
        f"data.sequence_length={LENGTH}",
        f"data.index_cache={cache}",
        "data.split=100",
    ]
    return open_samples(load_recipe(folder / "recipe.toml", overrides), "train", samples)


def megatrons(sources: dict[str, float], samples: int, cache: str) -> Any:
    """Build megatron-core's dataset."""
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    if not torch.distributed.is_initialized():  # It reads the rank before it saves a blend.
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    class Tokenizer:
        unique_identifiers: dict[str, str] = {"class": "Tokenizer"}  # noqa: RUF012
        eod, pad, vocab_size = 0, -1, 50000

    blend = (list(sources), list(sources.values()) if len(sources) > 1 else None)
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=LENGTH, blend=blend, split="1,0,0", path_to_cache=cache,
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()[0]


if __name__ == "__main__":
    main()
