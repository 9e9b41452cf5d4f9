"""Perplexity against transformers' own and against plain code, on one rank and on several."""

import json
import math

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from steelyard import training
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.evaluate.perplexity import PerplexityRequest, as_text, perplexity
from steelyard.evaluate.windows import plan
from steelyard.text import tokenizer as tokenizers
from steelyard.tokens.preprocess import tokenize
from steelyard.tokens.tokenize_job import TokenizeJob
from tests.conftest import write_documents
from tests.evaluate.conftest import TEXT, steelyard

LENGTH = 48


@pytest.fixture(scope="module")
def theirs(models):
    import transformers

    folder = models / "llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    return model, torch.tensor(transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"])


def losses_of(model, ids):
    """The loss of every token but the first, given those before it."""
    with torch.inference_mode():
        logits = model(ids[None]).logits[0, :-1].double()
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")


def measured(models, *, family="llama", data=None, **options):
    return perplexity(PerplexityRequest(str(models / family), str(data or models / "text.txt"), **options))


def by_windows(model, ids, length):
    """The way of the GPTQ and SparseGPT papers: windows on their own, the mean of their means."""
    windows = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
    with torch.inference_mode():
        return math.exp(torch.stack([model(w[None], labels=w[None]).loss.double() for w in windows]).mean().item())


def test_the_hf_protocol_is_what_transformers_computes(models, theirs):
    model, ids = theirs
    result = measured(models, length=LENGTH)
    assert result["perplexity"] == pytest.approx(by_windows(model, ids, LENGTH), rel=1e-4)
    assert result["tokens"] == len(ids)
    assert result["dropped"] == len(ids) % LENGTH
    assert "not overlapping" in as_text(result)


@pytest.mark.parametrize("stride", [7, 24, 47])
def test_a_stride_counts_every_token_once_with_all_it_may_see(models, theirs, stride):
    model, ids = theirs
    total, reached = 0.0, 1
    for start in range(0, len(ids), stride):
        end = min(start + LENGTH, len(ids))
        total += losses_of(model, ids[start:end])[reached - end :].sum().item()
        reached = end
        if end == len(ids):
            break
    result = measured(models, length=LENGTH, stride=stride)
    assert result["loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert result["predicted"] == len(ids) - 1


@pytest.mark.parametrize("stride", [None, 16, 20])
def test_the_megatron_protocol_is_its_dataset_read_plainly(models, theirs, stride):
    model, ids = theirs
    step, targets = stride or LENGTH, len(ids) - 1
    count = max(math.ceil(max(targets - step, 0) / step) + 1, 1)
    total = 0.0
    for number in range(count):
        row = ids[number * step : number * step + LENGTH + 1]
        mask = torch.ones(LENGTH)
        mask[len(row) - 1 :] = 0
        if number and step != LENGTH:
            mask[: LENGTH - step] = 0
        with torch.inference_mode():
            logits = model(row[None, :-1]).logits[0].double() if len(row) > 1 else torch.zeros(0, 1)
        losses = (
            torch.nn.functional.cross_entropy(logits, row[1:], reduction="none") if len(row) > 1 else torch.zeros(0)
        )
        total += (losses * mask[: len(losses)]).sum().item()
    result = measured(models, length=LENGTH, stride=stride, protocol="megatron")
    assert result["loss"] == pytest.approx(total / targets, rel=1e-5)
    assert result["predicted"] == targets


@pytest.mark.parametrize(("protocol", "stride"), [("hf", 5), ("megatron", None), ("megatron", 5), ("megatron", 16)])
@pytest.mark.parametrize("tokens", [2, 3, 15, 16, 17, 18, 33, 97])
def test_every_token_but_the_first_is_predicted_once(tokens, protocol, stride):
    predicted = [
        place
        for window in plan(tokens, 16, stride, protocol).windows
        for place in range(window.end + 1 - window.counted, window.end + 1)
    ]
    assert predicted == list(range(1, tokens))


def test_a_gpt_is_measured_within_its_positions(models):
    assert "of 64 tokens" in measured(models, family="gpt")["protocol"]["windows"]
    with pytest.raises(UserError, match="64 positions"):
        measured(models, family="gpt", length=65)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"length": 48, "stride": 49}, "skips tokens"), ({"length": 100_000}, "do not fill one window")],
)
def test_what_cannot_be_measured_is_refused(models, options, message):
    with pytest.raises(UserError, match=message):
        measured(models, **options)


def test_token_files_and_their_text_give_the_same(models, tokenizer, tmp_path):
    ids = tokenizer.encode(TEXT)
    write_documents(tmp_path / "tokens", [ids[:1000], ids[1000:]], tokenizer.vocab_size)
    from_files = measured(models, data=tmp_path / "tokens", length=LENGTH)
    assert from_files["loss"] == measured(models, length=LENGTH)["loss"]
    write_documents(tmp_path / "wrong", [np.array([1, 2, 400])], 500)
    with pytest.raises(UserError, match="the id 400"):
        measured(models, data=tmp_path / "wrong", length=2)


@pytest.mark.parametrize("layout", [["--nproc", "2"], ["--nproc", "2", "--tensor", "2"]])
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_more_ranks_find_the_same_perplexity(models, family, layout):
    words = ["eval", "ppl", models / family, "--data", models / "text.txt", "--sequence-length", LENGTH, "--json"]
    done = steelyard(*words, *layout)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ranks"] == 2
    assert result["loss"] == pytest.approx(measured(models, family=family, length=LENGTH)["loss"], rel=1e-6)


def test_a_tensor_degree_that_does_not_fit_is_told_once(models):
    words = ["eval", "ppl", models / "llama", "--data", models / "text.txt", "--sequence-length", LENGTH]
    done = steelyard(*words, "--nproc", 4, "--tensor", 4)
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "kv_heads" in done.stderr


def test_wikitext2_is_the_raw_test_split_joined_by_two_newlines(models, hub, tmp_path, theirs):
    rows = [f"{line}\n" for line in TEXT.splitlines()[:100]] + ["", " = Title = \n"]
    table = pyarrow.table({"text": rows})
    parquet.write_table(table, tmp_path / "test.parquet")
    hub.add("datasets", "Salesforce/wikitext", "wikitext-2-raw-v1/test-00000-of-00001.parquet",
            (tmp_path / "test.parquet").read_bytes())  # fmt: skip
    hub.add("datasets", "Salesforce/wikitext", "wikitext-2-raw-v1/train-00000-of-00001.parquet", b"not wanted")
    result = measured(models, data="wikitext2", length=LENGTH)
    assert result["tokens"] == len(tokenizers.load_tokenizer(models / "llama").encode("\n\n".join(rows)))
    assert result["protocol"]["joined"] == "102 rows joined by two newlines"
    assert hub.fetched == ["wikitext-2-raw-v1/test-00000-of-00001.parquet"]


@pytest.mark.parametrize(("trained_on", "remarked"), [("wikitext-103-v1", True), ("wikitext-103-raw-v1", False)])
def test_a_run_trained_on_the_other_form_is_remarked_on(in_workplace, tokenizer, capsys, trained_on, remarked):
    tokenizer.save(in_workplace.path / "tok")
    (in_workplace.path / f"{trained_on}.train.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    (in_workplace.path / "wikitext-2-raw-v1.test.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    tokenize(TokenizeJob((f"{trained_on}.train.jsonl",), "tok", "wiki"))
    overrides = ["data.tokenizer=tok", "data.train=wiki_text_document", "data.split=1,0,0", "model.vocab=400"]
    run = training.run(load_recipe("tiny.toml", [*overrides, "train.steps=1"]))
    result = perplexity(PerplexityRequest(str(run.path), "wikitext-2-raw-v1.test.jsonl"))
    assert ("was trained on the tokenised form" in capsys.readouterr().err) == remarked
    assert ("remark" in result["protocol"]) == remarked


@pytest.mark.slow
def test_the_real_model_scores_what_transformers_says(smollm2, tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    import transformers

    text = TEXT[:5000]
    (tmp_path / "text.txt").write_text(text)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    )
    vocabulary = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ids = torch.tensor(vocabulary(text)["input_ids"])
    result = perplexity(PerplexityRequest(str(smollm2), str(tmp_path / "text.txt"), length=512))
    assert result["tokens"] == len(ids)
    assert result["perplexity"] == pytest.approx(by_windows(model, ids, 512), rel=1e-3)


def test_unknown_tokens_are_counted_and_many_are_refused(models, tmp_path):
    options = tokenizers.SentencePieceOptions(character_coverage=1.0)
    sentencepiece = tokenizers.train_sentencepiece(TEXT.splitlines(), 200, options)
    named = sentencepiece.write(tmp_path / "english")[0]
    (tmp_path / "text.txt").write_text(TEXT[:2000] + "猫 " * 5)
    assert measured(models, data=tmp_path / "text.txt", tokenizer=named)["unknown"] == 5
    (tmp_path / "text.txt").write_text("the 猫 " * 50)
    with pytest.raises(UserError, match="are unknown to the tokenizer"):
        measured(models, data=tmp_path / "text.txt", tokenizer=named)
    result = measured(models, data=tmp_path / "text.txt", tokenizer=named, allow_unknown=True)
    assert result["unknown"] == 50
    assert "and 50 unknown" in as_text(result)
