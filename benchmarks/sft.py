"""Supervised fine-tuning, compared with TRL's SFTTrainer on the same model and text, in one run.

    python benchmarks/sft.py --shape smollm2-135m [--length 2048] [--steps 30] [--micro-batch 8] [--tiny]

Random weights of a shipped config, and synthetic conversations with the length distribution of chat data. TRL runs with
the settings that its documentation recommends for speed: bf16, best-fit packing, fused kernels if `liger_kernel` is
installed, flash attention if `flash_attn` is, compiled and not; the best of these counts. Both count tokens without
padding. The first steps, which compile, do not count. In the others neither synchronizes with the GPU, except that
steelyard does at every tenth step, for its log line. `--tiny` is a smoke test on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.formats.hf_config import config_to_hf
from steelyard.cli.sft import recipe_for
from steelyard.core.recipe import load_recipe
from steelyard.finetuning import sft
from steelyard.finetuning.templates import NAMED
from steelyard.model.attention import has_varlen_attention
from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe
from steelyard.training import device as devices

WARM_UP = 10
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "with", "on", "be", "this", "had", "not")
TINY = ["model.layers=2", "model.hidden=64", "model.heads=4", "model.kv_heads=2", "model.ffn=128", "model.vocab=600"]


def main() -> None:
    """Measure both, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--precision", default="bf16", help="ours; TRL has bf16")
    parser.add_argument("--alone", action="store_true", help="do not run TRL")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="run TRL only without torch.compile")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.steps % WARM_UP:
        parser.error(f"--steps must be a multiple of {WARM_UP}")
    folder = Path(tempfile.mkdtemp(prefix="steelyard-sft-"))
    try:
        talks = made_up(options.micro_batch * (options.steps + WARM_UP) * 14, folder / "talks.jsonl", options.tiny)
        base = a_model(options, folder)
        row("steelyard", options, ours(base, folder, talks, options))
        if options.alone or find_spec("trl") is None:
            row("trl", options, {"left_out": "--alone" if options.alone else "not installed"})
            return
        attentions = ["sdpa", *(["flash_attention_2"] if find_spec("flash_attn") else [])]
        tried = []
        compiled_too = [False, True] if on_gpu() and options.compile else [False]
        for attention, compiled in itertools.product(reversed(attentions), compiled_too):
            tried.append(theirs(base, folder, talks, options, attention, compiled))
            row("a try of trl", options, tried[-1])
        row("trl", options, max(tried, key=lambda found: float(found["tokens_per_second"])))
    finally:
        shutil.rmtree(folder)


def row(what: str, options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print a measurement, and free the GPU's memory for the next."""
    print(json.dumps({"what": what, "shape": options.shape, **found}), flush=True)
    if on_gpu():
        torch.cuda.empty_cache()


def on_gpu() -> bool:
    """Whether a GPU is available."""
    return torch.cuda.is_available()


def made_up(number: int, path: Path, tiny: bool) -> list[dict[str, Any]]:
    """Conversations with the length distribution of chat data: many short, some long."""
    chance, rows = random.Random(0), []
    for _ in range(number):
        size = int(chance.lognormvariate(2.0 if tiny else 4.6, 0.9)) + 2
        said = [" ".join(chance.choices(WORDS, k=max(1, size // 2))) for _ in range(2)]
        rows.append({"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant"), said, strict=True)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def a_model(options: argparse.Namespace, folder: Path) -> Path:
    """Random weights as a Hugging Face folder, with a tokenizer."""
    import transformers

    base = folder / "base"
    lines = [json.loads(line)["messages"][0]["content"] for line in (folder / "talks.jsonl").open()][:2000]
    train_byte_bpe(lines, 600, ["<|im_start|>", "<|im_end|>"]).save(base)
    shape = load_recipe(options.shape, [*TINY] if options.tiny else []).model
    (base / "config.json").write_text(json.dumps(config_to_hf(shape, torch.bfloat16, {})))
    config = transformers.AutoConfig.from_pretrained(base)
    with torch.device("cuda" if on_gpu() else "cpu"):
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    return base


def ours(base: Path, folder: Path, talks: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of `steelyard sft`, from the records of its run."""
    precision = options.precision if on_gpu() else "fp32"
    words = [
        "finetune.template=chatml", f"data.sequence_length={options.length}",
        f"train.micro_batch={options.micro_batch}", f"train.global_batch={options.micro_batch}",
        f"train.steps={options.steps + WARM_UP}", f"log.every={WARM_UP}",
        f"train.precision={precision}", "finetune.valid_share=0.0", "eval.every=0", "checkpoint.every=0",
        "checkpoint.at_end=false",
    ]  # fmt: skip
    prepared = sft.prepare(recipe_for(None, words, str(base), [str(folder / "talks.jsonl")]))
    run = sft.run(prepared, folder / "run")
    timed = [record["seconds"] for record in run.metrics() if record.get("step", 0) > WARM_UP and "loss" in record]
    seconds = WARM_UP * sum(timed)
    rows = prepared.training.order[WARM_UP * options.micro_batch :]
    tokens = sum(prepared.training.conversations[i].length for row in rows for i in prepared.training.rows[row])
    shape, device = prepared.recipe.model, devices.choose(prepared.recipe)
    is_flash = has_varlen_attention(device, devices.DTYPES[precision], shape.head_dim)
    return {
        "tokens_per_second": round(tokens / seconds),
        "precision": precision,
        "packing": round(prepared.training.efficiency, 4),
        "attention": "flash, by bounds" if is_flash else "dense mask",
    }


def theirs(
    base: Path, folder: Path, talks: list[Any], options: argparse.Namespace, attention: str, compiled: bool
) -> dict[str, Any]:
    """Tokens per second of TRL's trainer."""
    import datasets
    import transformers
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template, tokenizer.pad_token = NAMED["chatml"], "<|im_end|>"
    config = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_steps=options.steps + WARM_UP, packing=True,
        per_device_train_batch_size=options.micro_batch, max_length=options.length, assistant_only_loss=True,
        bf16=on_gpu(), use_cpu=not on_gpu(), report_to=[], save_strategy="no", logging_steps=1000,
        torch_compile=compiled,
        gradient_checkpointing=False, use_liger_kernel=find_spec("liger_kernel") is not None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation=attention)
    clock = _Clock()
    trainer = trl.SFTTrainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(talks), processing_class=tokenizer,
        callbacks=[clock],
    )  # fmt: skip
    lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
    trainer.train()
    per_step = sum(lengths) / len(lengths) * options.micro_batch
    return {
        "tokens_per_second": round(per_step * options.steps / (clock.ends[1] - clock.ends[0])),
        "packing": round(sum(lengths) / len(lengths) / options.length, 4),
        "attention": attention,
        "compiled": compiled,
    }


def _Clock() -> Any:
    import transformers

    class Clock(transformers.TrainerCallback):
        """Records the times after the warm-up and after the last step."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step in (WARM_UP, state.max_steps):
                if on_gpu():
                    torch.cuda.synchronize()
                self.ends.append(time.perf_counter())

    return Clock()


if __name__ == "__main__":
    main()
