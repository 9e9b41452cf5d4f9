import pytest
import torch

from steelyard import train
from steelyard.core.errors import UserError
from steelyard.core.recipe import load
from steelyard.evaluate.generate import Sampling, from_checkpoint, generate
from steelyard.text import tokenizer as tokenizers


class CountsUp(torch.nn.Module):
    """A model that always expects the next id."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.eye(vocab).roll(1, dims=1) * 50)

    def forward(self, tokens):
        return self.table[tokens]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.train_byte_bpe(["abcdefghijklmnopqrstuvwxyz"], 257)


def test_the_likeliest_token_is_taken_at_temperature_zero(tokenizer):
    network = CountsUp(tokenizer.vocab_size)
    first = tokenizer.decode([100])
    text = generate(network, tokenizer, first, Sampling(max_tokens=3, temperature=0), context=8)
    assert text == tokenizer.decode([100, 101, 102, 103])


def test_a_seed_gives_the_same_text_again_and_another_seed_another(tokenizer):
    network = CountsUp(tokenizer.vocab_size)
    network.table.data.mul_(0)
    texts = [generate(network, tokenizer, "a", Sampling(max_tokens=20, seed=seed), 8) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_run_writes_text_and_its_checkpoint_does_too(in_workplace, tokenizer):
    tokenizer.save(in_workplace.path / "tok")
    run = train.run(load("tiny.toml", ["data.tokenizer=tok", "model.vocab=257"]))
    from_run = from_checkpoint(run.path, "abc", Sampling(max_tokens=5))
    assert from_run.startswith("abc")
    newest = sorted(run.checkpoints.iterdir())[-1]
    assert from_checkpoint(newest, "abc", Sampling(max_tokens=5)) == from_run


def test_a_run_without_a_tokenizer_says_so(in_workplace):
    run = train.run(load("tiny.toml", ["train.steps=1"]))
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        from_checkpoint(run.path, "abc", Sampling())
