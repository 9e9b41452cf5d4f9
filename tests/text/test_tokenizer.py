import argparse
import io
import json
from functools import cache
from pathlib import Path

import pytest
import sentencepiece as sentence_pieces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer import SentencePieceOptions
from steelyard.text.tokenizer.sentencepiece_model import SentencePieceTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog; it's 2024, isn't it? " * 2,
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "안녕하세요 세계. 나는 유리를 먹을 수 있어요.",
    "我能吞下玻璃而不伤身体。今天天气很好。",
    "def f(x):\n    return x ** 2  # コメント",
    "🎉🎊👩‍👩‍👧‍👦 emoji",
] * 20 + Path(argparse.__file__).read_text().splitlines()
# Any character of Unicode, and more often those that tokenizers stumble over.
ANY = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
ODD = st.text(
    alphabet="aえがか\u3099\u309a각ᄀ\u1161é\u0301ﬁ½①ｶﾞ 　\t\n\r\u00a0\u200b\u200d\ufe0f▁🎉👩<s>/unk|0x41.,'1",
    max_size=60,
)
SPECIAL = st.sampled_from(
    ["</s>", "<s>", "<unk>", "<pad>", "a <s>b", " <unk>", "<0x41>", "▁", "  ", "[MASK]", "<sep>x<sep>"]
)
CJK_AND_EMOJI = st.text(
    alphabet="吾輩は猫である名前はまだ無い。、「」ー・がぎカガハバパｶﾊﾞﾟ\u3099\u309a\uff11\uff21①㈱㍻　我能吞下玻璃简繁體"
    "안녕하세요각힣ᄀᄂ\u1161\u1162\u11a8\u11abㄱㅏ🎉👩👧\u200d\ufe0f🇯🇵👍🏽é\u0301\u0323 \n\t<>s/0x41",
    max_size=40,
)
ANYTHING = ANY | ODD | SPECIAL | CJK_AND_EMOJI


def sentencepiece(**options):
    return tokenizers.train_sentencepiece(TEXTS, 800, SentencePieceOptions(**options))


def trained_by_others(**options):
    model = io.BytesIO()
    lines = (line for text in TEXTS for line in text.split("\n"))
    sentence_pieces.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, vocab_size=800, byte_fallback=True, minloglevel=2, num_threads=1,
        **options,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue(), "others")


KINDS = {
    "byte-bpe": lambda: tokenizers.train_byte_bpe(TEXTS, 500),
    "unigram": sentencepiece,
    "bpe": lambda: sentencepiece(type="bpe"),
    "unigram-bytes": lambda: sentencepiece(byte_fallback=True),
    "bpe-bytes": lambda: sentencepiece(type="bpe", byte_fallback=True),
    "bpe-bytes-spaces": lambda: sentencepiece(type="bpe", byte_fallback=True, keep_whitespace=True, split_digits=True),
    "bpe-symbols": lambda: sentencepiece(type="bpe", byte_fallback=True, symbols=("<sep>", "[MASK]")),
    "bpe-symbols-mapped": lambda: sentencepiece(type="bpe", symbols=("<sep>", "[MASK]")),
    "unigram-symbols": lambda: sentencepiece(symbols=("<sep>", "[MASK]")),
    "unigram-bytes-spaces": lambda: sentencepiece(byte_fallback=True, keep_whitespace=True, symbols=("<sep>",)),
    # Trained by others: with byte fallback and a character map.
    "unigram-bytes-cf": lambda: trained_by_others(normalization_rule_name="nfkc_cf", user_defined_symbols=["[MASK]"]),
    "bpe-bytes-mapped": lambda: trained_by_others(model_type="bpe", normalization_rule_name="nmt_nfkc"),
}


@cache
def loaded(folder):
    return tokenizers.load_tokenizer(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Each kind once, with its export as transformers loads it."""
    transformers = pytest.importorskip("transformers")
    made = {}
    for name, make in KINDS.items():
        tokenizer = make()
        folder = tmp_path_factory.mktemp(name)
        tokenizers.export_hf(tokenizer, folder)
        made[name] = tokenizer, transformers.AutoTokenizer.from_pretrained(str(folder)), folder
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(text=ANYTHING)
def test_an_export_keeps_the_ids_on_any_text(trained, kind, text):
    tokenizer, exported, _ = trained[kind]
    ours = tokenizer.encode(text)
    if kind == "byte-bpe" and tokenizers.END_OF_DOCUMENT in text:
        return
    assert exported(text, add_special_tokens=False)["input_ids"] == ours
    assert exported(text)["input_ids"] == ours


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(text=ANY | ODD | CJK_AND_EMOJI)
def test_an_export_decodes_as_sentencepiece_does(trained, kind, text):
    tokenizer, exported, folder = trained[kind]
    if "▁" in text:  # A space that SentencePiece keeps or removes by its position.
        return
    ids = tokenizer.encode(text)
    assert exported.decode(ids) == tokenizer.decode(ids)
    assert loaded(folder).decode(ids, skip_special_tokens=False) == tokenizer.decode(ids)


JAPANESE = "吾輩は猫である。か\u3099き\u3099 ｶﾞｷﾞ ①㈱ 각ᄀ\u1161\u11a8 我能吞下玻璃 🎉👩\u200d👧 <s> <0x41> 1<sep>2[MASK]"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_export_gives_the_ids_and_text_of_sentencepiece(trained, kind):
    tokenizer, exported, _ = trained[kind]
    for text in (JAPANESE, *JAPANESE.split(), "<sep>x", "[MASK]", "</s>", ""):
        ids = tokenizer.encode(text)
        assert exported(text)["input_ids"] == ids
        assert exported.decode(ids) == tokenizer.decode(ids)
    assert "<0x" not in exported.decode(tokenizer.encode("吾輩は猫である 🎉"))


def test_an_export_is_a_tokenizer_of_the_tokenizers_library(trained):
    assert {type(exported).__name__ for _, exported, _ in trained.values()} == {"TokenizersBackend"}
    assert all((folder / "tokenizer.model").is_file() for kind, (_, _, folder) in trained.items() if kind != "byte-bpe")


def test_scores_are_rounded_so_that_ties_are_ties_in_any_precision(trained):
    inner = trained["unigram"][0].inner
    assert all(inner.get_score(number) * 256 % 1 == 0 for number in range(inner.get_piece_size()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(texts=st.lists(ANYTHING, max_size=4))
def test_the_fast_way_gives_the_same_ids(trained, kind, texts):
    tokenizer, _, folder = trained[kind]
    expected = [tokenizer.encode(text) for text in texts]
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected
    assert [ids.tolist() for ids in loaded(folder).encode_batch(texts)] == expected


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe-bytes-spaces"])
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(text=ANY | ODD)
def test_a_tokenizer_with_bytes_gives_any_text_back(trained, kind, text):
    tokenizer, exported, _ = trained[kind]
    if "▁" in text or "<" in text:
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert exported.decode(tokenizer.encode(text)) == text


def test_the_fast_encoder_is_in_use(trained):
    assert trained["byte-bpe"][0]._fast is not None


def test_a_lone_surrogate_is_replaced_and_not_fatal(trained):
    tokenizer = trained["byte-bpe"][0]
    assert tokenizer.encode_batch(["a\ud800b"])[0].tolist() == tokenizer.encode("a\ufffdb")


@pytest.fixture
def gpt2_pair(tmp_path, trained):
    """A vocabulary in GPT-2's form: two files."""
    folder = trained["byte-bpe"][2]
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    pair = tmp_path / "gpt2"
    pair.mkdir()
    (pair / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (pair / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    return pair


def test_every_form_of_a_tokenizer_loads(trained, gpt2_pair, tmp_path):
    tokenizer, _, folder = trained["byte-bpe"]
    text = "The quick 日本語 🎉 fox"
    expected = tokenizer.encode(text)
    pair = f"{gpt2_pair / 'vocab.json'},{gpt2_pair / 'merges.txt'}"
    for source in (folder, folder / "tokenizer.json", gpt2_pair, pair):
        loaded = tokenizers.load_tokenizer(source)
        assert loaded.encode(text) == expected
        assert loaded.end_of_document == tokenizer.end_of_document
    sp = trained["unigram"][0]
    sp.write(tmp_path / "mine")
    for source in (tmp_path / "mine.model", trained["unigram"][2], tmp_path):
        if source != tmp_path:
            assert tokenizers.load_tokenizer(source).encode(text) == sp.encode(text)
    assert tokenizers.load_tokenizer(tmp_path / "mine.model").end_of_document == 2
    lines = (tmp_path / "mine.vocab").read_text().splitlines()
    assert len(lines) == 800
    assert lines[0].split("\t")[0] == "<unk>"


def test_a_tokenizer_of_the_hub_loads_by_name(trained, hub, monkeypatch):
    folder = trained["byte-bpe"][2]
    for file in folder.iterdir():
        hub.add("models", "someone/words", file.name, file.read_bytes())
    assert tokenizers.load_tokenizer("someone/words").encode("The fox") == trained["byte-bpe"][0].encode("The fox")


def test_symbols_are_tokens_of_their_own(trained):
    tokenizer = trained["bpe-symbols"][0]
    assert tokenizer.pieces("a<sep>b").count("<sep>") == 1


def test_options_reach_the_trainer(trained):
    assert trained["bpe-bytes-spaces"][0].pieces("2024")[-4:] == ["2", "0", "2", "4"]
    assert trained["bpe-bytes-spaces"][0].decode(trained["bpe-bytes-spaces"][0].encode("a   b")) == "a   b"
    assert trained["unigram-bytes"][0].decode(trained["unigram-bytes"][0].encode("ﷺ")) == "ﷺ"
    assert "unk" not in " ".join(trained["unigram-bytes"][0].pieces("ﷺ"))


@pytest.mark.parametrize("texts", [[], ["", ""]])
@pytest.mark.parametrize("kind", ["byte-bpe", "unigram"])
def test_an_empty_corpus_is_refused(texts, kind):
    with pytest.raises(UserError, match="empty"):
        if kind == "byte-bpe":
            tokenizers.train_byte_bpe(texts, 300)
        else:
            tokenizers.train_sentencepiece(texts, 300, SentencePieceOptions())


def test_a_vocabulary_of_the_wrong_size_is_refused():
    with pytest.raises(UserError, match="257"):
        tokenizers.train_byte_bpe(["a"], 100)
    with pytest.raises(UserError, match="vocabulary of 90000"):
        tokenizers.train_sentencepiece(["a b c d"], 90000, SentencePieceOptions())


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff"), ("x.model", b"garbage"), ("x.model", b"")],
)
def test_garbage_for_a_tokenizer_is_one_clear_message(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError):
        tokenizers.load_tokenizer(tmp_path / name)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    with pytest.raises(UserError, match="no tokenizer in"):
        tokenizers.load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"merges\.txt"):
        tokenizers.load_tokenizer(f"{tmp_path}/vocab.json,{tmp_path}/merges.txt")
    with pytest.raises(UserError, match="GGUF") as refused:
        tokenizers.load_tokenizer(tmp_path / "model.gguf")
    assert "--to hf" in str(refused.value)


def test_an_export_does_not_write_over_anything(trained, tmp_path):
    Path(tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        tokenizers.export_hf(trained["unigram"][0], tmp_path)
