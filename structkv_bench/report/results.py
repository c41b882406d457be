"""Cells -> one line each, and one per average of a suite, as a table, CSV, JSON or Markdown."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from statistics import mean, median, mode
from typing import Any, cast

from structkv_bench.report.naming import kv_ratio, method_label, task_label
from structkv_bench.report.render import Format, Grid, grid_text, lines_text
from structkv_bench.report.stored import Stored, load
from structkv_bench.store import Row
from structkv_bench.task import Scores, Task

Line = dict[str, Any]
"""One cell or average, by column; None where there is nothing to say."""

DECIMALS = {"score": 2, "kv_bytes_pct": 2, "prefill_pct": 2, "prefill_s": 3, "decode_s": 3}
TEXT = ("model", "method", "task")
SHAREABLE = ("model", "task", "length", "n", "failed")
"""Columns that a narrow table states once if all its rows agree."""


def results(
    results_dirs: Sequence[str | Path], keys: Collection[str] | None = None
) -> tuple[list[Line], str | None]:
    """A line per cell and average, and a footnote if samples failed or lines of the files are damaged.

    Args:
        results_dirs: where `structkv-bench run` put them; several are merged.
        keys: only these cells, in this order; None: all, in the order of their columns.

    Raises:
        UserError: there are no results, or a file is damaged.
    """
    evidence = load(results_dirs, keys=keys)
    lines = [(cell, line(cell.about, list(cell.rows.values()))) for cell in evidence.cells]
    if keys is None:
        order = ("model", "task", "length", "method", "kv_ratio")
        lines.sort(key=lambda one: [(one[1][name] is not None, one[1][name]) for name in order])
    failed = sum(cell.failed for cell, _ in lines)
    notes = [f"{failed} failed samples are not in the means; the same run command tries them again"]
    found = [one for _, one in lines] + _average_lines(lines)
    rows = max((row.get("decode_rows", 0) for cell, _ in lines for row in cell.ok.values()), default=0)
    batches = [f"decode_s is that of batches of up to {rows} rows, of several samples (decode.batch)"]
    said = [*(notes if failed else []), *(batches if rows else []), *evidence.notes]
    return found, "; ".join(said) or None


def line(about: Row, rows: Sequence[Row]) -> Line:
    """The columns of one cell."""
    config, ok = about["config"], [row for row in rows if row["status"] == "ok"]

    def over(statistic: Callable[[list[Any]], Any], value: Callable[[Row], Any]) -> Any:
        values = [number for row in ok if (number := value(row)) is not None]
        return statistic(values) if values else None

    return _rounded(
        {
            "model": about["names"]["model"],
            "method": method_label(about),
            "kv_ratio": kv_ratio(about),
            "task": task_label(about),
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
    )


def _rounded(columns: Line) -> Line:
    return {
        name: round(value, DECIMALS[name]) if name in DECIMALS and value is not None else value
        for name, value in columns.items()
    }


def _average_lines(lines: Iterable[tuple[Stored, Line]]) -> list[Line]:
    """The averages of each suite, for each method at each length, over the subtasks that have samples."""
    suites: dict[str, list[tuple[Stored, Line]]] = {}
    for cell, one in lines:
        config, names = cell.about["config"], cell.about["names"]
        same = [config["model"], config["method"], config["task"], config["length"], names["protocol"]]
        if cell.ok:
            suites.setdefault(json.dumps([*same, names["model"]]), []).append((cell, one))
    found = []
    for members in suites.values():
        scores = {cell.subtask: [scored(row) for row in cell.ok.values()] for cell, _ in members}
        for name, value in averages_of(members[0][0].about, scores).items():
            n, failed = (sum(one[column] for _, one in members) for column in ("n", "failed"))
            average = dict.fromkeys(members[0][1]) | {"task": name, "n": n, "failed": failed, "score": value}
            kept = {column: members[0][1][column] for column in ("model", "method", "kv_ratio", "length")}
            found.append(_rounded(average | kept))
    return found


def scored(row: Row) -> tuple[Row, float]:
    """What `Task.averages` takes of a row."""
    return row.get("fields") or {}, row["score"]


def averages_of(about: Row, scores: Scores) -> dict[str, float]:
    """What the cell's suite averages; for a suite of the user's that can't be imported, the plain mean."""
    module, _, name = str(about["config"]["task"]["_target_"]).rpartition(".")
    try:
        averages = getattr(importlib.import_module(module), name).averages
    except (ImportError, AttributeError, ValueError):
        averages = Task.averages
    return cast(dict[str, float], averages(scores))


def render(lines: Sequence[Line], format: Format, width: int | None = None) -> str:
    """Lines as text, no line break at its end; a table takes `width` columns at most (None: all it needs)."""
    if format is Format.JSON:
        return lines_text(lines, format)
    grid = lines_grid(lines)
    if format is Format.CSV:
        return lines_text([dict(zip(grid.head, row, strict=True)) for row in grid.rows], format)
    return grid_text(grid, format, width, SHAREABLE)


def lines_grid(lines: Sequence[Line]) -> Grid:
    """Lines as texts, numbers rounded."""
    names = list(lines[0])
    return Grid(names, [[_text(name, one[name]) for name in names] for one in lines], TEXT)


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.{DECIMALS[name]}f}" if name in DECIMALS else str(value)
