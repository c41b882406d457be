"""Figure 8: needle in a haystack, by the needle's depth and the prompt's length."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from structkv_bench.report.figures.lines import Line, by_who, grouped, lacking, names, rounded, shares
from structkv_bench.report.figures.style import blank, grid_of
from structkv_bench.report.statistics import interval, interval_of_mean_of_means
from structkv_bench.report.stored import Stored

OFFICIAL = ("#F0496E", "#EBB839", "#0CD79F")
"""The colours of the official heat maps, which go from 0 to 1."""
COLOURS = LinearSegmentedColormap.from_list("niah", OFFICIAL)
SCALE = Normalize(0, 1)
ALL = "all"
WRITTEN = 10
"""So many lengths leave room for a number in each cell, which tells in grey what the colours tell."""
CAPTION = (
    "Score: share of the needle's 11 distinct words that the answer has, mean over samples; a title's "
    "number is the mean of the panel's cells. Colours and scale of the official heat maps. KV: bytes held "
    "after the prompt, as measured."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each method, length and depth, and for each method's average; without a score where none is.

    Raises:
        UserError: rows don't tell the needle's depth.
    """
    if not all(
        (row.get("fields") or {}).get("depth") is not None for cell in cells for row in cell.ok.values()
    ):
        raise lacking("fig8", "rows don't tell a needle's depth, as those of task=niah do")
    depths = sorted({row["fields"]["depth"] for cell in cells for row in cell.ok.values()})
    return [line for columns, its in by_who(cells) for line in _of_method(columns, its, depths)]


def _of_method(columns: Line, cells: Sequence[Stored], depths: Sequence[int]) -> list[Line]:
    columns = columns | {"kv_pct": shares(cells)["kv_pct"]}
    lines, by_length = [], grouped(cells, lambda cell: cell.length)
    for length in sorted(by_length):
        rows = [row for cell in by_length[length] for row in cell.ok.values()]
        for depth in depths:
            scores = [row["score"] for row in rows if row["fields"]["depth"] == depth]
            lines.append(columns | {"length": length, "depth_pct": depth} | _mean(scores))
    shown = [line["score"] for line in lines if line["score"] is not None]
    groups = [
        scores for its in by_length.values() if (scores := [s for cell in its for s in cell.scores.values()])
    ]
    limits = interval_of_mean_of_means(groups) if groups else None
    average = {
        "score": rounded(fmean(shown)) if shown else None,
        "low": rounded(limits.low) if limits else None,
        "high": rounded(limits.high) if limits else None,
        "n": sum(map(len, groups)),
    }
    return [*lines, columns | {"length": ALL, "depth_pct": ALL} | average]


def _mean(scores: Sequence[float]) -> Line:
    if not scores:
        return {"score": None, "low": None, "high": None, "n": 0}
    limits = interval(scores)
    low, high = rounded(limits.low), rounded(limits.high)
    return {"score": rounded(fmean(scores)), "low": low, "high": high, "n": len(scores)}


def draw(lines: Sequence[Line]) -> Figure:
    """Axes per method: depths from the top down, lengths from left to right."""
    named = [line | {"name": name} for line, name in zip(lines, names(lines), strict=True)]
    panels = grouped(named, lambda line: (line["model"], line["name"]))
    lengths, depths = (len({line[name] for line in lines} - {ALL}) for name in ("length", "depth_pct"))
    columns = min(2, len(panels))
    wide = max(3.2, min(6.0, 0.55 * lengths + 0.8))
    high = 0.9 + 0.2 * max(depths, 4)
    figure = blank(wide * columns + 1, high * -(-len(panels) // columns))
    axes = grid_of(figure, len(panels), columns)
    several = len({line["model"] for line in lines}) > 1
    for place, ((model, name), its) in zip(axes, panels.items(), strict=True):
        _heat(place, its)
        place.set_title(f"{model}, " * several + f"{name}: {_average(its)}", loc="left")
    figure.colorbar(ScalarMappable(SCALE, COLOURS), ax=axes, label="score (0 to 1)", aspect=40)
    return figure


def _heat(axes: Axes, lines: Sequence[Line]) -> None:
    cells = [line for line in lines if line["length"] != ALL]
    x, y = (sorted({line[name] for line in cells}) for name in ("length", "depth_pct"))
    colours = ScalarMappable(SCALE, COLOURS)
    for line in cells:
        column, row, score = x.index(line["length"]), y.index(line["depth_pct"]), line["score"]
        face = "white" if score is None else colours.to_rgba(score)
        corner = (column - 0.5, row - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=face, edgecolor="white", linewidth=0.8))
        if len(x) <= WRITTEN:
            text = "-" if score is None else f"{score:.2f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(x)), [_tokens(length) for length in x])
    axes.set_yticks(range(len(y)), [str(depth) for depth in y])
    axes.set_xlim(-0.5, len(x) - 0.5)
    axes.set_ylim(len(y) - 0.5, -0.5)
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth (%)")
    axes.grid(visible=False)


def _tokens(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"


def _average(lines: Sequence[Line]) -> str:
    """Never as if it were whole where cells are missing."""
    [average] = [line for line in lines if line["length"] == ALL]
    cells = [line["score"] for line in lines if line["length"] != ALL]
    there = sum(score is not None for score in cells)
    shown = "no score" if average["score"] is None else f"{average['score']:.2f}"
    kv = "" if average["kv_pct"] is None else f" (KV {average['kv_pct']:.1f} %)"
    return f"{shown}{kv}" if there == len(cells) else f"{shown}, {there} of {len(cells)} cells{kv}"
