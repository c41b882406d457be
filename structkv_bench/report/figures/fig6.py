"""Figure 6: StructKV's two budgets against each other, R_struct and R_KV."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from structkv_bench.report.figures.lines import Line, grouped, lacking, percent, scored, shares
from structkv_bench.report.figures.style import blank, grid_of
from structkv_bench.report.naming import method_label
from structkv_bench.report.stored import Stored
from structkv_bench.report.table import build

COLOURS = "cividis"
"""Made for all kinds of colour vision; in grey it goes from dark to light."""
CAPTION = (
    "Score: plain mean of the tasks' means, in percent, its 95 % interval where the samples give one, and n "
    "samples. R_struct: share of the prompt's tokens that go on after the pivot; R_KV: share of the KV "
    "entries kept in each layer, as far as it has so many. KV: bytes held after the prompt, as measured."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each pair of budgets.

    Raises:
        UserError: no method here has a struct_ratio.
    """
    lines = []
    for row in build(_with_both(cells), "method.kv_ratio").rows:
        about = row.cells[0].about
        for column, entry in row.entries.items():
            lines.append(
                {
                    "model": row.model,
                    "method": method_label(about, ("struct_ratio",)),
                    "struct_pct": percent(about["config"]["method"]["struct_ratio"]),
                    "kv_nominal_pct": percent(float(column)),
                    **shares(entry.parts.values()),
                    **scored(entry),
                }
            )
    if not lines:
        raise lacking("fig6", "no method here has a struct_ratio and a kv_ratio, as structkv does")
    return lines


def _with_both(cells: Sequence[Stored]) -> list[Stored]:
    needed = ("struct_ratio", "kv_ratio")
    return [
        c for c in cells if all(isinstance(c.about["config"]["method"].get(n), int | float) for n in needed)
    ]


def draw(lines: Sequence[Line]) -> Figure:
    """Axes per model: a heat map with its numbers."""
    panels = grouped(lines, lambda line: (line["model"], line["method"]))
    most = [len({line[name] for line in lines}) for name in ("kv_nominal_pct", "struct_pct")]
    columns = min(2, len(panels))
    figure = blank(
        (1.2 + max(3.0, 1.15 * most[0])) * columns + 1, (1 + 0.85 * most[1]) * -(-len(panels) // columns)
    )
    axes = grid_of(figure, len(panels), columns)
    shown = [line["score"] for line in lines if line["score"] is not None]
    # to the next tens, so that a difference of a point does not look like one of a hundred
    scale = Normalize(10 * floor(min(shown, default=0) / 10), 10 * max(1, ceil(max(shown, default=100) / 10)))
    for place, ((model, method), its) in zip(axes, panels.items(), strict=True):
        _heat(place, its, scale)
        place.set_title(f"{model}, {method}" if len(panels) > 1 else method, loc="left")
    figure.colorbar(ScalarMappable(scale, COLOURS), ax=axes, label="score (%)")
    return figure


def _heat(axes: Axes, lines: Sequence[Line], scale: Normalize) -> None:
    x, y = (sorted({line[name] for line in lines}) for name in ("kv_nominal_pct", "struct_pct"))
    colours = ScalarMappable(scale, COLOURS)
    for line in lines:
        column, row = x.index(line["kv_nominal_pct"]), y.index(line["struct_pct"])
        score = line["score"]
        if score is None:
            face: Any = "white"
            ink, text = "black", f"{line['n']} of {line['asked']}"
        else:
            face = colours.to_rgba(score)
            ink = "black" if scale(score) > 0.5 else "white"
            text = f"{score:.1f}\n{_interval(line)}n = {line['n']}\nKV {line['kv_pct']:.1f} %"
        axes.add_patch(_square(column, row, face))
        axes.text(column, row, text, color=ink, ha="center", va="center", fontsize=9)
    axes.set_xticks(range(len(x)), [f"{value:g}" for value in x])
    axes.set_yticks(range(len(y)), [f"{value:g}" for value in y])
    axes.set_xlim(-0.5, len(x) - 0.5)
    axes.set_ylim(-0.5, len(y) - 0.5)
    axes.set_xlabel("R_KV (% of the entries)")
    axes.set_ylabel("R_struct (% of the tokens)")
    axes.grid(visible=False)


def _interval(line: Line) -> str:
    return "" if line["low"] is None else f"{line['low']:.0f} to {line['high']:.0f}\n"


def _square(column: int, row: int, face: Any) -> Rectangle:
    return Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=1.5)
