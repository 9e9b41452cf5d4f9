"""Perplexity of a model after 2:4 pruning: each one-shot method, and learned masks or joint training, in one run.

    python benchmarks/mask_quality.py MODEL --text wikitext2-valid.txt --more english-prose.txt
    python benchmarks/mask_quality.py MODEL --text ... --more ... --method joint
    python benchmarks/mask_quality.py MODEL --corpus FOLDER --part test --prior prior.mask --try "train.seed=1" ...
    python benchmarks/mask_quality.py --tiny        # a small random model on docs/, as a smoke test

The last 15% of the lines of --text are only for evaluation; the rest, and all of --more, are for calibration and mask
learning. Masks are learned as published (docs/sparsity.md), with the mask of SparseGPT as prior, in 500 steps of 16 x
1024 tokens. --try changes recipe keys of that and can be repeated; each is a row. Each row is printed at once as one
line of JSON, the most important first.

--corpus is a folder of `build_corpus.py`: its train part, or the token files of --tokens, is for training, and the
first --windows, or more, of one of the other parts for evaluation. With --prior (a mask file of
`steelyard prune --save mask`) the one-shot methods, and the other models of joint training, are left out, which saves
time on a GPU.

--method joint trains weights and masks together, with distillation. Its rows beside the dense model are a dense model
that was trained on the same tokens, and masks that are learned in half of the steps and fine-tuned in the other half.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from steelyard import cli, training
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.recipe import load_recipe
from steelyard.sparsity import sparsity_extension
from steelyard.text.formats import reading

SHARE = 0.85
DOCS = Path(__file__).parents[1] / "docs"
TRIES = {
    "learned": ["optim.eps=1e-8 sparsity.distill=1.0", "optim.eps=1e-8"],
    "joint": ["optim.eps=1e-8 sparsity.distill=1.0", "optim.eps=1e-8 sparsity.distill=1.0 optim.learning_rate=2e-4"],
}
DENSE: list[float] = []


def main() -> None:
    """Run the measurement of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a checkpoint of any format, with its tokenizer")
    parser.add_argument("--text", type=Path, help="text file; a part of it is for evaluation")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="more text files for training")
    parser.add_argument("--corpus", type=Path, help="in place of --text and --more")
    parser.add_argument("--part", choices=["validation", "test"], default="validation", help="of the corpus")
    parser.add_argument("--windows", type=int, default=304, help="the least number of the part")
    parser.add_argument("--tokens", help="prefix of token files of the train part")
    parser.add_argument("--prior", type=Path, help="mask file; leaves out all but --try")
    parser.add_argument("--method", choices=list(TRIES), default="learned")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=4, help="each micro-batch draws its own noise")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows for pruning")
    parser.add_argument(
        "--try", dest="tries", action="append", help="recipe keys for the method, such as optim.eps=1e-8"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.tiny and (options.model is None or (options.text is None) == (options.corpus is None)):
        parser.error("pass a model and --text or --corpus, or --tiny")
    folder = Path(tempfile.mkdtemp(prefix="steelyard-masks-"))
    try:
        if options.tiny:
            shrink(options, folder)
        measure(options, folder)
    finally:
        shutil.rmtree(folder)


def shrink(options: argparse.Namespace, folder: Path) -> None:
    """Use a random model, a tokenizer and a text that take a minute on a CPU."""
    from steelyard.core.recipe.families.llama import LlamaConfig
    from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe
    from tests.checkpoint.models import Held

    pages = [line for page in sorted(DOCS.glob("*.md")) for line in page.read_text().splitlines()][:1500]
    options.text, options.more = folder / "pages.txt", []
    options.text.write_text("\n".join(pages) + "\n")
    train_byte_bpe(pages, 600).save(folder / "tokenizer")
    held = Held(LlamaConfig(family="llama", layers=2, hidden=32, heads=4, ffn=64, vocab=600, tied=True))
    convert(held, folder / "model", Target("hf", tokenizer=str(folder / "tokenizer")))
    options.model, options.steps, options.length, options.samples = str(folder / "model"), 3, 64, 4


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Print a row for the dense model, for SparseGPT, for each --try, and for the other pruning methods."""
    learn, held_out = folder / "learn.txt", folder / "measure.txt"
    if options.corpus is None:
        lines = options.text.read_text(encoding="utf-8").splitlines(keepends=True)
        cut = int(SHARE * len(lines))
        learn.write_text("".join(lines[:cut]) + "".join(each.read_text(encoding="utf-8") for each in options.more))
        held_out.write_text("".join(lines[cut:]))
    else:
        excerpt(options.corpus / "train.jsonl.zst", learn, options.samples, options)
        excerpt(options.corpus / f"{options.part}.jsonl.zst", held_out, options.windows, options)
    shown = ["--calibration", learn, "--samples", options.samples, "--sequence-length", options.length]
    ppl = ["eval", "ppl", "--data", held_out, "--sequence-length", options.length]
    model, mask = options.model, folder / "prior.mask"
    row("dense", steelyard(*ppl, model))
    if options.prior is not None:
        mask = options.prior
    else:
        steelyard("prune", model, folder / "sparsegpt", "--method", "sparsegpt", *shown)
        row("sparsegpt", steelyard(*ppl, folder / "sparsegpt"))
        steelyard("prune", model, mask, "--method", "sparsegpt", "--save", "mask", *shown)
        row("sparsegpt --no-update-weights", steelyard(*ppl, model, "--mask", mask))
    data = options.tokens or tokenized(options, learn, folder / "learn")
    kept = ("loss", "mask_max_probability", "mask_from_prior", "distill_loss", "zeros", "tokens_per_second")
    for number, words in enumerate(options.tries or TRIES[options.method]):
        run, seconds = trained(options, data, options.method, mask, words.split(), folder / f"run-{number}")
        last = [record for record in run.metrics() if "loss" in record][-1]
        found = {key: last[key] for key in kept if key in last}
        row(f"{options.method}, {words}", steelyard(*ppl, run.path), seconds=round(seconds, 1), **found)
    if options.method == "joint" and options.prior is None:
        baselines(options, data, mask, ppl, folder)
    for method in ("wanda", "hessian", "magnitude") if options.method == "learned" and options.prior is None else ():
        steelyard("prune", model, folder / f"{method}.mask", "--method", method, "--save", "mask", *shown)
        row(method, steelyard(*ppl, model, "--mask", folder / f"{method}.mask"))


def excerpt(part: Path, to: Path, windows: int, options: argparse.Namespace) -> None:
    """Write the first documents of a part that fill at least these windows, at no more than six bytes a token."""
    left = 6 * windows * options.length
    with reading(part, "zst") as lines, to.open("wb") as out:
        while left > 0 and (line := lines.readline()):
            left -= out.write(json.loads(line)["text"].encode() + b"\n\n")


def tokenized(options: argparse.Namespace, learn: Path, prefix: Path) -> str:
    """Token files of the training text."""
    text = ["--input", learn, "--document", "file"]
    if options.corpus is not None:
        text = ["--input", options.corpus / "train.jsonl.zst"]
    steelyard("data", "tokenize", *text, "--tokenizer", options.model, "--output-prefix", prefix)
    return f"{prefix}_text_document"


def baselines(options: argparse.Namespace, data: str, mask: Path, ppl: list[Any], folder: Path) -> None:
    """Rows for what joint training is compared with, after as many steps in total."""
    dense, _ = trained(options, data, "dense", mask, ["optim.eps=1e-8"], folder / "dense")
    row("dense, trained on the same tokens", steelyard(*ppl, dense.path))
    half = [f"train.steps={max(1, options.steps // 2)}", "optim.eps=1e-8"]
    masks, _ = trained(options, data, "learned", mask, half, folder / "masks")
    row("learned masks, half of the steps", steelyard(*ppl, masks.path))
    fixed, _ = trained(options, data, "fixed", mask, [*half, f"train.init_from={masks.path}"], folder / "fixed")
    row("the same, fine-tuned in the other half", steelyard(*ppl, fixed.path))


def trained(
    options: argparse.Namespace, prefix: str, method: str, mask: Path, words: list[str], path: Path
) -> tuple[Any, float]:
    """Run a method, or plain training ("dense"), with the overrides in `words`. Masks are learned as published."""
    small = options.tiny
    sections = {
        "learned": {"sparsity": {"method": "learned", "prior": str(mask), "learning_rate_multiplier": 10.0}},
        "joint": {"sparsity": {"method": "joint"}},
        "fixed": {"sparsity": {"method": "fixed"}},
        "dense": {},
    }
    values = {
        "name": "masks",
        "model": open_source(options.model).config.model_dump(exclude_none=True),
        "data": {
            "train": prefix, "split": "100,0,0", "sequence_length": options.length, "tokenizer": str(options.model)
        },
        "train": {
            "init_from": options.model, "steps": options.steps, "global_batch": 2 if small else 16,
            "micro_batch": 1 if small else options.micro_batch,
            "precision": "bf16" if torch.cuda.is_available() else "fp32",
        },
        "optim": {"learning_rate": 5e-5, "min_learning_rate": 5e-6},
        "log": {"every": max(1, options.steps // 10)},
        "checkpoint": {"every": 0},
    }  # fmt: skip
    recipe = load_recipe(values | sections[method], words)
    begun = time.monotonic()
    run = training.run(recipe, path, sparsity_extension.extension(recipe))
    return run, time.monotonic() - begun


def steelyard(*words: object) -> dict[str, Any]:
    """Run a command, and return its JSON result."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            cli.main([*map(str, words), "--json"])
        except SystemExit as ended:
            if ended.code:
                raise
    result: dict[str, Any] = json.loads(out.getvalue())
    return result


def row(what: str, result: dict[str, Any], **more: Any) -> None:
    """Print a measurement; the first is of the dense model."""
    DENSE.append(result["perplexity"])
    reported = {"what": what, "perplexity": round(result["perplexity"], 3)}
    print(json.dumps(reported | {"times_dense": round(result["perplexity"] / DENSE[0], 4), **more}), flush=True)


if __name__ == "__main__":
    main()
