"""How RULER sizes a sample, in two ways: NVIDIA's, or so that samples fill their length.

Upstream searches once for the haystack that fits, then shrinks what came out too long. Every probe and
every retry draws new random words there, so its steps decide the data; they are those of June 2025,
except that nothing can loop for ever. They are coarse: a sample that misses by one token can lose a
fifth of its length. A tight fit has random numbers of its own for each sample and corrects its size by
what one count of the whole text says is missing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat

_TRIES = 32
"""Draws at the smallest size before giving up; their lengths differ by a few tokens only."""
_GUESSES = 8
"""Probes placed by the estimate before a tight fit turns to bisection, which always ends."""


@dataclass(frozen=True)
class Draft:
    """A sample before it has its number."""

    prompt: str
    answer_prefix: str
    references: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Room:
    """The tokens a sample may take, and how they are counted."""

    subtask: str
    length: int
    max_new_tokens: int
    prompts: PromptFormat
    samples: int
    """How many are asked for: an error names a length that these fit."""
    templated: bool = True
    """Whether the chat template counts; a worked example inside a prompt has none."""
    tight: bool = False
    """Whether to fill the length better than upstream does, with other samples."""

    @property
    def margin(self) -> int:
        """Tokens that a tight fit may leave free to save a probe; none where every unit counts."""
        return self.length // 128 if self.length >= 4096 else 0

    def used(self, draft: Draft) -> int:
        """Tokens of the prompt, without the room for an answer."""
        if self.templated:
            return len(self.prompts.render(draft.prompt, draft.answer_prefix))
        return len(self.prompts.encode(draft.prompt + draft.answer_prefix))

    def spare(self, draft: Draft) -> int:
        """Tokens left free by the prompt and the answer; below 0 where they don't fit."""
        return self.length - self.max_new_tokens - self.used(draft)

    def fits(self, draft: Draft, reserved: int = 0) -> bool:
        """Whether the prompt, `reserved` further tokens and the answer fit the length."""
        return self.spare(draft) >= reserved

    def too_short(self, least: int) -> UserError:
        """The error for a length that can't hold a sample; `least` tokens could."""
        return UserError(
            f"RULER's {self.subtask} can't be made at length {self.length}: "
            f"its smallest sample needs task.lengths of {least} or more with this model's tokenizer"
        )


def largest_size(fits: Callable[[int], bool], lower: int, upper: int) -> int:
    """Largest size from `lower` to `upper` whose one random draft fits, by bisection; else `lower`."""
    best = lower
    while lower <= upper:
        middle = (lower + upper) // 2
        if fits(middle):
            best, lower = middle, middle + 1
        else:
            upper = middle - 1
    return best


def draw_fitting(draw: Callable[[int], Draft], room: Room, size: int, step: int, least: int) -> Draft:
    """Upstream's fit of one sample: each draft that is too long is drawn anew, `step` units smaller.

    Args:
        draw: makes a random draft of a given size (in haystack units).
        room: the length to fit.
        size: units of the first try.
        step: units fewer at each retry; `step` or less is not reduced further.
        least: units below which the task makes no sense. Upstream has no such bound, and there
            either loops for ever or lists fewer answers than it asks for.

    Raises:
        UserError: even the smallest size is too long.
    """
    too_long: list[int] = []
    while len(too_long) < _TRIES:
        draft = draw(size)
        if room.fits(draft):
            return draft
        if size > max(step, least):
            size = max(size - step, least)
        else:
            too_long.append(room.used(draft) + room.max_new_tokens)
    raise room.too_short(max(too_long))


def fill(draw: Callable[[int, int], Draft], room: Room, seed: int, least: int) -> Iterator[Draft]:
    """Endless samples of a tight fit.

    Args:
        draw: makes a draft from a seed and a size (in haystack units). The same seed gives the same
            needles at every size, so that tokens grow steadily with it.
        room: the length to fit.
        seed: of the run; each sample has one of its own, below 2**32.
        least: units below which the task makes no sense.

    Raises:
        UserError: even the smallest size is too long.
    """
    seeds = random.Random(seed)
    line: _Line | None = None
    while True:
        own = seeds.getrandbits(32)
        sample = partial(draw, own)
        line = line or _Line.of(sample, room, least)
        draft = _filled(sample, room, line)
        if draft is None:
            others = [seeds.getrandbits(32) for _ in range(min(room.samples, _TRIES))]
            needed = max(room.used(draw(each, least)) for each in [own, *others])
            raise room.too_short(needed + room.max_new_tokens)
        yield draft


@dataclass
class _Line:
    """An estimate of a prompt's tokens: so many at the smallest size, and so many for each further unit."""

    least: int
    base: int
    slope: float = 1.0

    @classmethod
    def of(cls, draw: Callable[[int], Draft], room: Room, least: int) -> _Line:
        """From two short prompts."""
        line = cls(least, room.used(draw(least)))
        line.through(least + 50, room.used(draw(least + 50)))
        return line

    def through(self, size: int, tokens: int) -> None:
        """Correct the tokens of a unit by a prompt that was counted."""
        if size > self.least:
            self.slope = max((tokens - self.base) / (size - self.least), 0.1)

    def size(self, tokens: int) -> int:
        """Units that take about so many tokens."""
        return self.least + int((tokens - self.base) // self.slope)


def _filled(draw: Callable[[int], Draft], room: Room, line: _Line) -> Draft | None:
    """The largest draft that fits, or one that leaves a margin; None where the smallest is too long.

    Each probe narrows the sizes between the largest known to fit and the smallest known to be too long.
    """
    budget = room.length - room.max_new_tokens
    fits, too_long = line.least - 1, line.least + 2 * budget  # no unit has less than half a token
    best: Draft | None = None
    guesses = 0
    while too_long - fits > 1:
        size = line.size(budget - room.margin) if guesses < _GUESSES else (fits + too_long) // 2
        size = min(max(size, fits + 1), too_long - 1)
        draft = draw(size)
        spare = room.spare(draft)
        guesses += 1
        if spare < 0:
            too_long = size
        else:
            fits, best = size, draft
            if room.margin and spare < 2 * room.margin + line.slope:
                break  # and the line stays, so that the next sample is tried at the same size
        line.through(size, budget - spare)
    return best
