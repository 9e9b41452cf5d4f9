import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers


@pytest.fixture(scope="module")
def trained():
    return tokenizers.train_byte_bpe(["the cat sat on the mat", "日本語のテキスト", "안녕하세요 🎉"] * 20, 300)


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_any_text_comes_back_as_it_was(trained, text):
    assert trained.decode(trained.encode(text)) == text.replace(tokenizers.END_OF_DOCUMENT, "")


def test_a_saved_tokenizer_gives_the_same_ids(trained, tmp_path):
    tokenizers.save(trained, tmp_path)
    loaded = tokenizers.load(tmp_path)
    texts = ["the cat", "日本 mat", "🎉", ""]
    assert loaded.encode_batch(texts) == [trained.encode(text) for text in texts]
    assert (loaded.vocab_size, loaded.end_of_document) == (300, trained.end_of_document)


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_an_empty_corpus_is_refused(texts):
    with pytest.raises(UserError, match="empty"):
        tokenizers.train_byte_bpe(texts, 300)


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(UserError, match="256"):
        tokenizers.train_byte_bpe(["a"], 100)


def test_garbage_for_a_tokenizer_is_one_clear_message(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        tokenizers.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        tokenizers.load(tmp_path)
