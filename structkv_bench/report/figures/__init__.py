"""The paper's figures, a module each: `data` makes tidy lines of stored cells, `draw` draws these alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from matplotlib.figure import Figure

from structkv_bench.report.figures import fig1a, fig1b, fig3, fig4, fig5, fig6, fig7, fig8
from structkv_bench.report.figures.lines import Line
from structkv_bench.report.stored import Stored


class Module(Protocol):
    """What the modules here are."""

    CAPTION: str
    """What the numbers are and how they were computed."""

    def data(self, cells: Sequence[Stored]) -> list[Line]:
        """The lines that the figure shows."""

    def draw(self, lines: Sequence[Line]) -> Figure:
        """The figure of these lines."""


FIGURES: dict[str, Module] = {
    "fig1a": fig1a,
    "fig1b": fig1b,
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "fig6": fig6,
    "fig7": fig7,
    "fig8": fig8,
}
"""By the name of their files: that of the experiment, with a letter where it has several."""
