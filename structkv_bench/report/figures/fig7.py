"""Figure 7: where the time of a prefill goes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from structkv_bench.report.figures.lines import Line, asked, by_who, grouped, lacking, names, rounded
from structkv_bench.report.figures.style import BLACK, BLUE, ORANGE, SKY, VERMILLION, blank, grid_of
from structkv_bench.report.stored import Stored
from structkv_bench.store import Row

PARTS = {
    "attention": (BLUE, ""),
    "mlp": (SKY, "////"),
    "scoring": (ORANGE, "...."),
    "detection": (BLACK, ""),
    "selection": (VERMILLION, "xxxx"),
}
"""Colour and hatch; the hatch tells them in grey."""
OVERHEAD = ("scoring", "detection", "selection")
CAPTION = (
    "Seconds of a method's own way through the layers, as if no other method had shared it; medians over "
    "samples. Beside a bar: how many times faster than `full` at that length (ratio of the medians), and "
    "the share of scoring, detection and selection in the prefill. Attention has its projections, MLP the "
    "norm before it."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each method at a length.

    Raises:
        UserError: rows don't tell the parts of their prefill.
    """
    lines = []
    for columns, its in by_who(cells):
        for length, same in grouped(its, lambda cell: cell.length).items():
            rows = [row for cell in same for row in cell.ok.values()]
            if not all(row.get("prefill_parts_s") for row in rows):
                raise lacking("fig7", f"rows of {columns['method']} at {length} have no prefill_parts_s")
            n = {"n": len(rows), "asked": asked(same)}
            lines.append(columns | {"length": length} | _times(rows) | n)
    full = {(one["model"], one["length"]): one["prefill_s"] for one in lines if one["method"] == "full"}
    for line in lines:
        reference, own = full.get((line["model"], line["length"])), line["prefill_s"]
        line["speedup_x"] = rounded(reference / own) if reference and own else None
    return lines


def _times(rows: Sequence[Row]) -> Line:
    """Medians; of a length without rows there are none."""
    if not rows:
        return dict.fromkeys([*(f"{part}_s" for part in PARTS), "prefill_s", "overhead_pct"])
    times: Line = {
        f"{p}_s": rounded(median(row["prefill_parts_s"].get(p, 0.0) for row in rows), 6) for p in PARTS
    }
    overheads = [
        100 * sum(row["prefill_parts_s"].get(part, 0.0) for part in OVERHEAD) / row["prefill_s"]
        for row in rows
        if row["prefill_s"]
    ]
    return times | {
        "prefill_s": rounded(median(row["prefill_s"] for row in rows), 6),
        "overhead_pct": rounded(median(overheads)) if overheads else None,
    }


def draw(lines: Sequence[Line]) -> Figure:
    """Axes per model and length: a stacked bar per method."""
    named = [line | {"name": name} for line, name in zip(lines, names(lines), strict=True)]
    panels = grouped(named, lambda line: (line["model"], line["length"]))
    columns = min(3, len(panels))
    most = max(map(len, panels.values()))
    several = len({line["model"] for line in lines}) > 1
    figure = blank(2.2 + 4 * columns, (1.1 + 0.42 * most) * -(-len(panels) // columns))
    axes = grid_of(figure, len(panels), columns)
    for number, (place, ((model, length), its)) in enumerate(zip(axes, panels.items(), strict=True)):
        _bars(place, its, with_names=number % columns == 0)
        place.set_title(f"{model}, " * several + f"{length:,} tokens", loc="left")
        place.set_xlabel("prefill (s)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", handlelength=1.6, handleheight=1.1)
    return figure


def _bars(axes: Axes, lines: Sequence[Line], with_names: bool) -> None:
    ends = [0.0] * len(lines)
    for part, (colour, hatch) in PARTS.items():
        seconds = [line[f"{part}_s"] or 0.0 for line in lines]
        style: Any = {"color": colour, "hatch": hatch, "edgecolor": "white" if hatch else colour}
        axes.barh(range(len(lines)), seconds, left=ends, height=0.7, label=part, linewidth=0, **style)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    for place, (line, end) in enumerate(zip(lines, ends, strict=True)):
        axes.text(end + 0.02 * max(ends), place, _told(line), va="center", fontsize=9)
    axes.set_yticks(range(len(lines)), [line["name"] if with_names else "" for line in lines])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(0, 1.55 * max(ends) or 1)  # room for what stands beside the longest
    axes.grid(axis="y", visible=False)


def _told(line: Line) -> str:
    if line["prefill_s"] is None:
        return f"{line['n']} of {line['asked']} samples"
    faster = "" if line["speedup_x"] is None else f"{line['speedup_x']:.2f}x, "
    return f"{faster}{line['overhead_pct'] or 0:.1f} %"
