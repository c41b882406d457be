"""A grid of texts as a terminal's table, Markdown, LaTeX or HTML."""

from __future__ import annotations

import csv
import html as html_text
import io
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MARK = "\N{SECTION SIGN}"
LEAST_TEXT = 14
"""Characters that a column of text keeps in a narrow terminal."""


class Format(StrEnum):
    """How tables are printed."""

    TABLE = "table"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"
    HTML = "html"


@dataclass
class Grid:
    """What a table shows, cell by cell."""

    head: list[str]
    rows: list[list[str]]
    text: Collection[str]
    """Columns that hold text; the others hold numbers and stand to the right."""
    title: str = ""
    notes: list[str] = field(default_factory=list)
    groups: dict[int, str] = field(default_factory=dict)
    """Headings that stand above rows, by the row's place."""


def lines_text(lines: Sequence[Mapping[str, Any]], format: Format) -> str:
    """Lines with the same columns as CSV, where None is empty, or as JSON."""
    if format is Format.JSON:
        return json.dumps(lines, ensure_ascii=False, indent=2)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([lines[0], *(line.values() for line in lines)])
    return out.getvalue().rstrip("\n")


def grid_text(grid: Grid, format: Format, width: int | None = None, share: Sequence[str] = ()) -> str:
    """A grid in any format but CSV and JSON; `width` and `share` as for `text`."""
    if format is Format.TABLE:
        return text(grid, width, share)
    return {Format.MARKDOWN: markdown, Format.LATEX: latex, Format.HTML: html}[format](grid)


def markdown(grid: Grid) -> str:
    """A Markdown table; headings of groups are rows of their own."""
    rule = ["---" if name in grid.text else "---:" for name in grid.head]
    blank = [""] * (len(grid.head) - 1)
    body = []
    for place, row in enumerate(grid.rows):
        if place in grid.groups:
            body.append([f"*{grid.groups[place]}*", *blank])
        body.append([cell.replace("|", r"\|") for cell in row])
    table = "\n".join(f"| {' | '.join(row)} |" for row in (grid.head, rule, *body))
    return "\n\n".join([*([f"**{grid.title}**"] if grid.title else []), table, *grid.notes])


def latex(grid: Grid) -> str:
    """A LaTeX table for the package booktabs."""
    form = "".join("l" if name in grid.text else "r" for name in grid.head)
    lines = [
        r"\begin{table}",
        rf"\caption{{{_tex(grid.title)}}}",
        rf"\begin{{tabular}}{{{form}}}",
        r"\toprule",
    ]
    lines += [" & ".join(map(_tex, grid.head)) + r" \\", r"\midrule"]
    for place, row in enumerate(grid.rows):
        if place in grid.groups:
            lines.append(rf"\multicolumn{{{len(grid.head)}}}{{l}}{{\emph{{{_tex(grid.groups[place])}}}}} \\")
        lines.append(" & ".join(map(_tex, row)) + r" \\")
    notes = [rf"\par\footnotesize {_tex(note)}" for note in grid.notes]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes, r"\end{table}"])


_TEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "≈": r"$\approx$", "→": r"$\to$", "±": r"$\pm$", "<": "$<$", ">": "$>$",
}  # fmt: skip


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)


def html(grid: Grid) -> str:
    """A <table> in a <figure>, with its title as the caption and its notes below.

    Each group is a <tbody>, so that rows can be sorted within it. A row whose first text is indented
    (the paper's numbers) belongs to the row above it. Cells carry the number that they sort by.
    """
    escape = html_text.escape
    head = "".join(f'<th scope="col" class="{_kind(grid, name)}">{escape(name)}</th>' for name in grid.head)
    bodies: list[list[str]] = []
    for place, row in enumerate(grid.rows):
        if place in grid.groups or not bodies:
            bodies.append([])
        if place in grid.groups:
            bodies[-1].append(
                f'<tr class="group"><th scope="rowgroup" colspan="{len(row)}">'
                f"<span>{escape(grid.groups[place])}</span></th></tr>"
            )
        bodies[-1].append(_html_row(grid, row))
    notes = "".join(f"<p>{escape(note)}</p>" for note in grid.notes)
    caption = f"<caption>{escape(grid.title)}</caption>" if grid.title else ""
    body = "\n".join(f"<tbody>{chr(10).join(rows)}</tbody>" for rows in bodies)
    table = f"<table>{caption}<thead><tr>{head}</tr></thead>\n{body}</table>"
    label = f' role="region" aria-label="{escape(grid.title)}"' if grid.title else ""
    return f'<figure class="table"><div class="scroll" tabindex="0"{label}>{table}</div>{notes}</figure>'


_SORTED_BY = re.compile(r"(?:.* → )?([+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\d.]*/)")
"""The number that a cell begins with; of a nominal and a measured one the measured. Not n of N."""
_INTERVAL = re.compile(r"\[[^\]]*\]$")


def _html_row(grid: Grid, row: Sequence[str]) -> str:
    first, *others = zip(grid.head, row, strict=True)
    cells = [f'<th scope="row" class="{_kind(grid, first[0])}">{html_text.escape(first[1].strip())}</th>']
    for name, shown in others:
        number = None if name in grid.text else _SORTED_BY.match(shown)
        by = f' data-sort="{number[1]}"' if number else ""
        inner = _INTERVAL.sub(r"<small>\g<0></small>", html_text.escape(shown))
        cells.append(f'<td class="{_kind(grid, name)}"{by}>{inner}</td>')
    under = ' class="under"' if row[0].startswith(" ") else ""
    return f"<tr{under}>{''.join(cells)}</tr>"


def _kind(grid: Grid, name: str) -> str:
    return "text" if name in grid.text else "number"


def text(grid: Grid, width: int | None = None, share: Sequence[str] = ()) -> str:
    """A table for a terminal of `width` columns (None: all that it needs).

    Where it would be wider, columns named in `share` whose rows all agree are stated once, above it; what
    still does not fit beside the columns of text goes below, beside them once more. No number is cut.
    """
    whole = _drawn(grid, grid.head, gap=2)
    if width is not None and _width(whole) > width:
        columns = list(zip(*grid.rows, strict=True))
        shared = [i for i, name in enumerate(grid.head) if name in share and len(set(columns[i])) == 1]
        left = [i for i in range(len(grid.head)) if i not in shared]
        stated = [f"{grid.head[i]}: {columns[i][0]}" for i in shared]
        parts = [_narrow(grid, part, width) for part in _fitting(grid, left, width)]
        whole = "\n".join([*stated, "\n\n".join(parts)])
    return "\n".join([*([grid.title, ""] if grid.title else []), whole, *grid.notes])


def _fitting(grid: Grid, columns: Sequence[int], width: int) -> list[list[int]]:
    """The columns in parts that fit, each with all columns of text."""
    texts = [i for i in columns if grid.head[i] in grid.text]
    numbers = [i for i in columns if i not in texts]
    if _width(_narrow(grid, columns, width)) <= width and not _is_cut(grid, columns, width):
        return [list(columns)]
    parts: list[list[int]] = [[]]
    for number in numbers:
        if parts[-1] and _is_cut(grid, [*texts, *parts[-1], number], width):
            parts.append([])
        parts[-1].append(number)
    return [[*texts, *part] for part in parts]


def _is_cut(grid: Grid, columns: Sequence[int], width: int) -> bool:
    """Whether so many columns leave less than a name's width to each column of text."""
    numbers = [i for i in columns if grid.head[i] not in grid.text]
    room = width - sum(_column_width(grid, i) for i in numbers)
    texts = [min(_column_width(grid, i), LEAST_TEXT) for i in columns if i not in numbers]
    return room < sum(texts)


def _column_width(grid: Grid, column: int) -> int:
    head = max(map(len, grid.head[column].split("_")))
    return max([head, *(len(row[column]) for row in grid.rows)]) + 1


def _narrow(grid: Grid, columns: Sequence[int], width: int) -> str:
    part = Grid(
        [grid.head[i] for i in columns],
        [[row[i] for i in columns] for row in grid.rows],
        grid.text,
        groups=grid.groups,
    )
    return _drawn(part, [name.replace("_", "\n") for name in part.head], gap=1, width=width)


def _width(drawn: str) -> int:
    return max(map(len, drawn.splitlines()))


def _drawn(grid: Grid, heads: Sequence[str], gap: int, width: int = 1000) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0))
    for name, head in zip(grid.head, heads, strict=True):
        is_text = name in grid.text
        table.add_column(head, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for place, row in enumerate(grid.rows):
        if place in grid.groups:
            table.add_row(f"{MARK}{place}")  # a heading is as wide as it likes: it comes in its place below
        table.add_row(*row)
    console = Console(width=width, file=io.StringIO(), markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    lines = [line.rstrip() for line in capture.get().splitlines()]
    headings = {f"{MARK}{place}": heading for place, heading in grid.groups.items()}
    return "\n".join(headings.get(line, line) for line in lines)
