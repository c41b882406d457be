"""Figure 1b: the three-way comparison at one KV budget: score, prefill and KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from structkv_bench.report.figures import fig1a
from structkv_bench.report.figures.lines import Line, grouped
from structkv_bench.report.figures.style import blank, looks
from structkv_bench.report.stored import Stored

NEAREST = 10.0
"""The budget that is shown is the one nearest to this, in percent."""
PANELS = {
    "score": "score (%)",
    "prefill_pct": "prefill: tokens processed (%)",
    "kv_pct": "KV cache held (% of bytes)",
}
CAPTION = (
    "Score: plain mean of the tasks' means, with its 95 % interval where the samples give one. Prefill: "
    "mean over layers of the share of the prompt's tokens that were processed. KV: bytes held after the "
    "prompt. The last two as measured; methods without a nominal budget stand at what they hold."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each method, at the nominal budget nearest to 10 %, or without one."""
    lines = fig1a.data(cells)
    budgets = {line["kv_nominal_pct"] for line in lines} - {None}
    shown = {None, min(budgets, key=lambda budget: (abs(budget - NEAREST), budget), default=None)}
    return [line for line in lines if line["kv_nominal_pct"] in shown]


def draw(lines: Sequence[Line]) -> Figure:
    """A row of three axes per model, a bar per method."""
    models = grouped(lines, lambda line: line["model"])
    most = max(map(len, models.values()))
    figure = blank(11, (0.9 + 0.36 * most) * len(models))
    rows = figure.subplots(len(models), len(PANELS), squeeze=False, sharey="row", sharex=True)
    for places, (model, its) in zip(rows, models.items(), strict=True):
        for place, (value, label) in zip(places, PANELS.items(), strict=True):
            _bars(place, its, value)
            place.set_xlabel(label)
        if len(models) > 1:
            places[0].set_title(model, loc="left")
    return figure


def _bars(axes: Axes, lines: Sequence[Line], value: str) -> None:
    styles = looks(line["method"] for line in lines)
    for place, line in enumerate(lines):
        number = line[value]
        if number is None:
            axes.text(1, place, f"{line['n']} of {line['asked']} samples", va="center", fontsize=9)
            continue
        axes.barh(place, number, height=0.68, color=styles[line["method"]].colour, edgecolor="black")
        end = number
        if value == "score" and line["high"] is not None:
            reach = [[max(0.0, number - line["low"])], [max(0.0, line["high"] - number)]]
            for colour, width in (("white", 3.2), ("black", 1.2)):  # seen on a black bar too
                axes.errorbar(number, place, xerr=reach, color=colour, capsize=3, linewidth=width)
            end = max(number, line["high"])
        axes.text(end + 1.5, place, f"{number:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(lines)), [_label(line) for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)  # the first on top
    axes.set_xlim(0, 1.18 * max([100.0, *(line[value] or 0 for line in lines)]))
    axes.set_xticks(range(0, 101, 20))
    axes.grid(axis="y", visible=False)


def _label(line: Line) -> str:
    nominal = line["kv_nominal_pct"]
    return f"{line['method']}" + ("" if nominal is None else f" {nominal:g} %")
