"""RULER's variable tracking: find all names in a chain of assignments, after one worked example."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from structkv_bench.errors import UserError

from .data import NOISE, TASKS
from .fit import Draft, Room, draw_fitting, fill, largest_size

_TASK = TASKS["variable_tracking"]
_EXAMPLE_TOKENS = 500
_EXAMPLE_VALUE = "12345"


def drafts(room: Room, settings: dict[str, Any], seed: int) -> Iterator[Draft]:
    """Endless samples, each behind its own renaming of one worked example."""
    dice = _Dice.of(seed)
    least: int = settings["num_hops"] + 1
    example, names = _example(room, least, dice.rng)
    example_tokens = len(room.prompts.encode(example))

    def draw(size: int, dice: _Dice) -> Draft:
        return _draft(size, _names(least, 5, dice.rng), _value(dice), dice.rng)

    def draw_whole(size: int, dice: _Dice) -> Draft:
        draft = draw(size, dice)
        return replace(draft, prompt=f"{_renamed(example, names, dice)}\n{draft.prompt}")

    if room.tight:
        yield from fill(lambda own, size: draw_whole(size, _Dice.of(own)), room, seed, least)
        return
    step = 10 if room.length >= 4096 else 5
    size = _size(lambda units: draw(units, dice), room, step, example_tokens)
    while True:
        yield draw_fitting(lambda units: draw_whole(units, dice), room, size, step, least)


@dataclass(frozen=True)
class _Dice:
    """Upstream draws names and places from Python's generator, values from NumPy's."""

    rng: random.Random
    values: np.random.RandomState

    @classmethod
    def of(cls, seed: int) -> _Dice:
        return cls(random.Random(seed), np.random.RandomState(seed))


def _size(draw: Callable[[int], Draft], room: Room, step: int, reserved: int) -> int:
    tokens_per_unit = room.used(draw(step)) / step
    upper = max(int(room.length / tokens_per_unit * 3), 2 * step)
    return largest_size(lambda units: room.fits(draw(units), reserved), step, upper)


def _example(room: Room, count: int, rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Text of the worked example with its answers, and the `count` names in it."""
    room = replace(room, length=_EXAMPLE_TOKENS, max_new_tokens=0, templated=False, tight=False)

    def draw(size: int) -> Draft:
        return _draft(size, _names(count, 3, rng), _EXAMPLE_VALUE, rng)

    size = _size(draw, room, step=5, reserved=0)
    try:
        draft = draw_fitting(draw, room, size, step=5, least=count)
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


def _renamed(example: str, names: tuple[str, ...], dice: _Dice) -> str:
    """The example with new names and a new value."""
    for name in names:
        example = example.replace(name, _name(len(name), dice.rng))
    return example.replace(_EXAMPLE_VALUE, _value(dice))


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


def _value(dice: _Dice) -> str:
    return str(dice.values.randint(10000, 99999))
