"""Add pieces for another text to a vocabulary; existing pieces keep their ids.

A BPE continues its training (`continue_bpe.py`): the new merges come after the old ones, so a text without a new piece
keeps its ids. Characters that the base does not know become pieces first, because bytes and unknown tokens are never
merged. A base that splits text into words for its bytes keeps these words. For other bases the rules of SentencePiece
apply: a piece has at most 16 characters, a space only at its start, and letters of one script or digits or others;
Han, Hiragana and Katakana count as one script.

A Unigram gets the best pieces of a second Unigram that is trained on the text. Their scores are shifted so that pieces
of both vocabularies agree on average, and stay within the range of the base, on which scores of unknown text depend.

New ids follow the largest one. The `tokenizers` library assigns ids to added tokens anew when it loads a file, unless
the vocabulary of the model has them too, so they are added to it.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from steelyard.core.console import console
from steelyard.core.errors import UserError
from steelyard.text.corpus_stats import script_of
from steelyard.text.tokenizer.continue_bpe import Pair, Word, next_merges
from steelyard.text.tokenizer.json_file import JsonTokenizer, valid_utf8
from steelyard.text.tokenizer.sentencepiece_model import SentencePieceTokenizer
from steelyard.text.tokenizer.sentencepiece_to_json import SPACE, rebuilt
from steelyard.text.tokenizer.tokenizer import Tokenizer
from steelyard.text.tokenizer.train_tokenizer import SCORE_STEP, SentencePieceOptions, train_sentencepiece
from steelyard.text.tokenizer.unknown_tokens import survey

LONGEST_PIECE = 16
CHARACTER_COVERAGE = 0.9995  # Rarer characters stay unknown or bytes.
ONE_SCRIPT = ("Hiragana", "Katakana")  # with Han
MOST_TRAININGS = 4
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class NewPieces:
    """Pieces in the order of their ids: characters of a BPE, then what its merges make; or scored ones of a Unigram."""

    characters: list[str] = field(default_factory=list)
    merges: list[Pair] = field(default_factory=list)
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.characters, *("".join(pair) for pair in self.merges), *self.scores]


def extend(base: Tokenizer, texts: Iterable[str], count: int) -> Tokenizer:
    """The tokenizer with up to `count` pieces for the texts added."""
    rules = rules_of(base)
    model = json.loads(rules.inner.to_str())["model"]
    kind = model["type"] if base.kind != "SentencePiece" else "SentencePiece char or word"
    if kind not in ("BPE", "Unigram") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise UserError(
            f"a vocabulary of the kind {kind} cannot be extended", where=base.source,
            hint="BPE without prefixes and suffixes of words, and Unigram can",
        )  # fmt: skip
    special, split = _special_names(base), _splitter(rules)
    words = Counter(word for text in texts for word in (split(text) if kind == "BPE" else ["".join(split(text))]))
    if not any(words):
        raise UserError("the text is empty: nothing to extend a vocabulary with")
    if kind == "BPE":
        new = _bpe_pieces(rules, words, special, count)
    else:
        scores = {name: score for name, score in model["vocab"] if name not in special}
        new = _unigram_pieces(scores, set(pieces_by_id(rules).values()), words, count)
    if not isinstance(base, SentencePieceTokenizer):
        return _with_pieces(rules, new)
    lowest = min(base.inner.get_score(number) for number in range(base.vocab_size))
    return base.with_pieces(new.scores or {name: lowest - 1 - place for place, name in enumerate(new.names)})


def extend_with_report(
    base: Tokenizer, read: Callable[[], Iterable[str]], count: int, sample: int
) -> tuple[Tokenizer, dict[str, Any]]:
    """The extended tokenizer, and the number of pieces and of tokens per character of the text before and after."""
    with console.working("read the text"):
        if sample:
            chosen = sampled(read(), sample)
            read = lambda: chosen  # noqa: E731
        extended = extend(base, read(), count)
    added = extended.vocab_size - base.vocab_size
    if added < count:
        console.warn(f"the text yields only {added} of the requested {count} new pieces")
    with console.working("encode the text"):
        before, after = (survey(tokenizer, read(), lambda _: None) for tokenizer in (base, extended))
    return extended, {
        "added": added,
        "vocab_size": extended.vocab_size,
        "tokens_per_character_before": round(before["tokens"] / max(before["characters"], 1), 4),
        "tokens_per_character": round(after["tokens"] / max(after["characters"], 1), 4),
        "unknown_before": before["unknown"],
        "unknown": after["unknown"],
    }


def rules_of(tokenizer: Tokenizer) -> JsonTokenizer:
    """The tokenizer in the `tokenizers` library."""
    return rebuilt(tokenizer) if isinstance(tokenizer, SentencePieceTokenizer) else _json(tokenizer)


def pieces_by_id(tokenizer: Tokenizer) -> dict[int, str]:
    """The piece of each id."""
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {number: tokenizer.inner.id_to_piece(number) for number in range(tokenizer.vocab_size)}
    return {number: name for name, number in _json(tokenizer).inner.get_vocab(with_added_tokens=True).items()}


def sampled(texts: Iterable[str], count: int) -> list[str]:
    """A random sample of the texts, always the same."""
    texts, chosen = iter(texts), random.Random(0)
    sample = list(islice(texts, count))
    for number, text in enumerate(texts, start=count):
        if (place := chosen.randrange(number + 1)) < count:
            sample[place] = text
    return sample


def _json(tokenizer: Tokenizer) -> JsonTokenizer:
    if not isinstance(tokenizer, JsonTokenizer):
        raise UserError(f"the tokenizer {tokenizer.source} cannot be extended")
    return tokenizer


def _special_names(base: Tokenizer) -> set[str]:
    """Names of tokens that are not pieces of text, or are never merged."""
    if isinstance(base, SentencePieceTokenizer):
        return {*base.controls, *base.symbols, base.inner.id_to_piece(base.inner.unk_id())}
    names = pieces_by_id(base)
    return {names[number] for number in (*_json(base).inner.get_added_tokens_decoder(), base.model_unknown_id())
            if number is not None}  # fmt: skip


def _splitter(rules: JsonTokenizer) -> Callable[[str], Iterator[str]]:
    """A function that gives the parts of a text, normalized, that are encoded separately, without added tokens."""
    normalizer, pre_tokenizer = rules.inner.normalizer, rules.inner.pre_tokenizer
    added = sorted((token.content for token in rules.inner.get_added_tokens_decoder().values()), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, added)) or r"\Z")

    def split(text: str) -> Iterator[str]:
        for part in filter(None, pattern.split(valid_utf8(text))):
            normal = normalizer.normalize_str(part) if normalizer is not None else part
            if pre_tokenizer is not None:
                yield from (word for word, _ in pre_tokenizer.pre_tokenize_str(normal))
            else:
                yield normal

    return split


def _bpe_pieces(rules: JsonTokenizer, words: Counter[str], special: set[str], count: int) -> NewPieces:
    known = set(pieces_by_id(rules).values())
    has_byte_alphabet = "ByteLevel" in json.dumps(json.loads(rules.inner.to_str())["pre_tokenizer"])
    characters = _unknown_characters(words, known)[:count]
    model = _with_pieces(rules, NewPieces(characters)).inner.model
    bytes_ = {name for name in known if BYTE.fullmatch(name)} if model.byte_fallback else set()
    segmented: Counter[Word] = Counter()
    with console.progress("segment", len(words), "words") as progress:
        for word, times in words.items():
            for part in _parts(model.tokenize(word), special | bytes_, has_byte_alphabet):
                segmented[part] += times
            progress.advance()
    longest = None if has_byte_alphabet else LONGEST_PIECE
    with console.progress("merge", count, "pieces", done=len(characters)) as progress:
        merges = next_merges(segmented, known | set(characters), count - len(characters), longest, progress.advance)
    return NewPieces(characters, merges)


def _unknown_characters(words: Counter[str], known: set[str]) -> list[str]:
    """The characters outside the vocabulary by descending frequency, without the rarest of the text."""
    times: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            times[character] += count
    covered, least = 0, CHARACTER_COVERAGE * times.total()
    frequent = []
    for character, count in sorted(times.items(), key=lambda each: (-each[1], each[0])):
        if covered >= least:
            break
        covered += count
        if character not in known:
            frequent.append(character)
    return frequent


def _parts(tokens: list[Any], unmerged: set[str], has_byte_alphabet: bool) -> Iterator[Word]:
    """The runs of several tokens that may be merged with each other."""
    part: list[str] = []
    end = 0
    for token in tokens:
        follows = part and token.offsets[0] == end and (has_byte_alphabet or _may_join(part[-1], token.value))
        if token.value in unmerged or not follows:
            if len(part) > 1:
                yield tuple(part)
            part = []
        if token.value not in unmerged:
            part.append(token.value)
        end = token.offsets[1]
    if len(part) > 1:
        yield tuple(part)


def _may_join(left: str, right: str) -> bool:
    """Whether SentencePiece allows a piece that contains the end of one token and the start of another."""
    if right.startswith(SPACE) or left.endswith(SPACE):
        return left == SPACE and not right.startswith(SPACE)
    after = _script(right[:1])
    return after in (_script(left), None)


def _script(text: str) -> str | None:
    """The script of the last character, or its kind if it is no letter; None if the text has only combining marks."""
    for character in reversed(text):
        script = script_of(character)
        if script != "combining marks":
            return "Han" if script in ONE_SCRIPT else script
    return None


def _unigram_pieces(own: dict[str, float], known: set[str], words: Counter[str], count: int) -> NewPieces:
    options = SentencePieceOptions(character_coverage=CHARACTER_COVERAGE, keep_whitespace=True, may_be_smaller=True)
    size = count + len({character for word in words for character in word}) + 3
    trained: dict[str, float] = {}
    for _ in range(MOST_TRAININGS):
        before = len(trained)
        lines = (word.replace(SPACE, " ").strip(" ") for word in words.elements())
        with console.working("train a Unigram"):
            inner = train_sentencepiece(lines, size, options).inner
        trained = {inner.id_to_piece(number): inner.get_score(number) for number in range(3, inner.get_piece_size())}
        missing = count - len(trained.keys() - known)
        if missing <= 0 or len(trained) == before:
            break
        size += 2 * missing
    shared = [own[name] - score for name, score in trained.items() if name in own]
    shift = sum(shared) / max(len(shared), 1)
    least, most = min(own.values()), max(own.values())
    best = sorted(trained.keys() - known, key=lambda name: (len(name) > 1, -trained[name], name))[:count]
    rounded = {name: round((trained[name] + shift) / SCORE_STEP) * SCORE_STEP for name in best}
    return NewPieces(scores={name: min(max(score, least), most) for name, score in rounded.items()})


def _with_pieces(base: JsonTokenizer, new: NewPieces) -> JsonTokenizer:
    """The tokenizer with pieces after its largest id."""
    from tokenizers import Tokenizer as Inner

    state = json.loads(base.inner.to_str())
    vocab = state["model"]["vocab"]
    if state["model"]["type"] == "BPE":
        vocab |= {token.content: number for number, token in base.inner.get_added_tokens_decoder().items()}
        vocab |= {name: base.vocab_size + place for place, name in enumerate(new.names)}
        state["model"]["merges"] += map(list, new.merges)
    else:
        names, lowest = pieces_by_id(base), min(score for _, score in vocab)
        vocab += [[names.get(number, f"<unused{number}>"), lowest] for number in range(len(vocab), base.vocab_size)]
        vocab += new.scores.items()
    return JsonTokenizer(Inner.from_str(json.dumps(state)), base.source, base.config)


def parts_of_new_pieces(base: Tokenizer, extended: Tokenizer) -> dict[int, list[int]]:
    """For each id that only the extended tokenizer has, the ids into which the base splits its piece.

    Unknown tokens are left out. Raises if the tokenizer does not extend the base.
    """
    rules, old, new = rules_of(base), pieces_by_id(base), pieces_by_id(extended)
    for number in sorted(old):
        if new.get(number) != old[number]:
            raise UserError(
                f"the tokenizer {extended.source} does not extend {base.source}: the id {number} is "
                f"{new.get(number)!r}, and was {old[number]!r}",
                hint="steelyard tokenizer extend BASE writes one that does",
            )
    added = _json(extended).inner.get_added_tokens_decoder() if isinstance(extended, JsonTokenizer) else {}
    unknown = base.model_unknown_id()
    return {
        number: [part for part in _split_piece(rules, piece, number in added) if part != unknown]
        for number, piece in sorted(new.items())
        if number not in old
    }


def _split_piece(rules: JsonTokenizer, piece: str, is_added: bool) -> list[int]:
    """The ids of a piece: an added token is text, other pieces are already normalized."""
    return rules.encode(piece) if is_added else [token.id for token in rules.inner.model.tokenize(piece)]
