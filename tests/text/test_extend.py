"""Extended vocabularies: old ids keep their pieces, and the new pieces are used."""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import SentencePieceOptions
from steelyard.text.tokenizer.continue_bpe import next_merges
from steelyard.text.tokenizer.extend_vocabulary import extend, extend_with_report, pieces_by_id, sampled
from steelyard.text.tokenizer.json_file import JsonTokenizer

ENGLISH = Path(argparse.__file__).read_text().splitlines()
JAPANESE = [
    "今日は朝から雨が降っていたので、図書館で一日中本を読んでいました。",
    "図書館の二階には大きな窓があり、そこから川と小さな橋が見えます。",
    "本を読み終わると、友だちと駅前の店でラーメンを食べました。",
    "友だちは来年、東京の大学で日本語の歴史を勉強すると言っていました。",
    "私も日本語の文章をもっと読みたいと思いますが、漢字が多くてむずかしいです。",
    "帰りの電車の中で、新しいモデルがテキストを読む速さについて考えました。",
    "明日は雨が止むと天気予報で聞いたので、川の橋まで歩いて行くつもりです。",
    "小さな店のラーメンは九百円で、友だちは二杯も食べてしまいました。",
] * 6
OTHERS = [
    "안녕하세요 세계. 오늘은 비가 옵니다.",
    "今天天气很好\uff0c我们去图书馆看书。",
    "🎉👩\u200d👧 emoji 👍🏽",
    "def f(x): return x",
]


def sentencepiece(**options):
    return tokenizers.train_sentencepiece(ENGLISH, 400, SentencePieceOptions(**options))


def byte_bpe():
    """As of Qwen: special tokens behind the vocabulary, a chat template, a class of transformers, which uses NFC."""
    trained = tokenizers.train_byte_bpe(ENGLISH, 400)
    trained.inner.normalizer = normalizers.NFC()
    trained.inner.add_special_tokens([AddedToken(name, special=True) for name in ("<|im_start|>", "<|im_end|>")])
    config = {"eos_token": "<|im_end|>", "tokenizer_class": "Qwen2TokenizerFast", "chat_template": "{{ messages }}"}
    return JsonTokenizer(trained.inner, "qwen", config)


def llama_3():
    """Words of up to three digits, and whole words looked up before merges apply."""
    qwen = byte_bpe()
    qwen.inner.model.ignore_merges = True
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[^\r\n\p{L}\p{N}]?\p{L}+|\s+"), "isolated")
    steps = [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    qwen.inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return JsonTokenizer(qwen.inner, "llama-3", {"eos_token": "<|im_end|>"})


def exported(tokenizer, folder, **config):
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return tokenizers.load_tokenizer(folder)


KINDS = {
    "byte-bpe": lambda _: byte_bpe(),
    "byte-bpe-llama-3": lambda _: llama_3(),
    "bpe": lambda _: sentencepiece(type="bpe"),
    "bpe-bytes": lambda _: sentencepiece(type="bpe", byte_fallback=True, symbols=("<sep>",)),
    "bpe-bytes-spaces": lambda _: sentencepiece(type="bpe", byte_fallback=True, keep_whitespace=True),
    "bpe-bytes-json": lambda folder: exported(sentencepiece(type="bpe", byte_fallback=True), folder),
    "unigram": lambda _: sentencepiece(),
    "unigram-bytes": lambda _: sentencepiece(byte_fallback=True, symbols=("<sep>",)),
    "unigram-json": lambda folder: exported(sentencepiece(), folder),
}
BPE = [kind for kind in KINDS if "bpe" in kind]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Each base with its extension, and that as transformers loads it."""
    transformers = pytest.importorskip("transformers")
    all_kinds = {}
    for kind, make in KINDS.items():
        base = make(tmp_path_factory.mktemp(kind))
        extended = extend(base, JAPANESE, 120)
        folder = tmp_path_factory.mktemp(f"{kind}-extended")
        extended.save(folder)
        all_kinds[kind] = base, extended, transformers.AutoTokenizer.from_pretrained(str(folder)), folder
    return all_kinds


TEXT = st.lists(
    st.sampled_from([*"雨橋本読の。、、 えaZ9 <\n", *ENGLISH[40:90], *JAPANESE[:8], *OTHERS, "<sep>", "日本語", "  "]),
    max_size=6,
).map("".join) | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.mark.parametrize("kind", KINDS)
def test_existing_pieces_keep_their_ids_and_new_ids_follow_the_largest(made, kind):
    base, extended, _, _ = made[kind]
    old, new = pieces_by_id(base), pieces_by_id(extended)
    assert {number: new[number] for number in old} == old
    assert sorted(new.keys() - old.keys()) == list(range(max(old) + 1, max(old) + 121))
    assert extended.end_id == base.end_id


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(text=TEXT)
@example(text="\uf900")
def test_a_text_without_new_pieces_keeps_its_ids_and_decodes_alike(made, kind, text):
    base, extended, hugging_face, _ = made[kind]
    before, after = base.encode(text), extended.encode(text)
    if max(after, default=0) < base.vocab_size:
        assert after == before
    if base.unknown_id not in before:
        assert extended.decode(after) == base.decode(before)
    assert hugging_face(text, add_special_tokens=False)["input_ids"] == after
    assert extended.encode_batch([text])[0].tolist() == after


@pytest.mark.parametrize("kind", KINDS)
def test_an_english_text_keeps_its_ids_and_a_japanese_text_needs_fewer(made, kind):
    base, extended, hugging_face, _ = made[kind]
    assert all(base.encode(line) == extended.encode(line) for line in ENGLISH)
    before, after = (sum(len(tokenizer.encode(line)) for line in JAPANESE) for tokenizer in (base, extended))
    assert after < (0.5 * before if base.unknown_id is None else 1e9)
    assert extended.unknown_id is None or all(extended.unknown_id not in extended.encode(line) for line in JAPANESE)
    for text in [*JAPANESE[:8], *OTHERS]:
        assert hugging_face(text, add_special_tokens=False)["input_ids"] == extended.encode(text)
        assert hugging_face.decode(extended.encode(text)) == extended.decode(extended.encode(text))


@pytest.mark.parametrize("kind", BPE)
def test_every_new_piece_of_a_bpe_is_one_token(made, kind):
    base, extended, _, folder = made[kind]
    model = tokenizers.load_tokenizer(folder / "tokenizer.json").inner.model
    for number, piece in pieces_by_id(extended).items():
        if number >= base.vocab_size:
            assert [token.id for token in model.tokenize(piece)] == [number]


@pytest.mark.parametrize("kind", ["bpe", "bpe-bytes-json"])
def test_pieces_without_words_follow_the_rules_of_sentencepiece(made, kind):
    base, extended, _, _ = made[kind]
    new = [piece for number, piece in pieces_by_id(extended).items() if number >= base.vocab_size]
    assert any(len(piece) > 1 for piece in new)
    for piece in new:
        assert len(piece) <= 16
        assert "▁" not in piece[1:]
        assert len(piece.lstrip("▁")) == 1 or not {*"。、0123456789"}.intersection(piece)


def test_the_chat_template_and_the_config_of_the_base_stay(made, tmp_path):
    base, _, hugging_face, folder = made["byte-bpe"]
    assert hugging_face.chat_template == base.config["chat_template"]
    assert hugging_face.eos_token == "<|im_end|>"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    extend(tokenizers.load_tokenizer(folder), ["雨の橋"] * 9, 2).save(tmp_path)
    assert tokenizers.load_tokenizer(tmp_path).chat_template() == "{{ bos_token }}"
    assert tokenizers.load_tokenizer(tmp_path).encode("<|im_start|>") == base.encode("<|im_start|>")


@pytest.mark.parametrize("class_", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_llama_2_folder_extends_to_one_that_transformers_loads(tmp_path, class_):
    transformers = pytest.importorskip("transformers")
    trained = sentencepiece(type="bpe", byte_fallback=True, keep_whitespace=True)
    base = exported(trained, tmp_path / "base", tokenizer_class=class_)
    extended = extend(base, JAPANESE, 60)
    extended.save(tmp_path / "new")
    loaded = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "new"))
    # These classes treat spaces at the start of a text in their own way, whatever the file says.
    for text in [*JAPANESE[:4], *(line.strip() for line in ENGLISH[60:80]), *OTHERS]:
        assert loaded(text, add_special_tokens=False)["input_ids"] == extended.encode(text)


def test_merges_are_those_of_counting_again_after_each_merge():
    words = {tuple(line): 2 + number % 3 for number, line in enumerate({*ENGLISH[:60], *JAPANESE[:8], "aaaaaa", "aaa"})}
    merges = next_merges(words, set(), 80, 6, lambda: None)
    segmented, known = dict(words), set()
    for merge in merges:
        counts = {}
        for word, times in segmented.items():
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + times
        allowed = [pair for pair in counts if "".join(pair) not in known and len("".join(pair)) <= 6]
        assert merge == min(allowed, key=lambda pair: (-counts[pair], pair))
        known.add("".join(merge))
        segmented = {_join(word, merge): times for word, times in segmented.items()}


def _join(word, pair):
    done = []
    for token in word:
        if done and (done[-1], token) == pair and done[-1] is not None:
            done[-1:] = ["".join(pair), None]  # A merged token does not merge again in the same pass.
        else:
            done.append(token)
    return tuple(token for token in done if token is not None)


def test_from_bytes_alone_the_pieces_compress_as_those_of_the_tokenizers_library():
    """Pairs of equal frequency are merged in another order there, so the pieces are not all the same."""
    theirs = tokenizers.train_byte_bpe(ENGLISH, 600)
    ours = extend(tokenizers.train_byte_bpe(ENGLISH, 257), ENGLISH, 600 - 257)
    common = set(pieces_by_id(ours).values()) & set(pieces_by_id(theirs).values())
    assert len(common) > 0.95 * 600
    counts = [sum(len(tokenizer.encode(line)) for line in ENGLISH) for tokenizer in (ours, theirs)]
    assert abs(counts[0] / counts[1] - 1) < 0.005


def test_a_text_with_few_pieces_warns_and_a_sample_is_repeatable(capsys):
    read = lambda: iter(JAPANESE)  # noqa: E731
    first, report = extend_with_report(byte_bpe(), read, 100_000, 7)
    again, _ = extend_with_report(byte_bpe(), read, 100_000, 7)
    assert f"the text yields only {report['added']} of the requested 100000 new pieces" in capsys.readouterr().err
    assert pieces_by_id(first) == pieces_by_id(again)
    assert report["tokens_per_character"] < report["tokens_per_character_before"]
    assert len(sampled(read(), 7)) == 7
    assert sorted(sampled(read(), 1000)) == sorted(JAPANESE)


def test_other_kinds_and_empty_texts_are_refused():
    inner = Inner(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(UserError, match="WordPiece cannot be extended"):
        extend(JsonTokenizer(inner, "bert"), ["a"], 1)
    with pytest.raises(UserError, match="the text is empty"):
        extend(byte_bpe(), ["", ""], 1)
