"""The loss curve of TRL's trainer on the same model, data, template and settings.

All conversations are in every step, so that the order in which either side shuffles them does not matter.
"""

import numpy as np
import pytest
import torch

from steelyard.finetuning import sft
from steelyard.finetuning.templates import NAMED
from tests.finetuning.conftest import recipe_of, talks, write_jsonl

STEPS, NUMBER = 5, 8
WORDS = [
    f"train.steps={STEPS}", f"train.global_batch={NUMBER}", "train.micro_batch=2", "finetune.packing=false",
    "finetune.valid_share=0.0", "optim.learning_rate=1e-3", "optim.weight_decay=0.0", "optim.betas=[0.9, 0.999]",
    "optim.eps=1e-8", "optim.clip=1.0",
]  # fmt: skip


def theirs(base, rows, folder, **options):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = NAMED["chatml"]
    tokenizer.pad_token = "<|im_end|>"
    config = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, fp16=False, max_length=None, packing=False,
        gradient_checkpointing=False, optim="adamw_torch", seed=0, **options,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    trainer = trl.SFTTrainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    return [(record["loss"], record["grad_norm"]) for record in trainer.state.log_history if "grad_norm" in record]


def ours(base, *words):
    from pathlib import Path

    run = sft.run(sft.prepare(recipe_of(base, *WORDS, *words)), Path("ours"))
    return [(record["loss"], record["grad_norm"]) for record in run.metrics() if "loss" in record]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_answers_are_learned_as_trl_learns_them(bases, place, family):
    rows = talks(NUMBER, seed=3)
    write_jsonl(place / "talks.jsonl", rows)
    expected = theirs(bases / family, rows, place, assistant_only_loss=True)
    assert np.allclose(ours(bases / family), expected, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("completion_only", [True, False])
def test_completions_are_learned_as_trl_learns_them(bases, place, completion_only):
    rows = [
        {"prompt": row["messages"][0]["content"], "completion": " " + row["messages"][1]["content"]}
        for row in talks(NUMBER, seed=4)
    ]
    write_jsonl(place / "talks.jsonl", rows)
    expected = theirs(bases / "llama", rows, place, completion_only_loss=completion_only)
    loss = "completion" if completion_only else "all"
    assert np.allclose(ours(bases / "llama", "finetune.template=plain", f"finetune.loss={loss}"), expected, rtol=2e-4)
