"""RULER's variable tracking: find all names in a chain of assignments, after one worked example."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from structkv_bench.errors import UserError

from .data import NOISE, TASKS
from .fit import Draft, Room, draw_fitting, largest_size

_TASK = TASKS["variable_tracking"]
_EXAMPLE_TOKENS = 500
_EXAMPLE_VALUE = "12345"


def drafts(room: Room, settings: dict[str, Any], seed: int) -> Iterator[Draft]:
    """Endless samples, each behind its own renaming of one worked example."""
    rng, values = random.Random(seed), np.random.RandomState(seed)
    hops: int = settings["num_hops"]
    example, names = _example(room, hops, rng)
    example_tokens = len(room.prompts.encode(example))

    def draw(size: int) -> Draft:
        return _draft(size, _names(hops + 1, 5, rng), _value(values), rng)

    def draw_whole(size: int) -> Draft:
        draft = draw(size)
        return replace(draft, prompt=f"{_renamed(example, names, rng, values)}\n{draft.prompt}")

    step = 10 if room.length >= 4096 else 5
    size = _size(draw, room, step, example_tokens)
    while True:
        yield draw_fitting(draw_whole, room, size, step, least=hops + 1)


def _size(draw: Callable[[int], Draft], room: Room, step: int, reserved: int) -> int:
    tokens_per_unit = room.used(draw(step)) / step
    upper = max(int(room.length / tokens_per_unit * 3), 2 * step)
    return largest_size(lambda units: room.fits(draw(units), reserved), step, upper)


def _example(room: Room, hops: int, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Text of the worked example with its answers, and the names in it."""
    room = replace(room, length=_EXAMPLE_TOKENS, max_new_tokens=0, templated=False, tight=False)

    def draw(size: int) -> Draft:
        return _draft(size, _names(hops + 1, 3, rng), _EXAMPLE_VALUE, rng)

    size = _size(draw, room, step=5, reserved=0)
    try:
        draft = draw_fitting(draw, room, size, step=5, least=hops + 1)
    except UserError:
        raise UserError(
            f"RULER's vt puts a worked example of {_EXAMPLE_TOKENS} tokens before its text, and this "
            "model's tokenizer needs more for it: leave vt out of task.subset"
        ) from None
    answers = " ".join(draft.references)
    return f"{draft.prompt}{draft.answer_prefix} {answers}\n", draft.references


def _draft(size: int, names: tuple[str, ...], value: str, rng: random.Random) -> Draft:
    """A chain of assignments over `names` among `size` units of noise."""
    chain = [f"VAR {names[0]} = {value}"]
    # The space at the end of a line is upstream's.
    chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    lines = [NOISE] * size
    for shift, position in enumerate(sorted(rng.sample(range(size), len(chain)))):
        lines.insert(position + shift, chain[shift])
    blanks = {"context": "\n".join(lines), "query": value, "num_v": len(names)}
    return Draft(
        prompt=_TASK["template"].format(**blanks),
        answer_prefix=_TASK["answer_prefix"].format(**blanks),
        references=names,
    )


def _renamed(example: str, names: tuple[str, ...], rng: random.Random, values: np.random.RandomState) -> str:
    """The example with new names and a new value."""
    for name in names:
        example = example.replace(name, _name(len(name), rng))
    return example.replace(_EXAMPLE_VALUE, _value(values))


def _names(count: int, letters: int, rng: random.Random) -> tuple[str, ...]:
    """`count` distinct random names (upstream breaks off on a repeat, so any redraw will do)."""
    names: list[str] = []
    while len(names) < count:
        name = _name(letters, rng)
        if name not in names:
            names.append(name)
    return tuple(names)


def _name(letters: int, rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))


def _value(values: np.random.RandomState) -> str:
    return str(values.randint(10000, 99999))
