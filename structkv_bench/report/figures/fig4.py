"""Figure 4: the signals of the pivot's detection over the depth of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from structkv_bench.report.figures.lines import Line, by_who, grouped, lacking, rounded
from structkv_bench.report.figures.style import BLACK, SEQUENCE, Look, blank
from structkv_bench.report.stored import Stored
from structkv_bench.store import Row

SIGNALS = {
    "entropy": "entropy H\n(nats)",
    "sparsity": "sparsity rho\n(share of mass)",
    "variance": "variance V\n(of n·p)",
    "transition": "transition\nscore T",
}
CAPTION = (
    "Of the attention that the last w queries give to the tokens before them: H its entropy, rho the "
    "share of the top 10 %, V the variance of n times its shares; T = 0.2 g(-H) + 0.3 g(rho) + 0.5 g(V), "
    "g the step from the layer before over the largest one in the search range, by default. Lines: mean "
    "over samples, bands: least to greatest. Shaded: the search range, where T is defined. Upright lines: "
    "pivots, as strong as they are frequent."
)


def data(cells: Sequence[Stored]) -> list[Line]:
    """A line for each signal and layer, of a method on a model at a length."""
    lines = [
        line
        for columns, its in by_who(cells)
        for length, same in grouped(its, lambda cell: cell.length).items()
        for line in _of_length(columns["model"], columns["method"], length, same)
    ]
    if not lines:
        raise lacking("fig4", "no row has signals of a pivot's detection, as structkv's do")
    return lines


def _of_length(model: str, method: str, length: int, cells: Sequence[Stored]) -> Iterator[Line]:
    rows = [row for cell in cells for row in cell.ok.values() if row.get("signals")]
    pivots = Counter(row["pivot"] for row in rows)
    for signal in SIGNALS:
        for layer in range(max((len(row["signals"][signal]) for row in rows), default=0)):
            values = list(_values(rows, signal, layer))
            yield {
                "model": model,
                "method": method,
                "length": length,
                "signal": signal,
                "layer": layer,
                "mean": rounded(fmean(values)) if values else None,
                "least": min(values, default=None),
                "greatest": max(values, default=None),
                "n": len(values),
                "pivots": pivots[layer],
                "searched": any(True for _ in _values(rows, "transition", layer)),
            }


def _values(rows: Sequence[Row], signal: str, layer: int) -> Iterator[float]:
    """Of the samples whose prompt was whole at this layer."""
    for row in rows:
        values = row["signals"][signal]
        if layer < len(values) and values[layer] is not None:
            yield values[layer]


def draw(lines: Sequence[Line]) -> Figure:
    """A column of four axes per model, a line per length."""
    columns = grouped(lines, lambda line: (line["model"], line["method"]))
    figure = blank(2 + 5.5 * len(columns), 6.6)
    axes = figure.subplots(len(SIGNALS), len(columns), squeeze=False, sharex="col")
    for column, its in enumerate(columns.values()):
        lengths = grouped(its, lambda line: line["length"])
        for place, (signal, label) in zip(axes[:, column], SIGNALS.items(), strict=True):
            _marked(place, its)
            for number, (length, points) in enumerate(lengths.items()):
                shown = [p for p in points if p["signal"] == signal and p["mean"] is not None]
                _line(place, shown, f"{length:,} tokens", SEQUENCE[number % len(SEQUENCE)])
            place.set_ylabel(label if column == 0 else "")
        axes[0, column].set_title(_title(its), loc="left")
        axes[-1, column].set_xlabel("layer, from 0")
    figure.align_ylabels(axes[:, 0])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    return figure


def _line(axes: Axes, points: Sequence[Line], label: str, look: Look) -> None:
    x, mean, least, greatest = ([p[name] for p in points] for name in ("layer", "mean", "least", "greatest"))
    axes.fill_between(x, least, greatest, color=look.colour, alpha=0.2, linewidth=0)
    axes.plot(x, mean, **look.line | {"markersize": 3.5}, linewidth=1.6, label=label)


def _marked(axes: Axes, lines: Sequence[Line]) -> None:
    """The search range, and the pivots that were found."""
    searched = [line["layer"] for line in lines if line["searched"]]
    if searched:
        axes.axvspan(min(searched) - 0.5, max(searched) + 0.5, color="#f0f0f0", zorder=0)
    pivots = _pivots(lines)
    for layer, count in pivots.items():
        axes.axvline(layer, color=BLACK, linewidth=1.4, alpha=0.15 + 0.85 * count / pivots.total(), zorder=1)


def _pivots(lines: Sequence[Line]) -> Counter[int]:
    """Samples by pivot; each signal's lines tell them, so those of one are enough."""
    return Counter(
        {layer: count for layer in {line["layer"] for line in lines} if (count := _at(lines, layer))}
    )


def _at(lines: Sequence[Line], layer: int) -> int:
    return sum(line["pivots"] for line in lines if line["layer"] == layer and line["signal"] == "entropy")


def _title(lines: Sequence[Line]) -> str:
    pivots = _pivots(lines)
    found = ", ".join(f"{layer} ({count} of {pivots.total()})" for layer, count in pivots.most_common(3))
    first = lines[0]
    return f"{first['model']}, {first['method']}\npivot: {found or 'none'}{' …' if len(pivots) > 3 else ''}"
