"""Continue the training of a BPE vocabulary: find the next merges for a text that is segmented with the existing ones.

The most frequent adjacent pair is merged, again and again. Its frequency is kept up to date instead of being counted
again: a merge changes only the words that contain the pair. The heap may have an outdated, higher frequency of a pair;
such a pair is pushed again with its current frequency when it comes up. No other frequency grows, except that of pairs
with the new token.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import pairwise

Word = tuple[str, ...]  # the tokens of a part of the text that merges do not cross
Pair = tuple[str, str]
LEAST_FREQUENCY = 2


def next_merges(
    words: Mapping[Word, int], known: set[str], count: int, longest: int | None, advance: Callable[[], None]
) -> list[Pair]:
    """Up to `count` merges into tokens that are not `known`, of at most `longest` characters.

    Of pairs with equal frequency the first in the order of code points is merged.
    """
    tokens, repeats = [list(word) for word in words], list(words.values())
    frequency: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for number, word in enumerate(tokens):
        for pair in pairwise(word):
            frequency[pair] += repeats[number]
            places[pair].add(number)
    heap = [(-times, pair) for pair, times in frequency.items()]
    heapq.heapify(heap)
    known, merges = set(known), list[Pair]()
    while heap and len(merges) < count:
        times, pair = heapq.heappop(heap)
        if frequency[pair] < LEAST_FREQUENCY:
            continue
        if frequency[pair] != -times:
            heapq.heappush(heap, (-frequency[pair], pair))
            continue
        joined = "".join(pair)
        if joined in known or (longest is not None and len(joined) > longest):
            continue
        known.add(joined)
        merges.append(pair)
        created: set[Pair] = set()
        for number in places.pop(pair):
            before, after = tokens[number], _merged(tokens[number], pair, joined)
            for old in pairwise(before):
                frequency[old] -= repeats[number]
            for new in pairwise(after):
                frequency[new] += repeats[number]
                if joined in new:
                    created.add(new)
                    places[new].add(number)
            tokens[number] = after
        for new in created:
            heapq.heappush(heap, (-frequency[new], new))
        advance()
    return merges


def _merged(tokens: list[str], pair: Pair, joined: str) -> list[str]:
    """The tokens with each occurrence of the pair, from left to right, as one token."""
    merged, position = list[str](), 0
    while position < len(tokens):
        if tokens[position] == pair[0] and tokens[position + 1 : position + 2] == [pair[1]]:
            merged.append(joined)
            position += 2
        else:
            merged.append(tokens[position])
            position += 1
    return merged
