"""Figure 1a: score against the KV cache that is left."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy import nan

from structkv_bench.report.figures.lines import Line, grouped, percent, scored, shares
from structkv_bench.report.figures.style import Look, blank, grid_of, looks
from structkv_bench.report.stored import Stored
from structkv_bench.report.table import build

CAPTION = (
    "Score: plain mean of the tasks' means, in percent. KV: bytes of K and V held after the prompt, in "
    "percent of the full cache's, as measured. Bands and bars: 95 % interval, where the samples give one."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each method and nominal KV budget."""
    return [
        {
            "model": row.model,
            "method": row.label,
            "kv_nominal_pct": None if column == "-" else percent(float(column)),
            **shares(entry.parts.values()),
            **scored(entry),
        }
        for row in build(cells, "method.kv_ratio").rows
        for column, entry in row.entries.items()
    ]


def draw(lines: Sequence[Line]) -> Figure:
    """Axes per model: a line per method with its band, the full cache as a horizontal line."""
    models = grouped(lines, lambda line: line["model"])
    figure = blank(3.2 + 5.2 * len(models), 4.6)
    styles = looks(line["method"] for line in lines)
    axes = grid_of(figure, len(models), len(models), sharey=True)
    for place, (model, its) in zip(axes, models.items(), strict=True):
        for method, points in grouped(its, lambda line: line["method"]).items():
            _method(place, method, [p for p in points if p["score"] is not None], styles[method])
        if all(line["score"] is None for line in its):
            place.text(
                0.5, 0.5, "no score yet: some task has no sample", transform=place.transAxes, ha="center"
            )
        budgets = sorted({line["kv_nominal_pct"] for line in its} - {None})
        held = [line["kv_pct"] for line in its if line["kv_pct"] and line["method"] != "full"]
        place.set_xscale("log")
        place.set_xlim(0.85 * min(held + budgets, default=1), 1.18 * max(held + budgets, default=100))
        place.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        place.minorticks_off()
        place.set_xlabel("KV cache held (% of bytes, log scale)")
        place.set_title(model if len(models) > 1 else "")
    axes[0].set_ylabel("score (%)")
    top = max((line["high"] or line["score"] for line in lines if line["score"] is not None), default=100)
    axes[0].set_ylim(-0.03 * (top or 1), 1.05 * (top or 1))  # a line at 0 is seen too
    drawn = {line["method"] for line in lines if line["score"] is not None}
    keys = [Line2D([], [], label=name, **look.line) for name, look in styles.items() if name in drawn]
    figure.legend(handles=keys, loc="outside right center")
    return figure


def _method(axes: Axes, method: str, points: list[Line], look: Look) -> None:
    if not points:
        return
    if method == "full":
        axes.axhline(points[0]["score"], **look.line | {"marker": ""}, linewidth=1.6)
        if points[0]["low"] is not None:
            axes.axhspan(points[0]["low"], points[0]["high"], color=look.colour, alpha=0.06, linewidth=0)
        return
    x, y, low, high = ([_number(p[name]) for p in points] for name in ("kv_pct", "score", "low", "high"))
    thick = 2.4 if method == "structkv" else 1.6
    if len(points) == 1:
        reach = [[max(0.0, y[0] - low[0])], [max(0.0, high[0] - y[0])]] if low[0] == low[0] else None
        axes.errorbar(x, y, yerr=reach, **look.line, capsize=3)
        return
    axes.fill_between(x, low, high, color=look.colour, alpha=0.13, linewidth=0)
    axes.plot(x, y, **look.line, linewidth=thick, zorder=3 if method == "structkv" else 2)


def _number(value: float | None) -> float:
    """With a gap where there is none."""
    return nan if value is None else value
