"""Checkpoints with the vocabulary of an extended tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken

from steelyard import model
from steelyard.checkpoint.formats import open_source
from steelyard.checkpoint.formats.extended_source import ExtendedSource
from steelyard.checkpoint.formats.source import load_into
from steelyard.checkpoint.formats.write import Target, convert
from steelyard.core.errors import UserError
from steelyard.text import tokenizer as tokenizers
from steelyard.text.tokenizer.extend_vocabulary import extend, rules_of
from tests.checkpoint.models import SHAPES, Held
from tests.text.test_extend import ENGLISH, JAPANESE, byte_bpe, sentencepiece

PIECES = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tokenizers and their extensions."""
    place = tmp_path_factory.mktemp("tokenizers")
    bases = {"bytes": byte_bpe(), "bpe": sentencepiece(type="bpe", byte_fallback=True), "unigram": sentencepiece()}
    for name, base in bases.items():
        base.save(place / name)
        extend(base, JAPANESE, PIECES).save(place / f"{name}-ja")
    return place


def checkpoint(path: Path, folders: Path, shape: str, base: str, vocab: int, dtype=torch.float32):
    held = Held(SHAPES[shape].model_copy(update={"vocab": vocab}), dtype=dtype)
    held.tokenizer = str(folders / base)
    convert(held, path, Target("hf"))
    return held


@pytest.mark.parametrize(
    ("shape", "base", "rows"),
    [
        ("llama", "bytes", 402),
        ("llama-tied", "bytes", 402),
        ("gpt", "bytes", 402),
        ("llama", "bytes", 420),  # more rows than ids
        ("llama", "bytes", 600),  # more rows than ids of the extended tokenizer
        ("llama", "bpe", 400),
        ("llama", "unigram", 400),
    ],
)
def test_old_rows_stay_and_new_rows_are_the_means_of_what_they_replace(tmp_path, folders, shape, base, rows):
    checkpoint(tmp_path / "base", folders, shape, base, rows, torch.bfloat16)
    before = open_source(tmp_path / "base")
    convert(ExtendedSource(before, str(folders / f"{base}-ja")), tmp_path / "new", Target("hf"))
    after = open_source(tmp_path / "new")
    old, new = before.load_tokenizer(), after.load_tokenizer()
    assert new.vocab_size == old.vocab_size + PIECES
    assert (after.config.vocab, after.dtype) == (max(rows, new.vocab_size), torch.bfloat16)
    for name in before.names():
        was, now = before.tensor(name), after.tensor(name)
        if name not in ("embed.weight", "head.weight"):
            assert torch.equal(was, now)
            continue
        assert torch.equal(was[: old.vocab_size], now[: old.vocab_size])
        assert torch.equal(was[new.vocab_size : rows], now[new.vocab_size : rows])
        for number in range(old.vocab_size, new.vocab_size):
            tokens = rules_of(old).inner.model.tokenize(new.inner.id_to_token(number))
            parts = [token.id for token in tokens if token.id != old.unknown_id]
            mean = (was[parts] if parts else was[:rows]).float().mean(0).bfloat16()
            assert torch.equal(now[number], mean)
            assert mean.count_nonzero()


@pytest.mark.parametrize("shape", ["llama", "llama-tied", "gpt"])
def test_logits_of_old_ids_are_those_of_the_base_here_and_in_transformers(tmp_path, folders, shape):
    transformers = pytest.importorskip("transformers")
    checkpoint(tmp_path / "base", folders, shape, "bytes", 402)
    base = open_source(tmp_path / "base")
    convert(ExtendedSource(base, str(folders / "bytes-ja")), tmp_path / "new", Target("hf"))
    vocabulary = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "new"))
    ids = vocabulary(ENGLISH[60], return_tensors="pt")["input_ids"][:, :20]
    assert ids[0].tolist() == base.load_tokenizer().encode(ENGLISH[60])[:20]
    logits = []
    for folder in ("base", "new"):
        source = open_source(tmp_path / folder)
        network = model.build(source.config)
        load_into(source, network)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        with torch.no_grad():
            logits.append((network(ids)[..., :402], theirs(ids).logits[..., :402]))
        assert theirs.config.vocab_size == (402 if folder == "base" else 402 + PIECES)
    for one, other in zip(*logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("base", ["bpe", "unigram"])
def test_a_sentencepiece_model_and_its_export_split_new_pieces_alike(folders, base):
    held = Held(SHAPES["llama"].model_copy(update={"vocab": 400}))
    parts = []
    for old, new in ((base, f"{base}-ja"), (f"{base}/tokenizer.model", f"{base}-ja/tokenizer.model")):
        held.tokenizer = str(folders / old)
        parts.append(ExtendedSource(held, str(folders / new)).parts)
    assert parts[0] == parts[1]


def test_tokens_added_by_hand_get_the_rows_of_their_text(tmp_path, folders):
    checkpoint(tmp_path / "base", folders, "llama", "bytes", 402)
    own = tokenizers.load_tokenizer(folders / "bytes")
    own.inner.add_special_tokens([AddedToken("<|tool call|>", special=True)])
    own.save(tmp_path / "own")
    source = ExtendedSource(open_source(tmp_path / "base"), str(tmp_path / "own"))
    assert source.parts == {402: tokenizers.load_tokenizer(folders / "bytes").encode("<|tool call|>")}


def test_another_tokenizer_is_refused_by_the_first_id_that_differs(tmp_path, folders):
    checkpoint(tmp_path / "base", folders, "llama", "bytes", 402)
    state = json.loads((folders / "bytes-ja/tokenizer.json").read_text())
    names = {number: name for name, number in state["model"]["vocab"].items()}
    state["model"]["vocab"] |= {names[300]: 301, names[301]: 300}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"does not extend .* the id 300 is .*, and was "):
        ExtendedSource(open_source(tmp_path / "base"), str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="has no new pieces"):
        ExtendedSource(open_source(tmp_path / "base"), str(folders / "bytes"))
    held = Held(SHAPES["llama"])
    with pytest.raises(UserError, match="has no tokenizer to compare with"):
        ExtendedSource(held, str(folders / "bytes-ja"))
