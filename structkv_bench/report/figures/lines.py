"""What the figures' data have in common: tidy lines, whose numbers are all that a figure shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Any, TypeVar

from structkv_bench.errors import UserError
from structkv_bench.report.naming import kv_ratio, method_label
from structkv_bench.report.statistics import interval_of_mean_of_means
from structkv_bench.report.stored import Stored
from structkv_bench.report.table import Entry

T = TypeVar("T")
K = TypeVar("K")

Line = dict[str, Any]
"""One line of a figure's CSV file; None where there is nothing to say."""

CUTS = 99.99
"""A method whose prefill is below this share dropped tokens on the way."""


def who(cell: Stored) -> Line:
    """The columns that name a method at a KV budget on a model."""
    ratio = kv_ratio(cell.about)
    nominal = None if ratio is None else rounded(100 * ratio)
    return {"model": cell.model, "method": method_label(cell.about), "kv_nominal_pct": nominal}


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, both in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_who(cells: Iterable[Stored]) -> list[tuple[Line, list[Stored]]]:
    """The cells of each method at a budget on a model, with the columns that name it."""
    return [(who(its[0]), its) for its in grouped(cells, lambda cell: tuple(who(cell).values())).values()]


def scored(entry: Entry) -> Line:
    """Score in percent, its 95 % interval and its n; without a score where a part has no sample at all."""
    line: Line = {"score": None, "low": None, "high": None, "n": entry.n, "asked": entry.asked}
    if entry.score is not None:
        limits = interval_of_mean_of_means([list(cell.scores.values()) for cell in entry.parts.values()])
        line |= {"score": rounded(entry.score), "low": percent(limits.low), "high": percent(limits.high)}
    return line


def shares(cells: Iterable[Stored]) -> Line:
    """KV bytes and processed tokens in percent, as measured: means over all samples that worked."""
    rows = [row for cell in cells for row in cell.ok.values()]
    if not rows:
        return {"kv_pct": None, "prefill_pct": None}
    return {
        "kv_pct": rounded(fmean(100 * row["kv_bytes"] / row["kv_bytes_full"] for row in rows)),
        "prefill_pct": rounded(fmean(row["prefill_pct"] for row in rows)),
    }


def asked(cells: Iterable[Stored]) -> int:
    """Samples that an experiment wanted of them."""
    return sum(max(cell.asked, len(cell.rows)) for cell in cells)


def layers(row: Line) -> int:
    """Of the model that made a row."""
    return len(row["kept_entries"])


def rounded(value: float | None, digits: int = 4) -> float | None:
    """As it stands in the file: no figure shows more, and no float's last bits get into it."""
    return None if value is None else round(value, digits)


def percent(value: float | None) -> float | None:
    """A fraction in percent."""
    return None if value is None else rounded(100 * value)


def names(lines: Sequence[Line]) -> list[str]:
    """What each line's method is called in the figure: with its budget, where it has several."""
    budgets = grouped(lines, lambda line: line["method"])
    several = {method for method, its in budgets.items() if len({line["kv_nominal_pct"] for line in its}) > 1}
    return [
        f"{line['method']} {line['kv_nominal_pct']:g} %"
        if line["method"] in several and line["kv_nominal_pct"] is not None
        else line["method"]
        for line in lines
    ]


def lacking(figure: str, what: str) -> UserError:
    """The rows don't have what the figure shows, and a further run of the same cells would not add it."""
    return UserError(
        f"{figure}: {what}; `structkv-bench run experiment={figure} results_dir=NEW_FOLDER` measures it, "
        "in a folder without these rows"
    )
