"""A SentencePiece character map (such as nmt_nfkc) as normalizers of the `tokenizers` library.

SentencePiece replaces the longest match at each position. The `Precompiled` normalizer of `tokenizers` reads the same
map, but looks up whole grapheme clusters, and takes the shortest match in them. Two steps give the same text:

1. A separator between all characters makes each of them a cluster, so single characters are mapped alike.
2. The longer rules of Unicode maps compose decomposed characters: a kana and its voice mark, the jamo of a syllable, a
   letter and its accents. NFC composes them too. It also composes or reorders some sequences that no rule has, such as
   a ligature or a precomposed letter and another mark; a separator at these places prevents it.

Differences remain for longer rules of maps that a user wrote.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from itertools import groupby
from typing import Any

SEPARATOR, LASTING_SEPARATOR = "\ufff0", "\ufff1"  # Unassigned, and grapheme clusters of their own.
PRIVATE = 0x10F000
JAMO = "\u1161-\u1175\u11a8-\u11c2"  # vowels and final consonants


def normalizers_of(compiled: bytes, composes: bool, symbols: list[str]) -> list[Any]:
    """The steps; `composes` if the map composes decomposed characters. Symbols are not mapped, the longest first."""
    from tokenizers import Regex, normalizers

    hidden = [(text, _placeholder(n)) for n, text in enumerate([SEPARATOR, LASTING_SEPARATOR, *symbols])]
    steps: list[Any] = [normalizers.Replace(text, placeholder) for text, placeholder in hidden]
    if composes:
        steps.append(normalizers.Replace(Regex(rf"(?<={_class(_expanding())})"), LASTING_SEPARATOR))
    steps += [
        normalizers.Replace(Regex(r"(?!\A)(?!\z)"), SEPARATOR),
        normalizers.Precompiled(compiled),
        normalizers.Replace(SEPARATOR, ""),
    ]
    if composes:
        separate = normalizers.Replace(Regex(_not_composed()), SEPARATOR)
        removed = [normalizers.Replace(each, "") for each in (SEPARATOR, LASTING_SEPARATOR)]
        steps += [separate, normalizers.NFC(), *removed]
    return [*steps, *(normalizers.Replace(placeholder, text) for text, placeholder in hidden)]


def _placeholder(number: int) -> str:
    """Three characters for private use in a sequence that no text has, and that no map changes."""
    return chr(PRIVATE) + chr(PRIVATE + 1 + number) + chr(PRIVATE)


@cache
def _not_composed() -> str:
    """A pattern of the places where NFC would compose or reorder characters, but no rule of a map does."""
    characters = _characters()
    marks = _class(character for character in characters if unicodedata.combining(character))
    composed = [character for character in characters if unicodedata.normalize("NFD", character) != character]
    bases: dict[tuple[str, str], set[str]] = defaultdict(set)
    for character in composed:
        parts = unicodedata.normalize("NFD", character)
        if unicodedata.normalize("NFC", parts) == character:
            for end in range(2, len(parts)):
                bases[parts[1:end], parts[end]].add(parts[0])
    is_rule = "|".join(f"(?<={_class(first)}{between}){mark}" for (between, mark), first in sorted(bases.items())
                       if unicodedata.combining(mark))  # fmt: skip
    return f"(?<={_class(composed)})(?=[{marks[1:-1]}{JAMO}])|(?<={marks})(?!{is_rule})(?={marks})"


def _expanding() -> list[str]:
    """Characters that are mapped to several, such as ligatures: a mark after them is not composed."""
    return [character for character in _characters() if len(unicodedata.normalize("NFKC", character)) > 1]


def _characters() -> list[str]:
    return [chr(code) for code in range(0xA0, sys.maxunicode + 1) if not 0xD800 <= code <= 0xDFFF]


def _class(characters: Iterable[str]) -> str:
    """A class of a regular expression with these characters."""
    codes = sorted(map(ord, characters))
    ranges = []
    for _, run in groupby(enumerate(codes), key=lambda each: each[1] - each[0]):
        found = [code for _, code in run]
        ranges.append(rf"\x{{{found[0]:x}}}-\x{{{found[-1]:x}}}")
    return f"[{''.join(ranges)}]"
