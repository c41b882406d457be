"""From an experiment's name to its printed table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from structkv_bench.catalog import choices, preset_values
from structkv_bench.errors import UserError, offer
from structkv_bench.report.compare import add_statistics, check_alike
from structkv_bench.report.layout import Style, grid, tidy
from structkv_bench.report.paper import paper_table
from structkv_bench.report.render import Format, grid_text, lines_text
from structkv_bench.report.stored import Evidence, Stored, load
from structkv_bench.report.table import SETTING, Table, build


@dataclass(frozen=True)
class Wish:
    """What is wanted of an experiment's table."""

    reference: str = "structkv"
    compare: bool = False
    """Whether the paper's numbers stand below ours."""
    intervals: bool = False
    allow_mixed: bool = False
    columns: str | None = None
    """subtask, length or method.SETTING, in place of what the experiment says."""


def named(what: str, kind: str) -> str:
    """An experiment by its number in the paper (2: table2, 8: fig8), or by its own name.

    Raises:
        UserError: there is no such experiment.
    """
    name = f"{kind}{what}" if what.isdigit() else what
    if name not in choices("experiment"):
        raise UserError(f"{name}: no such experiment; choose one of {', '.join(choices('experiment'))}")
    return name


def table_of(
    experiment: str, results_dirs: Sequence[str | Path], wish: Wish
) -> tuple[Table, Evidence, Style]:
    """An experiment's table with its statistics, what it was made of, and how it is printed.

    Raises:
        UserError: there are no rows, or such as can't stand in one table.
    """
    if wish.columns is not None:
        _check_columns(wish.columns)
    preset = preset_values(experiment)
    columns = wish.columns or preset.get("columns", "subtask")
    if columns is None:
        raise UserError(
            f"{experiment}: has no table; structkv-bench figure {experiment.removeprefix('fig')} draws it, "
            "and --columns length makes a table of its scores all the same"
        )
    evidence = load(results_dirs, experiment)
    if not wish.allow_mixed:
        check_alike(evidence.cells)
    _check_settings(evidence.cells, columns, wish.reference)
    table = build(evidence.cells, columns)
    add_statistics(table, wish.reference)
    printed = preset.get("paper")
    paper = paper_table(printed) if printed and wish.compare else None
    return table, evidence, Style(preset.get("title") or experiment, wish.reference, wish.intervals, paper)


def _check_columns(columns: str) -> None:
    is_setting = columns.startswith(SETTING) and columns.removeprefix(SETTING).isidentifier()
    if columns not in ("subtask", "length") and not is_setting:
        raise UserError(f"--columns {columns}: give subtask, length, or a setting such as method.decay")


def _check_settings(cells: Sequence[Stored], columns: str, reference: str) -> None:
    """See that the methods have the columns' setting, and that the reference is a method."""
    settings = {name for cell in cells for name in cell.about["config"]["method"]}
    if columns.startswith(SETTING) and columns.removeprefix(SETTING) not in settings:
        raise UserError(
            f"--columns {columns}: unknown; {offer(columns, sorted(SETTING + s for s in settings))}"
        )
    methods = sorted({*choices("method"), *(str(cell.about["names"]["method"]) for cell in cells)})
    if reference not in methods:
        raise UserError(f"--reference {reference}: unknown; {offer(reference, methods)}")


def print_table(
    experiment: str,
    results_dirs: Sequence[str | Path],
    format: Format,
    wish: Wish,
    width: int | None = None,
) -> str:
    """The table as text, no line break at its end.

    Raises:
        UserError: as for `table_of`.
    """
    table, evidence, style = table_of(experiment, results_dirs, wish)
    if format in (Format.CSV, Format.JSON):
        return lines_text(tidy(table, style), format)
    return grid_text(grid(table, evidence, style), format, width)
