"""RULER's common words: which ten words of a numbered list appear most often, after one example."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from structkv_bench.errors import UserError

from .data import TASKS, magic_words, wonderwords
from .fit import Draft, Room, draw_fitting, fill, largest_size

_TASK = TASKS["common_words_extraction"]
_STEP = 10
_PROBE = 4096
"""Words of the list that tells upstream how many tokens a word takes."""


def drafts(room: Room, settings: dict[str, Any], seed: int) -> Iterator[Draft]:
    """Endless samples; below 4096 tokens the words are repeated less often.

    Raises:
        UserError: an upstream fit needs more words than there are.
    """
    pool = _Pool.of(room, seed)
    common: int = settings["num_cw"]
    if room.length >= 4096:
        example_size, example_repeats = 40, (10, 3)
        repeats = settings["freq_cw"], settings["freq_ucw"]
    else:
        example_size, example_repeats, repeats = 20, (3, 1), (6, 1)

    def numbered_list(size: int, times: tuple[int, int], rng: random.Random) -> tuple[str, list[str]]:
        sample = pool.sample(size, rng)
        listed = sample[:common] * times[0] + sample[common:] * times[1]
        random.Random(seed).shuffle(listed)
        return _numbered(listed), sample[:common]

    def draw(size: int, rng: random.Random) -> Draft:
        example, answers = numbered_list(example_size, example_repeats, rng)
        context, references = numbered_list(size, repeats, rng)
        shown = _TASK["template"].format(context=example) + _TASK["answer_prefix"]
        prompt = f"{shown} {_numbered(answers)}\n{_TASK['template'].format(context=context)}"
        return Draft(prompt, _TASK["answer_prefix"], tuple(references))

    if room.tight:
        yield from fill(lambda own, size: draw(size, random.Random(own)), room, seed, least=common)
        return
    rng = random.Random(seed)
    tokens_per_word = room.used(draw(_PROBE, rng)) / _PROBE
    upper = max(int(room.length // tokens_per_word) * 2, 2 * _STEP)
    size = largest_size(lambda count: room.fits(draw(count, rng)), _STEP, upper)
    while True:
        yield draw_fitting(lambda count: draw(count, rng), room, size, _STEP, least=common)


@dataclass(frozen=True)
class _Pool:
    """The words that a list is drawn from."""

    words: list[str]
    room: Room

    @classmethod
    def of(cls, room: Room, seed: int) -> _Pool:
        """All words of wonderwords in upstream's order."""
        words = sorted({*wonderwords("noun"), *wonderwords("adjective"), *wonderwords("verb")})
        random.Random(seed).shuffle(words)
        return cls(words, room)

    def sample(self, size: int, rng: random.Random) -> list[str]:
        """`size` random words.

        A list of near 128k tokens needs more than there are. Upstream then takes all from another list
        that no package has; a tight fit adds adjective-noun pairs, which are the keys of RULER's needles.

        Raises:
            UserError: there are not so many, and the fit is upstream's.
        """
        further = size - len(self.words)
        if further <= 0:
            return rng.sample(self.words, size)
        if not self.room.tight:
            raise UserError(
                f"RULER's cwe at length {self.room.length} needs more than the {len(self.words)} words of "
                "wonderwords (upstream then reads another list): take task.fit=tight or a shorter length, "
                "or leave cwe out of task.subset"
            )
        pairs = magic_words()
        return rng.sample(self.words, len(self.words)) + [
            pairs[place] for place in rng.sample(range(len(pairs)), further)
        ]


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
