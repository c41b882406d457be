"""Figures of a report: drawn from the cells, and embedded so that the page needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.report.render import Grid, html
from structkv_bench.report.stored import Evidence

LARGEST_SVG = 400_000
"""Bytes; a figure with more is embedded as PNG."""
MOST_LINES = 120
"""Lines of data that a page shows below a figure."""


@dataclass(frozen=True)
class Picture:
    """One figure, or why it can't be drawn."""

    name: str
    caption: str = ""
    source: str = ""
    """A data: URL."""
    data: str = ""
    """The lines behind it as an HTML table, where they are few."""
    error: str = ""


def pictures(experiment: str, evidence: Evidence) -> Iterator[Picture]:
    """The figures of an experiment; none if it has none, or if no sample has worked yet."""
    from structkv_bench.report.drawn import caption_of  # only now: it imports matplotlib
    from structkv_bench.report.figures import FIGURES
    from structkv_bench.report.figures.style import as_bytes, styled

    if not any(cell.ok for cell in evidence.cells):
        return
    for name in (name for name in FIGURES if name.rstrip("ab") == experiment):
        module = FIGURES[name]
        try:
            with styled():
                lines = module.data(evidence.cells)
                figure = module.draw(lines)
        except UserError as error:
            yield Picture(name, error=str(error))
            continue
        svg = as_bytes(figure, "svg")
        source = _url("svg+xml", svg) if len(svg) <= LARGEST_SVG else _url("png", as_bytes(figure, "png"))
        data = html(_grid(name, lines)) if len(lines) <= MOST_LINES else ""
        yield Picture(name, caption_of(name, experiment, evidence), source, data)


def _url(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _grid(name: str, lines: Sequence[dict[str, Any]]) -> Grid:
    head = list(lines[0])
    text = [column for column in head if any(isinstance(line[column], str) for line in lines)]
    return Grid(head, [[_shown(line[column]) for column in head] for line in lines], text, f"Data of {name}")


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
