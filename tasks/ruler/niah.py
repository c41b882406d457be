"""RULER's needle tasks: keys with values in repeated noise, among other needles, or in essays."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice
from typing import Any

import numpy as np
from punkt import sent_tokenize

from .data import NEEDLE, NOISE, TASKS, magic_words
from .fit import Draft, Room, draw_fitting, fill, largest_size

_TASK = TASKS["niah"]
_SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))
"""Replaced in this order in the template of a task that asks for one value."""
_DEPTHS: list[int] = np.linspace(0, 100, 40).round().astype(int).tolist()
"""Percent of an essay's sentences before a needle."""


def drafts(room: Room, settings: dict[str, Any], seed: int, essays: str) -> Iterator[Draft]:
    """Endless samples; `settings` are the niah arguments of RULER's synthetic.yaml.

    Only an essay haystack reads `essays`: as many of its words as fit, from the first one on, again and
    again if need be.
    """
    sentences = _sentences(essays)

    def draw(size: int, rng: random.Random) -> Draft:
        return _draft(size, settings, rng, seed, sentences)

    if room.tight:
        yield from fill(lambda own, size: draw(size, random.Random(own)), room, seed, least=1)
        return
    rng = random.Random(seed)
    step = 500 if settings["type_haystack"] == "essay" else 25 if room.length >= 4096 else 5
    tokens_per_unit = room.used(draw(step, rng)) / step
    upper = max(int(room.length / tokens_per_unit * 3), 2 * step)
    size = largest_size(lambda units: room.fits(draw(units, rng)), step, upper)
    while True:
        yield draw_fitting(lambda units: draw(units, rng), room, size, step, least=1)


@dataclass(frozen=True)
class _Needle:
    key: str
    value: str
    text: str


def _draft(
    size: int,
    settings: dict[str, Any],
    rng: random.Random,
    seed: int,
    sentences: Callable[[int], list[str]],
) -> Draft:
    """Needles in `size` units of haystack; the same shuffle of them in every sample."""
    asked: int = settings["num_needle_q"]
    keys = max(settings["num_needle_k"], asked)
    needles = [needle for _ in range(keys) for needle in _needles(settings, rng)]
    hidden = needles.copy()
    random.Random(seed).shuffle(hidden)
    if settings["type_haystack"] == "essay":
        context, depths = _in_essay([needle.text for needle in hidden], sentences(size), rng)
    else:
        context, depths = _in_lines([needle.text for needle in hidden], size, settings, rng)

    values: int = settings["num_needle_v"]
    groups = [needles[values * i : values * (i + 1)] for i in rng.sample(range(keys), asked)]
    answers = [needle for group in groups for needle in group]
    single = len(answers) == 1
    kind: str = settings["type_needle_v"]
    blanks = {
        "type_needle_v": kind.removesuffix("s") if single else kind,
        "context": context,
        "query": _listed([group[0].key for group in groups]),
    }
    template, prefix = _TASK["template"], _TASK["answer_prefix"]
    return Draft(
        prompt=(singular(template) if single else template).format(**blanks),
        answer_prefix=(singular(prefix) if single else prefix).format(**blanks),
        references=tuple(needle.value for needle in answers),
        fields={"depth": depths[hidden.index(answers[0])]} if single else {},
    )


def _needles(settings: dict[str, Any], rng: random.Random) -> list[_Needle]:
    """One key with its values."""
    kind: str = settings["type_needle_v"]
    key = _random(settings["type_needle_k"], rng)
    values = [_random(kind, rng) for _ in range(settings["num_needle_v"])]
    return [_Needle(key, v, NEEDLE.format(type_needle_v=kind, key=key, value=v)) for v in values]


def _in_essay(needles: list[str], sentences: list[str], rng: random.Random) -> tuple[str, list[int]]:
    """Essay with the needles between its sentences, and how deep each lies in percent of them."""
    depths = rng.sample(_DEPTHS, len(needles))
    places = sorted(int(len(sentences) * (depth / 100)) for depth in depths)
    parts: list[str] = []
    for start, end, needle in zip([0, *places], places, needles, strict=False):
        parts += [" ".join(sentences[start:end]), needle]
    parts.append(" ".join(sentences[places[-1] :]))
    return " ".join(parts), sorted(depths)


def _in_lines(
    needles: list[str], size: int, settings: dict[str, Any], rng: random.Random
) -> tuple[str, list[int]]:
    """Lines of noise or of other needles with the needles among them, and their depths in percent."""
    if settings["type_haystack"] == "noise":
        lines = [NOISE] * size
    else:
        # each with a key of its own, however many values a key has
        lines = [_needles({**settings, "num_needle_v": 1}, rng)[0].text for _ in range(size)]
    places = sorted(rng.sample(range(size), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines), [round(100 * place / size) for place in places]


@lru_cache(maxsize=1)
def _sentences(essays: str) -> Callable[[int], list[str]]:
    """Gives the sentences of the first so many words: many samples, of all essay tasks, ask for the same."""
    words = re.sub(r"\s+", " ", essays).split(" ")

    @lru_cache(maxsize=8)
    def sentences(size: int) -> list[str]:
        return list(sent_tokenize(" ".join(islice(cycle(words), size)).strip()))

    return sentences


def _listed(keys: list[str]) -> str:
    """Upstream's way to list names, with a comma before "and" also between two."""
    return ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]


def singular(template: str) -> str:
    """A template of RULER's for a task that asks for one value."""
    for plural, singular in _SINGULAR:
        template = template.replace(plural, singular)
    return template


def _random(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return rng.choice(magic_words())
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
