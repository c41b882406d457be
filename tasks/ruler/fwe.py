"""RULER's frequent words: the three most frequent coded words of a text with Zipf frequencies."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from functools import partial
from typing import Any

from .data import TASKS
from .fit import Draft, Room, draw_fitting, fill

_TASK = TASKS["freq_words_extraction"]
_LETTERS = 6
_ZETA_2 = math.pi**2 / 6  # the value of the zeta function at alpha = 2, RULER's only setting


def drafts(room: Room, settings: dict[str, Any], seed: int) -> Iterator[Draft]:
    """Endless samples, each with a vocabulary of its own.

    Raises:
        UserError: the length leaves less than four vocabulary words (one of which is the dots).
    """
    budget = room.length - room.max_new_tokens
    if budget < 4 * 50:
        raise room.too_short(4 * 50 + room.max_new_tokens)
    step = budget // 32
    # Fewer words would leave out the fourth rank, which is one of the answers.
    least = math.ceil(4 ** settings["alpha"] * _ZETA_2)

    def draw(size: int, vocabulary: list[str]) -> Draft:
        return _draft(size, vocabulary, settings, seed)

    def draw_own(own: int, size: int) -> Draft:
        return draw(size, _vocabulary(budget // 50, random.Random(own), seed))

    if room.tight:
        yield from fill(draw_own, room, seed, least)
        return
    rng = random.Random(seed)
    vocabulary = _vocabulary(budget // 50, rng, seed)
    size = budget // _LETTERS
    while size < 8 * budget and room.used(draw(size, vocabulary)) < budget:
        size += step
    size -= step
    while True:
        vocabulary = _vocabulary(budget // 50, rng, seed)
        yield draw_fitting(partial(draw, vocabulary=vocabulary), room, size, step, least)


def _vocabulary(size: int, rng: random.Random, seed: int) -> list[str]:
    """`size` distinct coded words by falling rank; the first, the most frequent, is the noise."""
    words = {_word(rng) for _ in range(size)}
    while len(words) < size:
        words.add(_word(rng))
    vocabulary = sorted(words)
    random.Random(seed).shuffle(vocabulary)
    vocabulary[0] = "..."
    return vocabulary


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=_LETTERS))


def _draft(size: int, vocabulary: list[str], settings: dict[str, Any], seed: int) -> Draft:
    """About `size` words, as often as their rank says; always the same shuffle."""
    words: list[str] = []
    for rank, word in enumerate(vocabulary, start=1):
        words += [word] * int(size * rank ** -settings["alpha"] / _ZETA_2)
    random.Random(seed).shuffle(words)
    return Draft(
        prompt=_TASK["template"].format(context=" ".join(words)),
        answer_prefix=_TASK["answer_prefix"],
        references=tuple(vocabulary[1:4]),
    )
