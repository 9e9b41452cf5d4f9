"""Convert a SentencePiece BPE with byte fallback to a `tokenizer.json`, if the conversion is exact.

Such models (for example Llama 2's) merge pairs in the order of their scores, as a BPE of `tokenizers` does. The
conversion is exact only without a character map (`tokenizers` applies it by grapheme, SentencePiece by the longest
match) and without user-defined symbols (which SentencePiece splits off before normalization, `tokenizers` after it).
It is exact only for BPE: Unigram adds scores in single precision in one library and in double precision in the other,
which breaks ties between segmentations differently.
"""

from __future__ import annotations

from typing import Any

from steelyard.text.tokenizer.json_file import JsonTokenizer
from steelyard.text.tokenizer.sentencepiece_model import SentencePieceTokenizer

SPACE = "\u2581"


def rebuilt(tokenizer: SentencePieceTokenizer) -> JsonTokenizer:
    """The tokenizer with the same vocabulary and rules in the `tokenizers` library."""
    from tokenizers import Regex, decoders, models, normalizers
    from tokenizers import Tokenizer as Inner

    sp = tokenizer.inner
    names = [sp.id_to_piece(number) for number in range(sp.get_piece_size())]
    vocab = {name: number for number, name in enumerate(names)}
    scores = {name: sp.get_score(number) for number, name in enumerate(names) if _is_text(sp, number)}
    merges = _merges(vocab, scores)
    unknown = names[sp.unk_id()]
    inner = Inner(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    _, prefix, squeeze = tokenizer.normalizer
    space = normalizers.Replace(" ", SPACE)
    rules: list[normalizers.Normalizer] = [space]
    if squeeze:  # Remove extra spaces at the start and inside; at the end also the space symbol.
        front, inside = normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")
        rules = [front, inside, space, normalizers.Replace(Regex(rf"{SPACE}+\z"), "")]
    rules += [normalizers.Prepend(SPACE)] if prefix else []
    inner.normalizer = normalizers.Sequence(rules)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return JsonTokenizer(inner, tokenizer.source)


def _merges(vocab: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of tokens that merge into another token, by descending score."""
    merges: list[tuple[float, int, int, str, str]] = []
    for name, score in scores.items():
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in vocab and right in vocab:
                merges.append((-score, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _is_text(sp: Any, number: int) -> bool:
    return not (sp.is_control(number) or sp.is_byte(number) or sp.is_unknown(number) or sp.is_unused(number))
