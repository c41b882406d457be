"""What a table says about its reference method, row by row: better, worse, or not to be told from chance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from structkv_bench.report.compare import is_noise, is_sweep, reference_row
from structkv_bench.report.naming import default_of
from structkv_bench.report.table import AVERAGE, Entry, Table, TableRow


@dataclass
class Finding:
    """The rows that were compared under one heading, each with its difference in points."""

    at: str
    """The KV budget, or the setting's value."""
    better: list[str] = field(default_factory=list)
    worse: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    """Those whose difference can't be told from chance."""
    missing: list[str] = field(default_factory=list)
    """Those without a score, each with its samples so far."""


def findings(table: Table, reference: str) -> list[Finding]:
    """All comparisons of a table's averages with the reference method, or of a sweep's values.

    Where no average can be compared yet, those of the columns that can.

    Args:
        table: with its statistics.
        reference: the method that the others are compared with.
    """
    if AVERAGE not in table.names:
        return _findings(table, table.columns, reference)
    averages = _findings(table, [AVERAGE], reference)
    if tally(averages).total:
        return averages
    return [one for one in _findings(table, table.columns, reference) if tally([one]).total]


def _findings(table: Table, names: Sequence[str], reference: str) -> list[Finding]:
    found: dict[str, Finding] = {}
    for name in names:
        for row in table.rows:
            entry = row.entries.get(name)
            if entry is not None and (entry.comparison is not None or entry.score is None):
                at = _heading(table, row, name, reference)
                label = name if _is_own(table, row, reference) else row.label
                _sort_in(found.setdefault(at, Finding(at)), entry, label)
    return list(found.values())


@dataclass(frozen=True)
class Tally:
    """How many comparisons came out how."""

    better: int
    worse: int
    unclear: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.better + self.worse + self.unclear


def tally(found: Iterable[Finding]) -> Tally:
    """The counts of several findings."""
    every = list(found)
    return Tally(*(sum(len(getattr(one, f.name)) for one in every) for f in fields(Tally)))


def _sort_in(finding: Finding, entry: Entry, label: str) -> None:
    if entry.comparison is None:
        finding.missing.append(f"{label} ({entry.n} of {entry.asked} samples)")
        return
    difference = round(100 * entry.comparison.difference, 1)
    kind = finding.better if difference > 0 else finding.worse
    shown = f"{difference:+.1f}" if difference else "0.0"
    (finding.unclear if is_noise(entry) else kind).append(f"{label} ({shown})")


def _is_own(table: Table, row: TableRow, reference: str) -> bool:
    """Whether the row is compared with itself, at the setting's default."""
    return is_sweep(table) and reference_row(table, row, reference) is row


def _heading(table: Table, row: TableRow, name: str, reference: str) -> str:
    model = f"{row.model}, " if len({one.model for one in table.rows}) > 1 else ""
    if _is_own(table, row, reference):
        budget = f"{_share(row.kv_ratio)}, " if row.kv_ratio is not None else ""
        default = default_of(row.cells[0].about, table.setting or "")
        return f"{model}{budget}{table.setting}, against its default {default}"
    if table.setting == "kv_ratio":
        return model + (_share(float(name)) if name != "-" else "no set budget")
    if table.setting is not None:
        column = f", {table.setting} {name}"
    else:
        column = f", {name}" if AVERAGE in table.names and name != AVERAGE else ""
    if row.kv_ratio is not None:
        return f"{model}{_share(row.kv_ratio)}{column}"
    other = reference_row(table, row, reference)
    against = f", against {other.label} at {100 * other.kv_ratio:g} %" if other and other.kv_ratio else ""
    return f"{model}no set budget{against}{column}"


def _share(ratio: float) -> str:
    return f"{100 * ratio:g} % of the KV cache"
