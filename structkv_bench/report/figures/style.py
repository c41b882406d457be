"""How all figures look: readable without colour, a method the same everywhere, the same bytes each time.

Figures are drawn with matplotlib's objects alone: no pyplot, no window, nothing of the user's matplotlibrc.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE, GREY, DARK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#888888", "#555555",
)  # fmt: skip
"""Okabe and Ito's colours, which people with any kind of colour vision tell apart, but for yellow, which
is too pale for a line; and two greys."""
WINE, INDIGO, OLIVE, TEAL, ROSE = "#882255", "#332288", "#999933", "#44AA99", "#AA4499"
"""Of Paul Tol's muted colours, for the same eyes, those that stand off from the others."""

Dash = tuple[float, ...]
SOLID: Dash = ()


@dataclass(frozen=True)
class Look:
    """How a method is drawn; marker and dash tell it in grey too."""

    colour: str
    marker: str
    dash: Dash

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of a plotted line."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": (0, self.dash) if self.dash else "-",
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
        }


METHODS = {
    "full": Look(BLACK, "", (1, 1.5)),
    "streaming_llm": Look(GREY, "v", (6, 2)),
    "snapkv": Look(SKY, "^", (4, 1.5)),
    "h2o": Look(ORANGE, "X", (6, 1.5, 1, 1.5)),
    "pyramidkv": Look(WINE, "<", (3, 1)),
    "adakv": Look(INDIGO, ">", (5, 1, 1, 1)),
    "compresskv": Look(OLIVE, "p", (7, 1.5, 2, 1.5)),
    "sgdkv": Look(TEAL, "h", (2, 2)),
    "headwisekv": Look(ROSE, "d", (3, 1, 1, 1)),
    "pyramidinfer": Look(PURPLE, "P", (2, 1)),
    "gemfilter": Look(GREEN, "D", (4, 1, 1, 1, 1, 1)),
    "fastkv": Look(BLUE, "s", (8, 2)),
    "structkv": Look(VERMILLION, "o", SOLID),
}
"""A method looks the same in every figure."""
OTHERS = ("8", "H", "*", "<", ">", "p", "h", "d")
"""Markers of methods that are not ours, and of further settings of one that is."""

SEQUENCE = (
    Look(BLUE, "o", SOLID),
    Look(VERMILLION, "s", (5, 2)),
    Look(GREEN, "^", (1, 1.2)),
    Look(PURPLE, "D", (5, 1.5, 1, 1.5)),
    Look(BLACK, "v", (9, 2)),
)
"""Of lines that are no methods."""


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look for each name; one that begins with a method's has its colour."""
    found: dict[str, Look] = {}
    for name in dict.fromkeys(names):
        known = METHODS.get(name.partition(" ")[0], Look(DARK, "p", (3, 3)))
        taken = {(look.marker, look.dash) for look in found.values()}
        if (known.marker, known.dash) in taken:
            number = len(found)
            known = replace(known, marker=OTHERS[number % len(OTHERS)], dash=(1.0 + number, 1.5))
        found[name] = known
    return found


RC: Any = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 3.2,  # shows a dash once at least
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "lines.markersize": 6.5,
    "hatch.linewidth": 0.6,
    "text.parse_math": False,  # a name may hold any sign
    "svg.hashsalt": "structkv-bench",
    "svg.fonttype": "path",  # looks the same where our font is not installed
}
DPI = 150
CAPTION_SIZE = 8
CAPTION_SIGNS_AN_INCH = 16
TITLE_SIGNS_AN_INCH = 9


@contextmanager
def styled() -> Iterator[None]:
    """Our settings in place of the user's, for as long as something is made or written."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def blank(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, which makes room for what is put around its axes."""
    return Figure(figsize=(width, height), layout="constrained")


def grid_of(figure: Figure, count: int, columns: int, **shared: Any) -> list[Axes]:
    """So many axes, in rows of `columns` at most; places that are left stay empty."""
    columns = min(columns, count)
    axes = figure.subplots(-(-count // columns), columns, squeeze=False, **shared)
    places = [one for row in axes for one in row]
    for one in places[count:]:
        one.set_axis_off()
    return places[:count]


def framed(figure: Figure, title: str, caption: str) -> None:
    """Title above and caption below, the figure as much higher as they need."""
    width = figure.get_figwidth()
    lines = textwrap.wrap(caption, int(width * CAPTION_SIGNS_AN_INCH))
    heading = textwrap.wrap(title, int(width * TITLE_SIGNS_AN_INCH))
    figure.set_figheight(figure.get_figheight() + 0.16 * len(lines) + 0.24 * len(heading))
    figure.suptitle("\n".join(heading), x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=CAPTION_SIZE, color="#333333")


def as_bytes(figure: Figure, format: str) -> bytes:
    """The figure as a png or svg file, without a date or the writer's version in it."""
    unsaid: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}[format]
    out = io.BytesIO()
    with styled():
        figure.savefig(out, format=format, dpi=DPI, metadata=unsaid)
    return out.getvalue()
