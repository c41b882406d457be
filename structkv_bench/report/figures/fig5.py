"""Figure 5: how true the hidden states stay after tokens were dropped, by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from structkv_bench.report.figures.lines import CUTS, Line, by_who, grouped, lacking, layers, names, rounded
from structkv_bench.report.figures.style import blank, grid_of, looks
from structkv_bench.report.stored import Stored

CAPTION = (
    "Fidelity of a layer: mean over the tokens that are left of the cosine between a token's hidden state "
    "after that layer and the one it has there in the full pass, which drops none; 1 is the same "
    "direction. Each line begins at the layer after which its method drops tokens: before it both passes "
    "are one (gemfilter's chosen tokens begin anew, so its line does not begin at 1). Lines: mean over "
    "samples, bands: least to greatest."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each layer from the cut on, of each method that drops tokens, at a length.

    Raises:
        UserError: no method drops any, or the full pass did not run beside one that does.
    """
    found: list[Line] = []
    for columns, its in by_who(cells):
        for length, same in grouped(its, lambda cell: cell.length).items():
            rows = [row for cell in same for row in cell.ok.values() if row["prefill_pct"] < CUTS]
            if rows and not any(row.get("fidelity") for row in rows):
                raise lacking(
                    "fig5",
                    f"{columns['method']} at {length} has no fidelity, since `full` did not run beside it "
                    "in the same command",
                )
            found += _of_length(columns | {"length": length}, rows)
    if not found:
        raise lacking(
            "fig5", "no method here drops tokens, as structkv, fastkv, gemfilter and pyramidinfer do"
        )
    return found


def _of_length(columns: Line, rows: Sequence[Line]) -> Iterator[Line]:
    by_layer: dict[int, list[float]] = {}
    for row in rows:
        fidelity = row.get("fidelity") or []
        for place, value in enumerate(fidelity, layers(row) - len(fidelity)):
            by_layer.setdefault(place, []).append(value)
    for layer, values in sorted(by_layer.items()):
        mean = rounded(fmean(values), 6)
        limits = {"least": min(values), "greatest": max(values), "n": len(values)}
        yield columns | {"layer": layer, "fidelity": mean} | limits


def draw(lines: Sequence[Line]) -> Figure:
    """Axes per model and length, a line per method."""
    named = [line | {"name": name} for line, name in zip(lines, names(lines), strict=True)]
    panels = grouped(named, lambda line: (line["model"], line["length"]))
    columns = min(2, len(panels))
    figure = blank(2 + 5 * columns, 3.9 * -(-len(panels) // columns))
    axes = grid_of(figure, len(panels), columns, sharey=True, sharex=True)
    styles = looks(line["name"] for line in named)
    several = len({line["model"] for line in lines}) > 1
    handles = {}
    for place, ((model, length), its) in zip(axes, panels.items(), strict=True):
        for name, points in grouped(its, lambda line: line["name"]).items():
            x, y, low, high = ([p[v] for p in points] for v in ("layer", "fidelity", "least", "greatest"))
            look = styles[name]
            place.fill_between(x, low, high, color=look.colour, alpha=0.15, linewidth=0)
            handles[name] = place.plot(x, y, **look.line | {"markersize": 5}, linewidth=1.6)[0]
        place.set_title(f"{model}, " * several + f"{length:,} tokens", loc="left")
        place.xaxis.set_major_locator(MaxNLocator(integer=True))
        place.set_xlabel("layer, from 0")
        place.set_ylabel("fidelity (cosine to the full pass)")
        place.label_outer()
    figure.legend(list(handles.values()), list(handles), loc="outside right center")
    return figure
