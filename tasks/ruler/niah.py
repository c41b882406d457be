"""RULER's needle tasks with one needle: in repeated noise, or among other needles."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

from .data import NEEDLE, NOISE, TASKS, magic_words
from .fit import Draft, Room, draw_fitting, largest_size

_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
"""Replaced in this order in the template of a task that asks for one value."""


def drafts(room: Room, settings: dict[str, Any], seed: int) -> Iterator[Draft]:
    """Endless samples; `settings` are the niah arguments of RULER's synthetic.yaml."""
    rng = random.Random(seed)
    step = 25 if room.length >= 4096 else 5

    def draw(size: int) -> Draft:
        return _draft(size, settings, rng)

    tokens_per_unit = room.used(draw(step)) / step
    upper = max(int(room.length / tokens_per_unit * 3), 2 * step)
    size = largest_size(lambda units: room.fits(draw(units)), step, upper)
    while True:
        yield draw_fitting(draw, room, size, step, least=1)


def _draft(size: int, settings: dict[str, Any], rng: random.Random) -> Draft:
    """One needle among `size` units of haystack."""
    kind = settings["type_needle_v"]

    def needle(key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=kind, key=key, value=value)

    key, value = _random(settings["type_needle_k"], rng), _random(kind, rng)
    if settings["type_haystack"] == "noise":
        units = [NOISE] * size
    else:
        units = [needle(_random(settings["type_needle_k"], rng), _random(kind, rng)) for _ in range(size)]
    (position,) = rng.sample(range(size), 1)
    units.insert(position, needle(key, value))
    rng.sample(range(1), 1)  # upstream draws which of its keys to ask for, though there is but one

    blanks = {"type_needle_v": kind.removesuffix("s"), "context": "\n".join(units), "query": key}
    return Draft(
        prompt=_singular(TASKS["niah"]["template"]).format(**blanks),
        answer_prefix=_singular(TASKS["niah"]["answer_prefix"]).format(**blanks),
        references=(value,),
        fields={"depth": round(100 * position / size)},
    )


def _singular(template: str) -> str:
    for plural, singular in _SINGULAR:
        template = template.replace(plural, singular)
    return template


def _random(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return rng.choice(magic_words())
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
