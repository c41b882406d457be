"""How RULER sizes a sample: search once for the haystack that fits, then shrink what came out too long.

Every probe and every retry draws new random words, so the steps here decide the data. They follow
NVIDIA's generators of June 2025, except that nothing can loop for ever. Upstream's steps are coarse: a
sample that misses by one token can lose a fifth of its length. A tight fit retries one unit smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat

_TRIES = 32
"""Draws at the smallest size before giving up; their lengths differ by a few tokens only."""


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
    templated: bool = True
    """Whether the chat template counts; a worked example inside a prompt has none."""
    tight: bool = False
    """Whether to fill the length better than upstream does, with other samples."""

    def used(self, draft: Draft) -> int:
        """Tokens of the prompt, without the room for an answer."""
        if self.templated:
            return len(self.prompts.render(draft.prompt, draft.answer_prefix))
        return len(self.prompts.encode(draft.prompt + draft.answer_prefix))

    def fits(self, draft: Draft, reserved: int = 0) -> bool:
        """Whether the prompt, `reserved` further tokens and the answer fit the length."""
        return self.used(draft) + reserved + self.max_new_tokens <= self.length

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
    """A draft that fits: each one that does not is drawn anew, `step` units smaller.

    Args:
        draw: makes a random draft of a given size (in haystack units).
        room: the length to fit.
        size: units of the first try.
        step: units fewer at each retry (1 for a tight fit); `step` or less is not reduced further.
        least: units below which the task makes no sense. Upstream has no such bound, and there
            either loops for ever or lists fewer answers than it asks for.

    Raises:
        UserError: even the smallest size is too long.
    """
    step = 1 if room.tight else step
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
