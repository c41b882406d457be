"""RULER's templates and settings (templates.json) and the word lists its keys are drawn from."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import Any, overload

_DATA: dict[str, Any] = json.loads((files(__package__) / "templates.json").read_text(encoding="utf-8"))

NOISE: str = _DATA["noise"]
"""Five short sentences: one unit of a noise haystack."""
NEEDLE: str = _DATA["needle"]
TASKS: dict[str, dict[str, Any]] = _DATA["tasks"]
"""Template, answer prefix and tokens_to_generate of each kind of task."""
SUBTASKS: dict[str, dict[str, Any]] = _DATA["subtasks"]
"""Kind of task and its settings for each name that a table shows."""


def wonderwords(list_name: str) -> list[str]:
    """Words of one list of the wonderwords package ("noun", "adjective", "verb"), in file order."""
    text = (files("wonderwords") / "assets" / f"{list_name}list.txt").read_text(encoding="utf-8")
    return [line.rstrip() for line in text.splitlines()]


class WordPairs(Sequence[str]):
    """All distinct "first-second" strings in sorted order, none of them stored.

    RULER sorts the set of its six million adjective-noun pairs, which takes seconds and close to a
    gigabyte; only the item at a drawn index is ever needed. Pairs that share a first word are a run
    of the sorted list, ordered by the second word. First words that start with another one and its
    hyphen ("deep", "deep-blue") mix with it: they form one block that is sorted as a whole.
    """

    def __init__(self, firsts: Iterable[str], seconds: Iterable[str]) -> None:
        plain = sorted(set(seconds))
        families: list[list[str]] = []
        for start in sorted({f"{first}-" for first in firsts}):
            if families and start.startswith(families[-1][0]):
                families[-1].append(start)
            else:
                families.append([start])
        self._blocks = [
            (family[0], plain if len(family) == 1 else _mixed(family, plain)) for family in families
        ]
        self._ends = list(accumulate(len(tails) for _, tails in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        block = bisect_right(self._ends, index)
        start, tails = self._blocks[block]
        return start + tails[index - self._ends[block]]  # counted from the block's end


def _mixed(family: list[str], seconds: list[str]) -> list[str]:
    """Sorted distinct pairs of a family of first words, without the start they share."""
    shared = len(family[0])
    return sorted({start[shared:] + second for start in family for second in seconds})


@cache
def magic_words() -> WordPairs:
    """The words that RULER's needles can have as keys."""
    return WordPairs(wonderwords("adjective"), wonderwords("noun"))
