"""Convert a SentencePiece model to a `tokenizer.json` that gives the same ids and the same decoded text.

Current versions of `transformers` decode byte pieces only with the `tokenizers` library, so every Unigram and BPE model
is converted. The libraries differ in five places:

1. Character maps: see `character_map.py`.
2. Names of control and byte pieces in a text (`<s>`, `<0x41>`) are plain text in SentencePiece. In `tokenizers` they
   may be found as pieces, so such a text is split at a place that no piece crosses.
3. User-defined symbols are never split or merged. A BPE gets them as separate words that are looked up first; a Unigram
   gets the score that SentencePiece computes for them.
4. Spaces: extra spaces, the space at the start, and the symbol that stands for a space.
5. Unknown text is decoded as U+2047 between spaces.

SentencePiece adds the scores of a Unigram in single precision, `tokenizers` in double precision, which breaks ties
between segmentations differently. Vocabularies that Steelyard trains have rounded scores, whose sums are exact in both
(`train_tokenizer.py`); other Unigrams give other ids for a few texts.
"""

from __future__ import annotations

import re
from itertools import islice, pairwise
from typing import Any

from steelyard.text.tokenizer import character_map
from steelyard.text.tokenizer.json_file import JsonTokenizer
from steelyard.text.tokenizer.sentencepiece_model import SentencePieceTokenizer

SPACE = "\u2581"
UNKNOWN_SURFACE = " \u2047 "


def rebuilt(tokenizer: SentencePieceTokenizer) -> JsonTokenizer:
    """The tokenizer with the same vocabulary and rules in the `tokenizers` library."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    sp = tokenizer.inner
    names = [sp.id_to_piece(number) for number in range(sp.get_piece_size())]
    scores = {name: sp.get_score(number) for number, name in enumerate(names) if _is_normal(sp, number)}
    symbols = sorted(tokenizer.symbols, key=len, reverse=True)
    words: list[str] = []  # patterns of what is split off
    if tokenizer.kind == "SentencePiece BPE":
        vocab = {name: number for number, name in enumerate(names)}
        options = {"unk_token": names[sp.unk_id()], "fuse_unk": True, "byte_fallback": tokenizer.has_bytes}
        model: Any = models.BPE(vocab, _merges(vocab, scores), **options, ignore_merges=bool(symbols))
        if symbols:
            words = ["|".join(map(re.escape, symbols)), *_splits_of_names(names, scores, tokenizer.symbols)]
    else:
        best = max(scores.values(), default=0.0)
        scores |= {symbol: len(symbol.encode()) * best - 0.1 for symbol in symbols}
        pieces = [(name, scores.get(name, min(scores.values(), default=0.0))) for name in names]
        model = models.Unigram(pieces, sp.unk_id(), byte_fallback=tokenizer.has_bytes)
        words = _splits_of_names(names, scores, tokenizer.symbols)
    inner = Inner(model)
    inner.normalizer = normalizers.Sequence(_normalizers(tokenizer))
    if words:
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(w), "isolated") for w in words])
    unknown, space = decoders.Replace(names[sp.unk_id()], UNKNOWN_SURFACE), decoders.Replace(SPACE, " ")
    steps: list[Any] = [unknown, space, decoders.ByteFallback(), decoders.Fuse()]
    _, prefix, squeeze = tokenizer.normalizer
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix or squeeze else steps)
    return JsonTokenizer(inner, tokenizer.source)


def _normalizers(tokenizer: SentencePieceTokenizer) -> list[Any]:
    from tokenizers import Regex, normalizers

    compiled, prefix, squeeze = tokenizer.normalizer
    rules: list[Any] = []
    if compiled:
        composes = tokenizer.inner.normalize("\u304b\u3099").endswith("\u304c")
        symbols = sorted(tokenizer.symbols, key=len, reverse=True)
        rules = character_map.normalizers_of(compiled, composes, symbols)
    space = normalizers.Replace(" ", SPACE)
    if squeeze:  # Remove extra spaces at the start and inside; at the end also the space symbol.
        front, inside = normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")
        rules += [front, inside, space, normalizers.Replace(Regex(rf"{SPACE}+\z"), "")]
    else:
        rules.append(space)
    return [*rules, normalizers.Prepend(SPACE)] if prefix else rules


def _splits_of_names(names: list[str], scores: dict[str, float], symbols: set[str]) -> list[str]:
    """Patterns that split the names of control and byte pieces between two characters that no piece has in sequence.

    One of the two is known, because a run of unknown characters is one token.
    """
    sequences = {pair for name in scores for pair in pairwise(name)}
    patterns = []
    for name in names:
        if name not in scores and name not in symbols:
            pairs = enumerate(pairwise(name), start=1)
            cuts = (end for end, pair in pairs if pair not in sequences and not scores.keys().isdisjoint(pair))
            patterns += [f"(?<={re.escape(name[:cut])})(?={re.escape(name[cut:])})" for cut in islice(cuts, 1)]
    return ["|".join(patterns)] if patterns else []


def _merges(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that merge into another token, by descending score."""
    merges: list[tuple[float, int, int, str, str]] = []
    for name, score in scores.items():
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _is_normal(sp: Any, number: int) -> bool:
    is_reserved = sp.is_control(number) or sp.is_byte(number) or sp.is_unknown(number) or sp.is_unused(number)
    return not is_reserved
