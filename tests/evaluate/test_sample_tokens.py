"""Token files of text that a model generates: rows decoded side by side, cut into documents, resumed after a kill."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from steelyard.core.errors import UserError
from steelyard.evaluate import generation, sample_tokens
from steelyard.evaluate.generation import Sampling
from steelyard.model import Batch
from steelyard.tokens.indexed_dataset import IndexedTokens
from tests.evaluate.conftest import steelyard

LENGTH, ROWS = 24, 5


@pytest.fixture
def writer(models):
    return generation.writer(models / "llama", device="cpu")


@pytest.fixture
def job(tmp_path, writer):
    start = (writer.tokenizer.end_of_document,)
    return sample_tokens.SampleJob(
        str(tmp_path / "own"), 3 * ROWS * LENGTH, LENGTH, ROWS, start, Sampling(LENGTH, 1.0, 0)
    )


def sampled(job, writer):
    sample_tokens.sample(job, writer, {"checkpoint": "llama"})
    return list(IndexedTokens(job.output("text")).documents())


def test_each_row_has_the_tokens_that_one_text_would_have(job, writer):
    greedy = replace(job, sampling=Sampling(LENGTH, 0.0))
    texts = sample_tokens.decode(writer.network, greedy, 0, writer.tokenizer.vocab_size)
    alone = list(generation.tokens(writer.network, job.start, greedy.sampling, writer.context, ()))
    assert texts.tolist() == [alone] * ROWS


def test_the_first_tokens_are_drawn_from_the_models_distribution(job, writer):
    many = replace(job, rows=4000, length=1)
    texts = sample_tokens.decode(writer.network, many, 0, writer.tokenizer.vocab_size)
    with torch.no_grad():
        chances_V = writer.network(Batch(torch.tensor([job.start])))[0, -1, : writer.tokenizer.vocab_size].softmax(-1)
    found_V = torch.bincount(texts[:, 0], minlength=len(chances_V)) / many.rows
    assert (found_V - chances_V).abs().max() < 5 * (0.25 / many.rows) ** 0.5
    likely = chances_V.argmax()
    assert (found_V[likely] - chances_V[likely]).abs() < 5 * (chances_V[likely] / many.rows) ** 0.5


@pytest.mark.parametrize("sampling", [Sampling(1, 1.0, 3), Sampling(1, 1.0, 0, 0.4), Sampling(1, 0.5, 3, 0.4)])
def test_top_k_and_top_p_keep_the_tokens_that_generation_keeps(sampling):
    generator, logits = torch.Generator().manual_seed(0), torch.tensor([1.0, 3.0, 2.5, 0.0, 2.0])
    rows = sample_tokens.choose(logits.expand(2000, -1), sampling, generator)
    ones = {generation._choose(logits, sampling, generator) for _ in range(500)}
    assert set(rows.tolist()) == ones
    assert len(ones) < 4


def test_documents_end_at_end_tokens_and_none_is_empty():
    text = np.array([7, 5, 5, 8, 9, 6, 1])
    assert sample_tokens.documents(text, {5, 6}, 5) == [[7, 5], [8, 9, 5], [1, 5]]
    assert sample_tokens.documents(np.array([5, 6]), {5, 6}, 5) == []


def test_a_job_that_ended_half_way_continues_with_the_same_tokens(job, writer, tmp_path, monkeypatch):
    whole = sampled(job, writer)
    assert sum(len(each) for each in whole) >= job.tokens
    assert all(each[-1] == writer.tokenizer.end_of_document for each in whole)
    assert len({tuple(each) for each in whole if len(each) > 8}) == sum(len(each) > 8 for each in whole), "a repetition"
    other = replace(job, prefix=str(tmp_path / "other"))
    decode, seen = sample_tokens.decode, []

    def failing(network, job, number, *others):
        seen.append(number)
        if len(seen) == 2:
            raise OSError("gone")
        return decode(network, job, number, *others)

    monkeypatch.setattr(sample_tokens, "decode", failing)
    with pytest.raises(OSError, match="gone"):
        sampled(other, writer)
    resumed = sampled(other, writer)
    assert seen == [0, 1, 1, 2]
    assert [each.tolist() for each in resumed] == [each.tolist() for each in whole]
    assert sorted(path.name for path in tmp_path.glob("other*")) == [
        "other.sample.json", "other_text_document.bin", "other_text_document.idx", "other_text_document.sums"
    ]  # fmt: skip
    sampled(other, writer)
    assert seen == [0, 1, 1, 2], "a finished job runs nothing"
    with pytest.raises(UserError, match=r"changed since: seed\n") as refused:
        sampled(replace(other, sampling=Sampling(LENGTH, 1.0, 0, seed=1)), writer)
    assert "--overwrite" in str(refused.value)


def test_the_command_writes_files_that_train(models, tmp_path):
    words = ["--tokens", 2000, "--length", 32, "--rows", 16, "--output-prefix", tmp_path / "own", "--device", "cpu"]
    done = steelyard("data", "sample", models / "llama", *words, "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["files"]["text"]
    assert made["tokens"] >= 2000
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        f"[model]\nfamily='llama'\nlayers=1\nhidden=32\nheads=4\nvocab=400\n[data]\ntrain='{made['prefix']}'\n"
        "sequence_length=16\nsplit='100,0,0'\n[train]\nsteps=2\nglobal_batch=2\nmicro_batch=2\ndevice='cpu'\n"
    )
    trained = steelyard("train", recipe, "--run", tmp_path / "run", env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert trained.returncode == 0, trained.stderr


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["--length", 64], ("context of 64", "--length 63")),
        (["--start", "the " * 100], ("the model's context 64", "a shorter --start")),
        (["--temperature", 0], ("--temperature 0: every text would be the same",)),
        (["--top-k", 1], ("--top-k 1: every text would be the same",)),
    ],
)
def test_what_cannot_be_sampled_is_refused_and_leaves_nothing(models, tmp_path, words, reported):
    given = ["--tokens", 100, "--output-prefix", tmp_path / "own", "--device", "cpu", *words]
    done = steelyard("data", "sample", models / "llama", *given)
    assert done.returncode == 2, done.stderr
    assert all(words in done.stderr for words in reported), done.stderr
    assert not list(tmp_path.iterdir())


def test_other_weights_are_another_job_and_a_tokenized_corpus_is_not_taken_for_sampled_text(models, tmp_path):
    model = shutil.copytree(models / "llama", tmp_path / "model")
    words = ["--tokens", 50, "--length", 16, "--output-prefix", tmp_path / "own", "--device", "cpu"]
    assert steelyard("data", "sample", model, *words).returncode == 0
    again = steelyard("data", "sample", model, *words)
    assert "already finished" in again.stderr
    assert "tokens/s" not in again.stdout
    os.utime(model / "model.safetensors", (1, 2_000_000_000))
    refused = steelyard("data", "sample", model, *words)
    assert refused.returncode == 2
    assert "changed since: checkpoint" in refused.stderr
    corpus = ["--input", models / "text.txt", "--tokenizer", model, "--output-prefix", tmp_path / "own"]
    assert steelyard("data", "tokenize", *corpus, "--overwrite").returncode == 0
    again = steelyard("data", "sample", model, *words)
    assert again.returncode == 2
    assert "from another source" in again.stderr


def test_a_model_that_generates_only_end_tokens_leaves_no_files(job, writer, tmp_path, monkeypatch):
    end = writer.tokenizer.end_of_document
    monkeypatch.setattr(sample_tokens, "decode", lambda *_: torch.full((job.rows, job.length), end))
    with pytest.raises(UserError, match="only end tokens"):
        sampled(job, writer)
    assert not list(tmp_path.iterdir())
