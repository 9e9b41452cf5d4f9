"""Writing: with a cache as without, reproducible, character by whole character."""

import pytest
import torch

from steelyard import training
from steelyard.checkpoint.formats import open_source
from steelyard.core.errors import UserError
from steelyard.core.recipe import load_recipe
from steelyard.evaluate.generation import Sampling, Writer, from_checkpoint, text_of, tokens, writer
from steelyard.evaluate.load_model import loaded
from steelyard.model import Batch, Cache
from tests.evaluate.conftest import steelyard

GREEDY = Sampling(max_tokens=30, temperature=0)
PROMPT = list(range(5, 17))


def network_of(path):
    return loaded(open_source(path), torch.device("cpu"), torch.float32)


class CountsUp(torch.nn.Module):
    """A model that always expects the next id."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.eye(vocab).roll(1, dims=1) * 50)

    def forward(self, batch, cache):
        return self.table[batch.tokens_BL][:, -batch.logits_to_keep :]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_with_the_cache_the_same_tokens_are_chosen_as_without(models, family):
    network = network_of(models / family)
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(GREEDY.max_tokens):
            ids.append(int(network(torch.tensor([ids]))[0, -1].argmax()))
    assert list(tokens(network, PROMPT, GREEDY, 64, ())) == ids[len(PROMPT) :]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_greedy_text_is_that_of_transformers(models, family):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(models / family)
    ids = torch.tensor([PROMPT])
    expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
    assert list(tokens(network_of(models / family), PROMPT, GREEDY, 64, ())) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_text_read_in_pieces_gives_the_logits_of_the_whole(models, family):
    network, ids = network_of(models / family), torch.arange(20)[None]
    whole = network(ids)
    cache = Cache(20)
    pieces = [network(part, cache=cache) for part in ids.split([7, 1, 5, 7], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(network(Batch(ids, logits_to_keep=3)), whole[:, -3:], rtol=1e-4, atol=1e-4)


def test_a_text_longer_than_the_context_goes_on_from_its_end(models, tokenizer, capsys):
    network = network_of(models / "gpt")  # It has 64 positions, and would fail beyond them.
    long = "argument parser " * 60
    assert len(tokenizer.encode(long)) > 64
    text = Writer(network, tokenizer, 64, ()).text(long, Sampling(max_tokens=100, temperature=0))
    assert text.startswith(long)
    assert "the model's context is 64: only the last 32 are used" in capsys.readouterr().err
    last = tokenizer.encode(long)[-55:]
    expected = list(tokens(network, last, Sampling(max_tokens=10, temperature=0), 64, ()))
    assert list(tokens(network, tokenizer.encode(long), Sampling(max_tokens=10, temperature=0), 64, ())) == expected


def test_a_seed_gives_the_same_text_again_and_another_seed_another(models, tokenizer):
    network = network_of(models / "llama")
    texts = [
        Writer(network, tokenizer, 64, ()).text("def", Sampling(max_tokens=20, top_p=0.9, seed=s)) for s in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_top_k_and_top_p_leave_out_what_they_should(models):
    network = network_of(models / "llama")
    greedy = list(tokens(network, PROMPT, GREEDY, 64, ()))
    for narrow in (Sampling(30, 1.0, top_k=1), Sampling(30, 1.0, top_k=0, top_p=0.0), Sampling(30, 1.0, 0, 1e-9)):
        assert list(tokens(network, PROMPT, narrow, 64, ())) == greedy
    assert list(tokens(network, PROMPT, Sampling(30, 5.0, top_k=0), 64, ())) != greedy


def test_writing_stops_at_the_end_token(tokenizer):
    network = CountsUp(tokenizer.vocab_size)
    assert list(tokens(network, [100], GREEDY, 64, {104})) == [101, 102, 103]


def test_a_stream_never_cuts_a_character_and_adds_up_to_the_text(tokenizer):
    text = "naïve — 日本語 👩‍👩‍👧 end"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # Characters are split over tokens.
    for cut in range(len(ids)):
        before = tokenizer.decode(ids[:cut])
        if "\ufffd" not in before:
            pieces = list(text_of(ids[cut:], tokenizer, ids[:cut]))
            assert before + "".join(pieces) == text
            assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("日")[:-1]
    assert "".join(text_of(ids, tokenizer, tokenizer.encode("a"))) == tokenizer.decode(ids)


def test_a_run_writes_text_and_its_checkpoint_does_too(in_workplace, tokenizer):
    tokenizer.save(in_workplace.path / "tok")
    run = training.run(load_recipe("tiny.toml", ["data.tokenizer=tok", "model.vocab=400", "train.steps=3"]))
    from_run = from_checkpoint(run.path, "abc", Sampling(max_tokens=5))
    assert from_run.startswith("abc")
    newest = sorted(run.checkpoints.iterdir())[-1]
    assert from_checkpoint(newest, "abc", Sampling(max_tokens=5)) == from_run


def test_a_run_without_a_tokenizer_says_so(in_workplace):
    run = training.run(load_recipe("tiny.toml", ["train.steps=1"]))
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        from_checkpoint(run.path, "abc", Sampling())


def test_the_command_streams_what_it_would_have_printed(models):
    words = ("generate", models / "llama", "--prompt", "def main", "--max-tokens", 20, "--seed", 3)
    plain, streamed = steelyard(*words), steelyard(*words, "--stream")
    assert plain.returncode == streamed.returncode == 0, plain.stderr + streamed.stderr
    assert plain.stdout == streamed.stdout
    assert plain.stdout.startswith("def main")


@pytest.mark.slow
def test_the_real_model_writes_sense(smollm2):
    text = writer(smollm2).text("The capital of France is", Sampling(max_tokens=5, temperature=0))
    assert text.startswith("The capital of France is Paris")
