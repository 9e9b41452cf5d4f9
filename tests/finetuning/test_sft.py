"""Tuning runs: what is the same however it is computed, what comes out, and what is refused."""

import json

import numpy as np
import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.core.run import Run
from steelyard.finetuning import preview, sft, sft_dataset
from steelyard.training import engine
from tests.finetuning.conftest import recipe_of, talks, write_jsonl


def records(run: Run, key: str) -> list[float]:
    return [record[key] for record in run.metrics() if key in record]


def tuned(base, *words, run="run"):
    from pathlib import Path

    prepared = sft.prepare(recipe_of(base, *words))
    return prepared, sft.run(prepared, Path(run))


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_packed_rows_give_the_loss_and_gradient_of_single_ones(bases, place, family):
    first = []
    for name, packing in (("packed", "true"), ("single", "false")):
        prepared = sft.prepare(recipe_of(bases / family, f"finetune.packing={packing}", "finetune.valid_share=0.0"))
        rows = len(prepared.training.rows)
        words = [
            f"finetune.packing={packing}",
            "finetune.valid_share=0.0",
            "train.steps=2",
            f"train.global_batch={rows}",
        ]
        _, run = tuned(bases / family, *words, run=name)
        first.append((rows, records(run, "loss"), records(run, "grad_norm")))
    (packed, *a), (single, *b) = first
    assert packed < single
    assert np.allclose(a, b, rtol=2e-5)


def test_conversations_named_by_where_they_begin_are_learned_alike(bases, place, monkeypatch):
    words = ["train.steps=2", "train.global_batch=4", "train.micro_batch=2", "eval.every=1", "finetune.valid_share=0.2"]
    _, usual = tuned(bases / "llama", *words, run="usual")
    monkeypatch.setattr(engine, "has_varlen_attention", lambda *_: True)  # On a CPU its twin, the dense mask, is used.
    _, other = tuned(bases / "llama", *words, run="other")
    for key in ("loss", "grad_norm", "valid_loss"):
        assert records(other, key) == pytest.approx(records(usual, key), rel=1e-6)


def test_micro_batches_do_not_change_the_gradient(bases, place):
    found = []
    for micro in (1, 2, 4):
        _, run = tuned(
            bases / "llama", "train.steps=3", "train.global_batch=4", f"train.micro_batch={micro}", run=f"m{micro}"
        )
        found.append(records(run, "loss") + records(run, "grad_norm") + records(run, "valid_loss"))
    assert np.allclose(found[0], found[1], rtol=2e-5)
    assert np.allclose(found[0], found[2], rtol=2e-5)


def test_the_loss_is_what_transformers_computes_on_the_same_tokens(bases, place):
    import transformers

    prepared, run = tuned(bases / "llama", "train.steps=1", "train.global_batch=4", "finetune.valid_share=0.0")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(bases / "llama", dtype=torch.float32)
    total, count = 0.0, 0
    for row in prepared.training.order[:4]:
        for index in prepared.training.rows[row]:
            sample = prepared.training.conversations[index]
            ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
            labels = ids.where(torch.from_numpy(sample.loss_mask)[None], -100)
            learned = int(sample.loss_mask[1:].sum())
            total += theirs(ids, labels=labels).loss.item() * learned
            count += learned
    assert count == prepared.training.counts[:4].sum()
    assert records(run, "loss")[0] == pytest.approx(total / count, rel=1e-5)


def test_a_run_goes_on_to_the_bit(bases, place):
    words = ["train.steps=6", "train.global_batch=2", "checkpoint.every=1"]
    _, whole = tuned(bases / "llama", *words, run="whole")
    tuned(bases / "llama", "train.steps=3", *words[1:], run="parts")
    _, parts = tuned(bases / "llama", *words, run="parts")
    assert records(whole, "loss") == records(parts, "loss")
    assert records(whole, "valid_loss")[-1] == records(parts, "valid_loss")[-1]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_what_comes_out_loads_in_transformers_and_speaks_the_template(bases, place, family):
    import transformers

    prepared, run = tuned(bases / family, "train.steps=3", "train.global_batch=2", "optim.learning_rate=0.01")
    sft.export(prepared, run, place / "out")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(place / "out", output_loading_info=True)
    assert not any(report.values())
    assert theirs.config.max_position_embeddings == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(place / "out")
    said = talks(1)[0]["messages"]
    ids = tokenizer.apply_chat_template(said, return_dict=False)
    assert ids == prepared.training.conversations[0].ids.tolist() or len(ids) > 4
    before = transformers.AutoModelForCausalLM.from_pretrained(bases / family)
    with torch.no_grad():
        moved = theirs(torch.tensor([ids])).logits - before(torch.tensor([ids])).logits
    assert moved.abs().max() > 0.01


def test_encoding_is_kept_and_made_anew_when_anything_changes(bases, place):
    recipe = recipe_of(bases / "llama")
    first = sft.prepare(recipe).training
    [kept] = place.glob(".steelyard-*.npz")
    again = sft.prepare(recipe).training
    assert all((a.ids == b.ids).all() and (a.loss_mask == b.loss_mask).all()
               for a, b in zip(first.conversations, again.conversations, strict=True))  # fmt: skip
    sft.prepare(recipe_of(bases / "llama", "finetune.loss=all"))
    assert len(list(place.glob(".steelyard-*.npz"))) == 2
    kept.write_bytes(kept.read_bytes()[:100])
    assert len(sft.prepare(recipe).training.conversations) == len(first.conversations)
    write_jsonl(place / "talks.jsonl", talks(10))
    assert len(sft.prepare(recipe).training.conversations) == 9


def test_of_what_was_encoded_before_only_the_newest_few_are_kept(bases, place):
    for number in range(sft_dataset.CACHES_TO_KEEP + 3):
        sft.prepare(recipe_of(bases / "llama", f"finetune.system=Be {number}."))
    kept = set(place.glob(sft_dataset.CACHE_FILES))
    assert len(kept) == sft_dataset.CACHES_TO_KEEP
    sft.prepare(recipe_of(bases / "llama", f"finetune.system=Be {sft_dataset.CACHES_TO_KEEP + 2}."))
    assert set(place.glob(sft_dataset.CACHE_FILES)) == kept


def test_a_conversation_that_the_template_has_no_place_for_is_named_or_counted(bases, place):
    called = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {}}]}
    rows = talks(3)
    rows[1]["messages"].append(called)
    write_jsonl(place / "talks.jsonl", rows)
    with pytest.raises(UserError, match="does not use tool_calls") as refused:
        sft.prepare(recipe_of(bases / "llama"))
    assert "talks.jsonl:2" in str(refused.value.where)
    dropped = sft.prepare(recipe_of(bases / "llama", "finetune.bad_rows=drop", "finetune.valid_share=0.0"))
    assert dropped.stats.counts["bad"] == 1
    assert preview.preview(dropped, 3).titles == ["conversation 1", "conversation 3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["finetune.template=nothing"], "unknown chat template nothing"),
        (["finetune.format=odd"], "unknown finetune.format odd"),
        (["data.sequence_length=8", "finetune.overlong=drop"], "has no row to train on"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(bases, place, words, message):
    with pytest.raises(UserError, match=message):
        sft.prepare(recipe_of(bases / "llama", *words))


def test_files_that_are_not_there_are_named(bases, place):
    with pytest.raises(UserError, match=r"there is no file nowhere\.jsonl"):
        sft.prepare(recipe_of(bases / "llama", data="nowhere.jsonl"))


def test_data_that_changed_is_not_gone_on_with(bases, place):
    tuned(bases / "llama", "train.steps=2", "train.global_batch=2")
    write_jsonl(place / "talks.jsonl", talks(30, seed=9))
    with pytest.raises(UserError, match=r"finetune\.rows"):
        tuned(bases / "llama", "train.steps=4", "train.global_batch=2")


def test_a_tuned_model_stops_where_its_answers_end(place, bases, capsys):
    prepared, run = tuned(bases / "llama", "train.steps=1")
    sft.export(prepared, run, place / "out")
    ends = json.loads((place / "out/generation_config.json").read_text())["eos_token_id"]
    assert prepared.tokenizer.encode("<|im_end|>")[0] in ends
    assert "not single tokens" not in capsys.readouterr().err
    sft.prepare(recipe_of(bases / "llama", "finetune.template=llama3", "data.sequence_length=256"))
    assert "<|eot_id|>" in capsys.readouterr().err


def test_a_list_in_one_json_file_is_read_like_a_row_a_line(place, bases):
    rows = talks(8)
    (place / "rows.json").write_text(json.dumps(rows, indent=1))
    write_jsonl(place / "rows.jsonl", rows)
    listed, lined = (sft.prepare(recipe_of(bases / "llama", data=f"rows.{kind}")) for kind in ("json", "jsonl"))
    assert listed.recipe.finetune.rows == lined.recipe.finetune.rows


def test_documents_of_pretraining_do_not_undo_packing(bases, place):
    words = ["train.steps=1", "train.global_batch=4"]
    _, plain = tuned(bases / "llama", *words, run="plain")
    _, other = tuned(bases / "llama", *words, "data.mask_documents=true", "data.end_of_document=5", run="other")
    assert records(plain, "loss") == records(other, "loss")


def test_a_blank_line_is_no_row_and_a_stored_truncation_is_not_obeyed(bases, place, tmp_path):
    import shutil

    before = sft.prepare(recipe_of(bases / "llama"))
    shutil.copytree(bases / "llama", place / "cut")
    stored = json.loads((place / "cut/tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    (place / "cut/tokenizer.json").write_text(json.dumps(stored))
    (place / "talks.jsonl").write_text((place / "talks.jsonl").read_text() + "\n\n")
    after = sft.prepare(recipe_of(place / "cut"))
    assert after.recipe.finetune.rows == before.recipe.finetune.rows


@pytest.mark.parametrize("template", ["alpaca", "llama2"])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_transformers_reads_the_template_of_a_sentencepiece_model_as_it_was_learned(bases, place, kind, template):
    import shutil

    import transformers

    from steelyard.text.tokenizer.train_tokenizer import SentencePieceOptions, train_sentencepiece

    shutil.copytree(bases / "llama", place / "base", ignore=shutil.ignore_patterns("tokenizer*"))
    options = SentencePieceOptions(kind, byte_fallback=kind == "bpe")
    text = [json.dumps(row) for row in talks(40)] + ["### Instruction: Response: [INST] [/INST] <<SYS>> <</SYS>>"] * 40
    train_sentencepiece(text, 350 if kind == "bpe" else 80, options).save(place / "base")
    write_jsonl(place / "talks.jsonl", talks(4))
    words = ["train.steps=1", "train.global_batch=2", "finetune.valid_share=0.0", "data.sequence_length=200"]
    prepared, run = tuned(place / "base", f"finetune.template={template}", *words)
    sft.export(prepared, run)
    theirs = transformers.AutoTokenizer.from_pretrained(run.path / "hf")
    for row, ours in zip(talks(4), prepared.training.conversations, strict=True):
        assert theirs.apply_chat_template(row["messages"], return_dict=False) == ours.ids.tolist()


def test_a_tokenizer_of_another_vocabulary_is_told_before_the_run(bases, place):
    from steelyard.text.tokenizer.train_tokenizer import train_byte_bpe

    train_byte_bpe([json.dumps(row) for row in talks(40)], 700, [f"<{n}>" for n in range(300)]).save(place / "other")
    with pytest.raises(UserError, match=r"model\.vocab is 400"):
        sft.prepare(recipe_of(bases / "llama", "data.tokenizer=other"))
    assert not (place / "runs").exists()


def test_a_tokenizer_without_a_template_needs_one_named(bases, place):
    from steelyard.cli.sft import recipe_for

    with pytest.raises(UserError, match="has no chat template"):
        sft.prepare(recipe_for(None, [], str(bases / "llama"), ["talks.jsonl"]))


def test_the_preview_marks_what_is_learned(bases, place):
    shown = preview.preview(sft.prepare(recipe_of(bases / "llama")), 2)
    said = talks(1)[0]["messages"]
    assert [text for text, in_loss in shown.samples[0] if in_loss] == [
        f"{message['content']}<|im_end|>" for message in said if message["role"] == "assistant"
    ]
    assert shown.figures["loss_tokens"] + shown.figures["masked"] == shown.figures["tokens"]
    assert "«" in preview.as_text(shown)
    write_jsonl(place / "talks.jsonl", [{"prompt": "<b>", "completion": "<script>alert(1)</script>"}])
    shown = preview.preview(sft.prepare(recipe_of(bases / "llama", "finetune.valid_share=0.0")), 1)
    preview.write_html(shown, place / "page.html")
    assert "<script>" not in (place / "page.html").read_text()
    assert json.dumps(preview.as_result(shown))
