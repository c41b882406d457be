"""The two averages of LongBench scores that are in use."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from structkv_bench.task import labelled

from .catalog import ENGLISH, SPECS
from .official import Score

_WITH_CHINESE = [name for name, spec in SPECS.items() if spec.language != "en"]
"""The Chinese tasks, and those of code, which LongBench counts on both sides."""


def averages(scores: Mapping[str, Score]) -> dict[str, float]:
    """Both averages of tasks' scores, to two decimals, under names that say which they are.

    The KV-cache papers report the plain mean of the 16 English tasks; LongBench's README weighs its six
    categories equally (for Chinese too, which is here if there is a Chinese score). Where tasks are
    missing the name says over how many of how many it is. LongBench-E's buckets are in none.
    """
    plain = {name: value for name, value in scores.items() if name in SPECS and not isinstance(value, dict)}
    english = {name: plain[name] for name in ENGLISH if name in plain}
    chinese = {name: plain[name] for name in _WITH_CHINESE if name in plain}
    found = {}
    if english:
        extent = (len(english), len(ENGLISH), "tasks")
        found[labelled("avg16 (plain mean of the 16 English tasks)", *extent)] = _mean(english.values())
        found[labelled("official (mean of category means)", *extent)] = _by_category(english)
    if any(SPECS[name].language == "zh" for name in chinese):
        label = labelled("official zh (mean of category means)", len(chinese), len(_WITH_CHINESE), "tasks")
        found[label] = _by_category(chinese)
    return {label: round(value, 2) for label, value in found.items()}


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)


def _by_category(scores: Mapping[str, float]) -> float:
    categories: dict[str, list[float]] = {}
    for name, value in scores.items():
        categories.setdefault(SPECS[name].category, []).append(value)
    return _mean([_mean(values) for values in categories.values()])
