"""When two texts of the demo data are near-duplicates, and when an answer loops."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

SHINGLE_WORDS = 5
SIMILAR = 0.5
LOOP_TOKENS = 24
LOOP_PERIOD = 48
DISTINCT_SHARE = 0.6
SEEN_BEFORE = 8
END_TIMES = 4


def shingles(text: str, size: int = SHINGLE_WORDS) -> frozenset[tuple[str, ...]]:
    """The word n-grams of a text, lower case, without punctuation; a shorter text is one shingle."""
    words = re.findall(r"\w+", text.lower())
    last = max(len(words) - size, 0)
    return frozenset(tuple(words[start : start + size]) for start in range(last + 1))


class ShingleIndex:
    """Finds the highest Jaccard similarity between a text and the texts added so far."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._where: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(self, text: str) -> None:
        found = shingles(text)
        for shingle in found:
            self._where[shingle].append(len(self._sizes))
        self._sizes.append(len(found))

    def highest(self, text: str) -> float:
        wanted = shingles(text)
        shared = Counter(where for shingle in wanted for where in self._where.get(shingle, ()))
        return max((both / (len(wanted) + self._sizes[where] - both) for where, both in shared.items()), default=0.0)


def loops(ids: Sequence[int], text: str) -> bool:
    """True if the answer ends in a repeated piece, or repeats its 4-grams, its lines or its last words too much."""
    for period in range(1, LOOP_PERIOD + 1):
        span = max(LOOP_TOKENS, 3 * period)
        if len(ids) >= span and all(ids[-back] == ids[-back - period] for back in range(1, span - period + 1)):
            return True
    pieces = n_grams(ids, SEEN_BEFORE)
    if any(pieces.count(gram) >= END_TIMES for gram in pieces[-4:]):
        return True
    items = [item for line in text.splitlines() if (item := line.lstrip("0123456789.-*) ").strip().lower())]
    return any(len(parts) >= 4 and len(set(parts)) < DISTINCT_SHARE * len(parts) for parts in (n_grams(ids, 4), items))


def n_grams(ids: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]


def start_of_loop(ids: Sequence[int]) -> int:
    """Where the first eight tokens begin that were written before; 0 if there are none."""
    grams = n_grams(ids, SEEN_BEFORE)
    first = {gram: start for start, gram in reversed(list(enumerate(grams)))}
    return next((start for start, gram in enumerate(grams) if first[gram] < start), 0)
