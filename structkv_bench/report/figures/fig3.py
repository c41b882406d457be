"""Figure 3: the pivot layer that StructKV finds, by model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from structkv_bench.report.figures.lines import Line, by_who, grouped, lacking, layers, rounded
from structkv_bench.report.figures.style import BLACK, VERMILLION, blank
from structkv_bench.report.paper import read_csv
from structkv_bench.report.stored import Stored

OURS, PAPER = "measured", "paper, secondary"
HIGHEST = 0.75
"""Height of a bar that stands for all samples; rows are 1 apart."""
HOLLOW: Any = {"linestyle": "", "marker": "D", "markersize": 9, "fillstyle": "none", "color": BLACK}
CAPTION = (
    "Bars: pivots measured, as high as their share of the samples. Hollow: what the paper prints, "
    "secondary (as others quote it). Layers count from 0; the share of the depth is the pivot's number "
    "over the number of layers."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each pivot of a model at a length, and for each of the paper's."""
    lines = [
        line
        for columns, its in by_who(cells)
        for length, same in grouped(its, lambda cell: cell.length).items()
        for line in _measured(columns["model"], columns["method"], length, same)
    ]
    if not lines:
        raise lacking("fig3", "no row has signals of a pivot's detection, as structkv's do")
    return lines + [_printed(row) for row in read_csv("figures.csv") if row["figure"] == "fig3"]


def _measured(model: str, method: str, length: int, cells: Sequence[Stored]) -> list[Line]:
    rows = [r for cell in cells for r in cell.ok.values() if "signals" in r and r["pivot"] is not None]
    counts = sorted(Counter((r["pivot"], layers(r)) for r in rows).items())
    return [
        _line(OURS, model, method, length, depth, pivot) | {"samples": count, "n": len(rows)}
        for (pivot, depth), count in counts
    ]


def _printed(row: dict[str, str]) -> Line:
    """One of the paper's values, as "qwen2_5_7b_instruct (28 layers)" and "about 20"."""
    model, depth = re.findall(r"^(\S+) \((\d+) layers\)$", row["subject"])[0]
    pivot = int(re.findall(r"\d+", row["value"])[0])
    return _line(PAPER, model.removesuffix("_instruct"), "structkv", None, int(depth), pivot)


def _line(source: str, model: str, method: str, length: int | None, depth: int, pivot: int) -> Line:
    share = rounded(100 * pivot / depth)
    columns = {"source": source, "model": model, "method": method, "length": length, "layers": depth}
    return columns | {"pivot": pivot, "depth_pct": share, "samples": None, "n": None}


def draw(lines: Sequence[Line]) -> Figure:
    """A row per model: where its pivots are, as layers and as shares of the depth."""
    rows = grouped(lines, lambda line: (line["model"], line["method"]))
    figure = blank(10, 1.3 + 0.6 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    for place, its in enumerate(rows.values()):
        for axes, value in ((left, "pivot"), (right, "depth_pct")):
            _marks(axes, place, its, value)
    left.set_yticks(range(len(rows)), [_label(its) for its in rows.values()])
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set_xlim(0, max(line["layers"] for line in lines))
    left.set_xlabel("pivot layer L*, from 0 (axis to the deepest model)")
    right.set_xlim(0, 100)
    right.set_xlabel("pivot (% of the model's depth)")
    keys = [Patch(facecolor=VERMILLION, edgecolor=BLACK, label=OURS), Line2D([], [], label=PAPER, **HOLLOW)]
    figure.legend(handles=keys, loc="outside right center", handlelength=1.4)
    return figure


def _marks(axes: Axes, place: int, lines: Sequence[Line], value: str) -> None:
    counts: Counter[float] = Counter()
    for line in lines:
        if line["source"] == PAPER:
            axes.plot(line[value], place, **HOLLOW, zorder=4)
        else:
            counts[line[value]] += line["samples"]
    wide = 0.8 if value == "pivot" else 80 / lines[0]["layers"]
    for x, count in counts.items():  # from the row's ground upwards, which is down on this axis
        height = -HIGHEST * count / counts.total()
        axes.bar(
            x, height, wide, bottom=place + HIGHEST / 2, color=VERMILLION, edgecolor=BLACK, linewidth=0.6
        )


def _label(lines: Sequence[Line]) -> str:
    first = lines[0]
    settings = first["method"].partition(" ")[2]
    n = sum(line["samples"] or 0 for line in lines)
    name = first["model"] + (f"\n{settings}" if settings else "")
    return f"{name}\n{first['layers']} layers, " + (f"n = {n}" if n else "not run")
