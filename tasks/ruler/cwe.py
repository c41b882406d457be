"""RULER's common words: which ten words of a numbered list appear most often, after one example."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from structkv_bench.errors import UserError

from .data import TASKS, wonderwords
from .fit import Draft, Room, draw_fitting, largest_size

_TASK = TASKS["common_words_extraction"]
_STEP = 10
_PROBE = 4096
"""Words of the list that tells upstream how many tokens a word takes."""


def drafts(room: Room, settings: dict[str, Any], seed: int) -> Iterator[Draft]:
    """Endless samples; below 4096 tokens the words are repeated less often."""
    rng = random.Random(seed)
    words = sorted({*wonderwords("noun"), *wonderwords("adjective"), *wonderwords("verb")})
    random.Random(seed).shuffle(words)
    common: int = settings["num_cw"]
    if room.length >= 4096:
        example_size, example_repeats = 40, (10, 3)
        repeats = settings["freq_cw"], settings["freq_ucw"]
    else:
        example_size, example_repeats, repeats = 20, (3, 1), (6, 1)

    def numbered_list(size: int, times: tuple[int, int]) -> tuple[str, list[str]]:
        if size > len(words):
            raise UserError(
                f"RULER's cwe at length {room.length} needs more than the {len(words)} words of "
                "wonderwords (upstream then reads another list): take a shorter length, or leave cwe "
                "out of task.subset"
            )
        sample = rng.sample(words, size)
        listed = sample[:common] * times[0] + sample[common:] * times[1]
        random.Random(seed).shuffle(listed)
        return _numbered(listed), sample[:common]

    def draw(size: int) -> Draft:
        example, answers = numbered_list(example_size, example_repeats)
        context, references = numbered_list(size, repeats)
        shown = _TASK["template"].format(context=example) + _TASK["answer_prefix"]
        prompt = f"{shown} {_numbered(answers)}\n{_TASK['template'].format(context=context)}"
        return Draft(prompt, _TASK["answer_prefix"], tuple(references))

    tokens_per_word = room.used(draw(_PROBE)) / _PROBE
    upper = max(int(room.length // tokens_per_word) * 2, 2 * _STEP)
    size = largest_size(lambda count: room.fits(draw(count)), _STEP, upper)
    while True:
        yield draw_fitting(draw, room, size, _STEP, least=common)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))
