"""Preferences: TRL's curve, the closed form at the first step, exact resuming, and what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.finetuning import preview, sft
from steelyard.finetuning.templates import NAMED
from tests.finetuning.conftest import recipe_of, talks, write_jsonl

NUMBER, STEPS = 4, 4
WORDS = [
    "finetune.dpo.beta=0.3", f"train.steps={STEPS}", f"train.global_batch={2 * NUMBER}", "train.micro_batch=2",
    "finetune.valid_share=0.0", "optim.learning_rate=1e-3", "optim.weight_decay=0.0", "optim.betas=[0.9, 0.999]",
    "optim.eps=1e-8", "checkpoint.every=1",
]  # fmt: skip


def pairs(number, seed=0):
    rows = talks(number, seed)
    return [
        {
            "prompt": [row["messages"][0]],
            "chosen": [row["messages"][1]],
            "rejected": [{"role": "assistant", "content": row["messages"][1]["content"][::-1] + " no"}],
        }
        for row in rows
    ]


def preferred(base, *words, run="run"):
    return sft.run(sft.prepare(recipe_of(base, *WORDS, *words)), Path(run))


def curve(run, *keys):
    return [tuple(record[key] for key in keys) for record in run.metrics() if "loss" in record]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_first_loss_is_that_of_no_preference_and_then_it_falls(bases, place, family):
    write_jsonl(place / "talks.jsonl", pairs(NUMBER))
    run = preferred(bases / family)
    losses = [loss for (loss,) in curve(run, "loss")]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert losses == sorted(losses, reverse=True)
    assert run.metrics()[-1]["reward_accuracy"] == 1


@pytest.mark.slow
def test_a_run_goes_on_with_the_reference_it_had(bases, place):
    write_jsonl(place / "talks.jsonl", pairs(12))
    words = ["finetune.valid_share=0.3", "eval.every=1"]
    whole = preferred(bases / "llama", *words, run="whole")
    preferred(bases / "llama", *words, "train.steps=2", run="parts")
    parts = preferred(bases / "llama", *words, run="parts")
    assert curve(whole, "loss", "grad_norm", "reward_margin") == curve(parts, "loss", "grad_norm", "reward_margin")
    ends = [[record["valid_loss"] for record in run.metrics() if "valid_loss" in record] for run in (whole, parts)]
    assert ends[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert ends[0][-1] == ends[1][-1] < ends[0][0]


def test_a_preview_shows_both_answers_and_what_of_them_is_learned(bases, place):
    write_jsonl(place / "talks.jsonl", pairs(NUMBER))
    shown = preview.preview(sft.prepare(recipe_of(bases / "llama", *WORDS)), 1)
    assert shown.titles == ["pair 1, chosen", "pair 1, rejected"]
    row = pairs(1)[0]
    for side, talk in zip(("chosen", "rejected"), shown.samples, strict=True):
        assert [text for text, learned in talk if learned] == [f"{row[side][0]['content']}<|im_end|>"]
    assert (shown.figures["pairs"], shown.figures["rows"]) == (NUMBER, 2 * NUMBER)
    preview.write_html(shown, place / "page.html")
    assert "pair 1, rejected" in preview.as_text(shown)


@pytest.mark.slow
def test_preferences_are_learned_as_trl_learns_them(bases, place):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import transformers

    rows = pairs(NUMBER)
    write_jsonl(place / "talks.jsonl", rows)
    tokenizer = transformers.AutoTokenizer.from_pretrained(bases / "llama")
    # TRL also learns the newline that chatml has behind an answer; a template without it is learned alike.
    tokenizer.chat_template, tokenizer.pad_token = NAMED["chatml"].replace("{{ '\n' }}", ""), "<|im_end|>"
    (place / "chat.jinja").write_text(tokenizer.chat_template)
    config = trl.DPOConfig(
        output_dir=str(place / "trl"), max_steps=STEPS, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, bf16=False, fp16=False, beta=0.3, max_length=None,
        gradient_checkpointing=False, optim="adamw_torch",
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float32)
    trainer = trl.DPOTrainer(
        model=model, args=config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    trainer.train()
    expected = [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "grad_norm" in each]
    ours = curve(preferred(bases / "llama", "finetune.template=chat.jinja"), "loss", "grad_norm")
    assert np.allclose(ours, expected, rtol=1e-4)


def test_torn_pairs_and_rows_that_are_none_are_refused(bases, place):
    write_jsonl(place / "talks.jsonl", pairs(NUMBER))
    with pytest.raises(UserError, match="cannot be split into whole pairs"):
        sft.prepare(recipe_of(bases / "llama", *WORDS, "train.global_batch=3", "train.micro_batch=1"))
    with pytest.raises(UserError, match=r"whole pairs \(two rows each\) on 2"):
        sft.prepare(recipe_of(bases / "llama", *WORDS, "train.global_batch=6", "train.micro_batch=1"), ranks=2)
    with pytest.raises(UserError, match="these rows are preferences"):
        sft.prepare(recipe_of(bases / "llama"))
    write_jsonl(place / "talks.jsonl", talks(NUMBER))
    with pytest.raises(UserError, match="the keys chosen and rejected"):
        sft.prepare(recipe_of(bases / "llama", *WORDS))
