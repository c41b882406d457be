"""What the parts of `make bench` share: how much is measured, on which texts, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from structkv_bench import models
from structkv_bench.bench.timing import Spread, Timed, timed
from structkv_bench.config import compose
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.plan import plan
from structkv_bench.samples import prompts_of

Section = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is measured, and on what."""

    repeats: int = 3
    divisor: int = 1
    """Of every prompt's length: 8 is for a trial."""
    overrides: tuple[str, ...] = ("model=smollm2_135m",)
    new_tokens: int = 32

    def tokens(self, full: int) -> int:
        """Length of the prompts that stand for `full` tokens."""
        return full // self.divisor


def method(name: str, **settings: object) -> Method:
    """A method of conf/method/ with these settings."""
    own = [f"method.{key}={value}" for key, value in settings.items()]
    return compose([f"method={name}", *own])[0].method


def loaded(scale: Scale) -> Model:
    """The model, as a run loads it."""
    return models.load(compose([*scale.overrides, "method=full"])[0].model)


def texts(model: Model, scale: Scale, tokens: int, count: int) -> list[list[int]]:
    """Prompts of exactly `tokens` tokens, each from another place of the essays."""
    niah = {"depths": 1, "samples": count, "lengths": f"[{tokens + scale.new_tokens}]",
            "max_new_tokens": scale.new_tokens}  # fmt: skip
    wanted = ["method=full", "task=niah", *(f"task.{key}={value}" for key, value in niah.items())]
    [group] = plan(compose([*wanted, *scale.overrides]))
    prompts = [model.prompts.parts(prompt.sample)[0] for prompt in prompts_of(group, model.prompts)]
    return [ids + ids[-1:] * (tokens - len(ids)) for ids in prompts]  # a token that decoding lost, if any


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median and quartiles, to four digits."""
    found = Spread.of(values)
    return {name: float(f"{getattr(found, name):.4g}") for name in ("median", "q1", "q3")}


def over(some: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Spread of the ratios, repeat by repeat."""
    return spread(a / b for a, b in zip(some, others, strict=True))


def in_turn(
    model: Model, scale: Scale, tokens: int, groups: dict[str, list[Method]], new_tokens: int
) -> dict[str, list[Timed]]:
    """Each group timed on each repeat's prompt: A B C, A B C ...; the first of its times is the warm-up's."""
    times: dict[str, list[Timed]] = {name: [] for name in groups}
    for number, ids in enumerate(texts(model, scale, tokens, scale.repeats + 1)):
        for name, methods in groups.items():
            times[name].append(timed(model, methods, ids, new_tokens, look=number == 0))
    return times
