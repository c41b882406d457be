"""ROUGE-L as the PyPI package rouge 1.0.1 gives it, which LongBench is scored by; in far less time.

That package fills a table of words x words and walks back through it. The words that the walk meets
depend on its choice among equally long ways, and so does the score: the walk here is the same one.
What it asks of the table is one bit per cell, so a row of the table is one integer and is computed
from the row above by a few operations on the whole of it (Hyyrö's bit-parallel LCS).
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_WALK = 990
"""Steps after which the original's recursive walk ends in a RecursionError, which the official scorer
makes a score of 0 (CPython's default limit of 1,000 frames, less those of `python eval.py`)."""


class _TooLong(Exception):
    """The original would have raised RecursionError."""


def rouge_l(prediction: str, gold: str, longest_walk: int = LONGEST_WALK) -> float:
    """F of the union of longest common subsequences over all pairs of sentences, from 0 to 1.

    A sentence ends at every full stop; words are compared as they stand, and counted once each. 0 also
    where the original raises: an empty side, or sentences too long for its recursion.
    """
    predicted, expected = _sentences(prediction), _sentences(gold)
    if not predicted or not expected:
        return 0.0
    try:
        shared = {word for x in expected for y in predicted for word in _common(x, y, longest_walk)}
    except _TooLong:
        return 0.0
    precision = len(shared) / len(set[str]().union(*predicted))
    recall = len(shared) / len(set[str]().union(*expected))
    return 2.0 * ((precision * recall) / (precision + recall + 1e-8))


def _sentences(text: str) -> list[tuple[str, ...]]:
    """Words of each distinct sentence; one of spaces alone is an empty word."""
    pieces = (" ".join(piece.split()).split(" ") for piece in text.split(".") if piece)
    return list(dict.fromkeys(map(tuple, pieces)))


def _common(x: Sequence[str], y: Sequence[str], longest_walk: int) -> set[str]:
    """Words of one longest common subsequence: the one that the original's walk finds.

    Raises:
        _TooLong: the walk has more steps than that.
    """
    if min(len(x), len(y)) > longest_walk:
        raise _TooLong
    if set(x).isdisjoint(y):
        if len(y) > longest_walk:
            raise _TooLong
        return set()
    rows = _rises(x, y)
    common: set[str] = set()
    i, j = len(x), len(y)
    for _ in range(longest_walk + 1):
        if i == 0 or j == 0:
            return common
        if x[i - 1] == y[j - 1]:
            common.add(x[i - 1])
            i, j = i - 1, j - 1
        elif rows[i - 1] >> (j - 1) & 1:  # the table falls to the left, so it doesn't fall upwards
            i -= 1
        else:
            j -= 1
    raise _TooLong


def _rises(x: Sequence[str], y: Sequence[str]) -> list[int]:
    """For each i a number whose bit j tells whether LCS(x[:i + 1], y[:j + 1]) exceeds that of y[:j]."""
    places: dict[str, int] = {}
    for j, word in enumerate(y):
        places[word] = places.get(word, 0) | 1 << j
    everywhere = (1 << len(y)) - 1
    flat, rows = everywhere, []
    for word in x:
        met = flat & places.get(word, 0)
        flat = (flat + met | flat - met) & everywhere
        rows.append(everywhere ^ flat)
    return rows
