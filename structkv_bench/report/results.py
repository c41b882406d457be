"""Rows -> one line per cell, as a table, CSV, JSON or Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import mean, median, mode
from typing import Any

from structkv_bench.catalog import conf_dir
from structkv_bench.store import Row, read_cells

Line = dict[str, Any]
"""One cell, by column; None where there is nothing to say."""

DECIMALS = {"score": 2, "kv_bytes_pct": 2, "prefill_pct": 2, "prefill_s": 3, "decode_s": 3}
TEXT = ("model", "method", "task")
OWN_COLUMN = {"kv_ratio", "_target_"}
SHAREABLE = ("model", "task", "length", "n", "failed")
"""Columns that a narrow table states once if all its rows agree."""


class Format(StrEnum):
    """How results are printed."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    MARKDOWN = "markdown"


def results(results_dir: str | Path, folders: Iterable[str] | None = None) -> tuple[list[Line], str | None]:
    """A line per cell, and a footnote if samples failed or lines of the files are damaged.

    Args:
        results_dir: where `structkv-bench run` put them.
        folders: only these cells, in this order; None: all, in the order of their columns.

    Raises:
        UserError: there are no results, or a cell.json is damaged.
    """
    lines, torn = [], 0
    for about, rows, damaged in read_cells(results_dir, folders):
        lines.append(line(about, rows))
        torn += damaged
    if folders is None:
        order = ("model", "task", "length", "method", "kv_ratio")
        lines.sort(key=lambda one: [(one[name] is not None, one[name]) for name in order])
    failed = sum(one["failed"] for one in lines)
    notes = [
        f"{failed} failed samples are not in the means; the same run command tries them again"
        if failed
        else "",
        f"{torn} damaged lines in {results_dir} were skipped; those samples run again" if torn else "",
    ]
    return lines, "; ".join(filter(None, notes)) or None


def line(about: Row, rows: Sequence[Row]) -> Line:
    """The columns of one cell."""
    config, ok = about["config"], [row for row in rows if row["status"] == "ok"]
    method = config["method"]

    def over(statistic: Callable[[list[Any]], Any], value: Callable[[Row], Any]) -> Any:
        values = [number for row in ok if (number := value(row)) is not None]
        return statistic(values) if values else None

    columns = {
        "model": about["names"]["model"],
        "method": _named("method", about["names"]["method"], method, about["names"]["method"]),
        "kv_ratio": None if method.get("budget") else method.get("kv_ratio"),
        "task": _named("task", about["names"]["task"], config["task"], config["subtask"]),
        "length": config["length"],
        "n": len(ok),
        "failed": len(rows) - len(ok),
        "score": over(mean, lambda row: 100 * row["score"]),
        "kv_bytes_pct": over(mean, lambda row: 100 * row["kv_bytes"] / row["kv_bytes_full"]),
        "prefill_pct": over(mean, lambda row: row["prefill_pct"]),
        "pivot": over(mode, lambda row: row["pivot"]),
        "prefill_s": over(median, lambda row: row["prefill_s"]),
        "decode_s": over(median, lambda row: row["decode_s"]),
    }
    return {
        name: round(value, DECIMALS[name]) if name in DECIMALS and value is not None else value
        for name, value in columns.items()
    }


def _named(group: str, choice: str, settings: Row, shown: str) -> str:
    """A name with the settings that are not those of its config: cells that differ look different."""
    defaults = _defaults(group, choice)
    changed = {
        key: value
        for key, value in settings.items()
        if key in defaults.keys() - OWN_COLUMN and value != defaults[key] and str(value) not in shown
    }
    # of a path its last part, which tells texts apart and fits a table
    return " ".join([shown, *(f"{key}={str(value).rpartition('/')[2]}" for key, value in changed.items())])


@cache
def _defaults(group: str, choice: str) -> Row:
    import yaml

    file = conf_dir() / group / f"{choice}.yaml"
    if not file.is_file():  # a class of the user's
        return {}
    values: Row = yaml.safe_load(file.read_text(encoding="utf-8"))
    return values


def render(lines: Sequence[Line], format: Format, width: int | None = None) -> str:
    """Lines as text, no line break at its end; a table takes `width` columns at most (None: all it needs)."""
    if format is Format.JSON:
        return json.dumps(lines, ensure_ascii=False, indent=2)
    names = list(lines[0])
    cells = [[_text(name, one[name]) for name in names] for one in lines]
    if format is Format.CSV:
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([names, *cells])
        return out.getvalue().rstrip("\n")
    if format is Format.MARKDOWN:
        rule = ["---" if name in TEXT else "---:" for name in names]
        return "\n".join(f"| {' | '.join(row)} |" for row in (names, rule, *cells))
    return _table(names, cells, width)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.{DECIMALS[name]}f}" if name in DECIMALS else str(value)


def _table(names: Sequence[str], cells: Sequence[Sequence[str]], width: int | None) -> str:
    """A table; where it would be wider than `width`, what all rows share stands above it."""
    whole = _drawn(names, names, cells, gap=2)
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    columns = dict(zip(names, zip(*cells, strict=True), strict=True))
    shared = [name for name in SHAREABLE if len(set(columns[name])) == 1]
    left = [name for name in names if name not in shared]
    rows = list(zip(*(columns[name] for name in left), strict=True))
    drawn = _drawn(left, [name.replace("_", "\n") for name in left], rows, gap=1, width=width)
    return "\n".join([*(f"{name}: {columns[name][0]}" for name in shared), drawn])


def _drawn(
    names: Sequence[str], heads: Sequence[str], cells: Iterable[Sequence[str]], gap: int, width: int = 1000
) -> str:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, gap - 1, 0, 0))
    for name, head in zip(names, heads, strict=True):
        text = name in TEXT
        table.add_column(head, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in cells:
        table.add_row(*row)
    console = Console(width=width, file=io.StringIO(), markup=False, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
