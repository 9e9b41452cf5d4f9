"""Which tokens are learned, for every kind of tokenizer."""

import random

import numpy as np
import pytest

from steelyard.core.errors import UserError
from steelyard.finetuning.conversation import Conversation, Message
from steelyard.finetuning.encoding import Encoded, EncodeStats, encode, fitting
from steelyard.finetuning.packing import best_fit, efficiency
from steelyard.finetuning.templates import NAMED, Template
from steelyard.text.tokenizer.train_tokenizer import SentencePieceOptions, train_byte_bpe, train_sentencepiece

ANSWERS = ("月までは約38万キロです。", "Über 380.000 km — sehr weit 👩‍👩‍👧!", "  spaces  and\ttabs ")
TEXTS = ["月はどのくらい遠いですか。", "How far is the moon?", "Wie weit?", *ANSWERS] * 30


@pytest.fixture(scope="module")
def tokenizers():
    """One of each kind of the text room."""
    return {
        "byte-level BPE": train_byte_bpe(TEXTS, 320, ["<|im_start|>", "<|im_end|>"]),
        "Unigram": train_sentencepiece(TEXTS, 58, SentencePieceOptions("unigram", character_coverage=0.98)),
        "Unigram with bytes": train_sentencepiece(
            TEXTS, 310, SentencePieceOptions("unigram", 0.98, byte_fallback=True, keep_whitespace=True)
        ),
        "BPE with bytes": train_sentencepiece(TEXTS, 330, SentencePieceOptions("bpe", 0.98, byte_fallback=True)),
    }


@pytest.mark.parametrize("kind", ["byte-level BPE", "Unigram", "Unigram with bytes", "BPE with bytes"])
@pytest.mark.parametrize("name", ["chatml", "japanese", "plain"])
def test_the_learned_tokens_are_the_answer_and_its_end(tokenizers, kind, name):
    tokenizer = tokenizers[kind]
    template = Template(name, NAMED[name], (("eos_token", tokenizer.special("eos_token")),))
    for answer in ANSWERS:
        talk = Conversation((Message("user", TEXTS[0]), Message("assistant", answer), Message("user", "Wie weit?")))
        encoded = encode(talk, template, tokenizer, "assistant")
        assert encoded.ids.tolist() == tokenizer.located(template.render(talk).text)[0]
        learned = tokenizer.decode(encoded.ids[encoded.loss_mask].tolist())
        end = "<|im_end|>" if name == "chatml" else tokenizer.special("eos_token")
        assert learned.strip() == tokenizer.decode(tokenizer.located(answer + end)[0]).strip()
        ends = encoded.ids[encoded.loss_mask][-1]
        if name != "chatml":
            assert ends == tokenizer.end_of_document
        rest = tokenizer.decode(encoded.ids[~encoded.loss_mask].tolist())
        assert answer.strip()[:6] not in rest


def test_the_last_answer_alone_or_everything_can_be_learned(tokenizers):
    tokenizer = tokenizers["byte-level BPE"]
    template = Template("chatml", NAMED["chatml"])
    said = [Message("user", "a"), Message("assistant", "bb"), Message("user", "c"), Message("assistant", "dd")]
    talk = Conversation(tuple(said))
    learned = {
        loss: tokenizer.decode((each := encode(talk, template, tokenizer, loss)).ids[each.loss_mask].tolist())
        for loss in ("assistant", "completion", "all")
    }
    assert learned == {
        "assistant": "bbdd",
        "completion": "dd",
        "all": "user\na\nassistant\nbb\nuser\nc\nassistant\ndd\n",
    }


def sample(size, learned):
    return Encoded(np.arange(size, dtype=np.int32), np.arange(size) >= size - learned)


def test_what_does_not_fit_or_teaches_nothing_is_counted_or_refused():
    given = [(sample(5, 2), "a:1"), (sample(30, 2), "a:2"), (sample(30, 25), "a:3"), (sample(9, 0), "a:4")]
    tally = EncodeStats()
    kept = list(fitting(given, 10, "truncate", "drop", tally))
    assert [len(each.ids) for each in kept] == [5, 11]
    assert dict(tally.counts) == {"kept": 2, "truncated": 2, "untrained": 2}
    assert len(tally.lines()) == 2
    tally = EncodeStats()
    assert len(list(fitting(given, 10, "drop", "drop", tally))) == 1
    assert (tally.counts["overlong"], tally.counts["untrained"]) == (2, 1)
    with pytest.raises(UserError, match=r"a:2: .*30 tokens"):
        list(fitting(given, 10, "refuse", "drop", EncodeStats()))
    with pytest.raises(UserError, match="a:2: no token"):
        list(fitting(given, 10, "truncate", "refuse", EncodeStats()))


def test_a_first_token_alone_teaches_nothing():
    only_first = Encoded(np.arange(4, dtype=np.int32), np.array([True, False, False, False]))
    with pytest.raises(UserError, match="no token"):
        list(fitting([(only_first, "a:1")], 10, "truncate", "refuse", EncodeStats()))


@pytest.mark.parametrize("seed", range(5))
def test_rows_hold_every_conversation_once_and_are_nearly_full(seed):
    chance = random.Random(seed)
    # As chat data has them: many short, some long, a few at the limit.
    sizes = np.array([min(2048, int(chance.lognormvariate(5.3, 0.9)) + 1) for _ in range(3000)])
    rows = best_fit(sizes, 2048)
    assert sorted(index for row in rows for index in row) == list(range(3000))
    assert all(sizes[row].sum() <= 2048 for row in rows)
    assert efficiency(sizes, rows, 2048) > 0.97
