"""Stored cells -> a table in the paper's layout: which cells make up each number.

A row is a method at a KV budget, a column a task, a length or a value of a setting. An entry is the plain
mean over the tasks and lengths that fall into it; what is missing is never averaged over as if it were there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from structkv_bench.report.naming import kv_ratio, method_label, task_label
from structkv_bench.report.paper import column_name
from structkv_bench.report.statistics import Comparison, Interval
from structkv_bench.report.stored import Stored

AVERAGE = "avg"
SETTING = "method."
"""How the columns of a sweep begin: method.decay."""

Part = tuple[str, int]
"""A subtask at a length."""


@dataclass
class Entry:
    """One number of a table."""

    parts: dict[Part, Stored]
    lacks: list[Part] = field(default_factory=list)
    """What other rows have here and this one has not begun."""
    interval: Interval = field(default_factory=lambda: Interval(None, None))
    """From 0 to 1."""
    comparison: Comparison | None = None
    """With the reference method on the same samples; None: it is the reference, or there is none."""
    p_value: float | None = None
    """Of the comparison, adjusted for the others of its column."""

    @property
    def score(self) -> float | None:
        """In percent; None if a part has no sample at all."""
        if self.lacks or not self.parts or not all(cell.ok for cell in self.parts.values()):
            return None
        return 100 * fmean(fmean(cell.scores.values()) for cell in self.parts.values())

    @property
    def n(self) -> int:
        """Samples that it rests on."""
        return sum(len(cell.ok) for cell in self.parts.values())

    @property
    def asked(self) -> int:
        """Samples that it was to rest on."""
        return sum(max(cell.asked, len(cell.rows)) for cell in self.parts.values())

    @property
    def kv_pct(self) -> float | None:
        """Bytes held after the prompt, in percent of the full cache's."""
        held = [cell.kv_pct for cell in self.parts.values() if cell.ok]
        return fmean(held) if held else None

    @property
    def prefill_pct(self) -> float | None:
        """Tokens that the layers processed, in percent of the prompt's."""
        processed = [cell.prefill_pct for cell in self.parts.values() if cell.ok]
        return fmean(processed) if processed else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.n == self.asked and not self.lacks


@dataclass
class TableRow:
    """A method at a KV budget on a model."""

    model: str
    method: str
    """The method's own name."""
    label: str
    """With the settings that differ from its config."""
    kv_ratio: float | None
    """Nominal."""
    variant: str = ""
    """The protocol at the end of the label, where the table has several."""
    cells: list[Stored] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)

    @cached_property
    def kv_shares(self) -> list[float]:
        """Of each cell that has rows: see `Stored.kv_pct`."""
        return [cell.kv_pct for cell in self.cells if cell.ok]

    @cached_property
    def prefill_shares(self) -> list[float]:
        """Of each cell that has rows: see `Stored.prefill_pct`."""
        return [cell.prefill_pct for cell in self.cells if cell.ok]


@dataclass
class Table:
    """Rows and columns; layout.py prints them, compare.py fills in intervals and comparisons."""

    columns: list[str]
    """Those that the experiment varies; AVERAGE, where there is one, comes after them."""
    rows: list[TableRow]
    setting: str | None
    """The method's setting that varies over the columns, if one does."""

    @property
    def names(self) -> list[str]:
        """Columns and the average."""
        has_average = any(AVERAGE in row.entries for row in self.rows)
        return [*self.columns, AVERAGE] if has_average else self.columns

    @property
    def cells(self) -> list[Stored]:
        """Of all rows."""
        return [cell for row in self.rows for cell in row.cells]

    @property
    def is_whole(self) -> bool:
        """Whether no row lacks anything."""
        return all(entry.is_whole for row in self.rows for entry in row.entries.values())


def build(cells: Sequence[Stored], columns: str) -> Table:
    """The table of some cells.

    Args:
        cells: what was stored.
        columns: subtask, length, or a setting of the method as method.decay.
    """
    setting = columns.removeprefix(SETTING) if columns.startswith(SETTING) else None
    names = dict.fromkeys(_column(cell, columns) for cell in cells)
    table = Table(_in_order(names, columns), _rows(cells, columns, setting), setting)
    parts = _by_column(cells, columns)
    for row in table.rows:
        its = _by_column(row.cells, columns)
        for name in table.columns:
            if setting is None or name in its:
                row.entries[name] = _entry(its.get(name, {}), parts[name])
        if setting is None and len(table.columns) > 1:
            everything = {part: cell for column in its.values() for part, cell in column.items()}
            row.entries[AVERAGE] = _entry(everything, [part for column in parts.values() for part in column])
    return table


def _column(cell: Stored, columns: str) -> str:
    if columns == "subtask":
        return cell.subtask
    if columns == "length":
        return str(cell.length)
    return column_name(cell.about["config"]["method"].get(columns.removeprefix(SETTING), "-"))


def _in_order(names: Iterable[str], columns: str) -> list[str]:
    """As they were run, numbers rising."""
    if columns == "subtask":
        return list(names)
    numbers = {name: float(name) for name in names if name.replace(".", "", 1).isdigit()}
    return [*sorted(numbers, key=numbers.__getitem__), *(name for name in names if name not in numbers)]


def _rows(cells: Sequence[Stored], columns: str, setting: str | None) -> list[TableRow]:
    without = () if setting is None else (setting,)
    labels = [method_label(cell.about, without) for cell in cells]
    ratios = [None if setting == "kv_ratio" else kv_ratio(cell.about) for cell in cells]
    places = [
        (cell.model, label, ratio, _column(cell, columns), cell.subtask, cell.length)
        for cell, label, ratio in zip(cells, labels, ratios, strict=True)
    ]
    mixed = len(set(places)) < len(places)  # rows of several protocols, where the user insists
    rows: dict[tuple[str, str, float | None], TableRow] = {}
    for cell, label, ratio in zip(cells, labels, ratios, strict=True):
        variant = f" ({_protocol(cell)})" if mixed else ""
        row = TableRow(cell.model, cell.about["names"]["method"], label + variant, ratio, variant)
        rows.setdefault((row.model, row.label, row.kv_ratio), row).cells.append(cell)
    return list(rows.values())


def _protocol(cell: Stored) -> str:
    """The protocol, and the settings of the task that differ from its config."""
    settings = task_label(cell.about).removeprefix(cell.subtask)
    return f"{cell.about['names']['protocol']}{settings}"


def _by_column(cells: Iterable[Stored], columns: str) -> dict[str, dict[Part, Stored]]:
    found: dict[str, dict[Part, Stored]] = {}
    for cell in cells:
        found.setdefault(_column(cell, columns), {})[cell.subtask, cell.length] = cell
    return found


def _entry(parts: dict[Part, Stored], all_parts: Iterable[Part]) -> Entry:
    return Entry(parts, [part for part in all_parts if part not in parts])
