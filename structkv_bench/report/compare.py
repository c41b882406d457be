"""How sure a table's numbers are, what differs from the reference method, and what may stand together."""

from __future__ import annotations

import json
from collections.abc import Iterable

from structkv_bench.errors import UserError
from structkv_bench.report.naming import default_of
from structkv_bench.report.paper import column_name
from structkv_bench.report.statistics import (
    ALPHA,
    Comparison,
    compare_groups,
    holm,
    interval_of_mean_of_means,
)
from structkv_bench.report.stored import Stored
from structkv_bench.report.table import Entry, Table, TableRow


def add_statistics(table: Table, reference: str) -> None:
    """Intervals of all entries, and their comparisons with the reference method's.

    Each entry is compared on the samples that both have: with the reference's row at the same KV budget, a
    row without a budget (the full cache) with its largest. In a sweep of the reference alone, each value is
    compared with the setting's default. P-values are adjusted (Holm) for the rows of a column, in a sweep
    for all.
    """
    pairs: dict[str, list[tuple[Entry, Entry]]] = {}
    for row in table.rows:
        for name, entry in row.entries.items():
            if entry.score is None:
                continue
            entry.interval = interval_of_mean_of_means(
                [list(c.scores.values()) for c in entry.parts.values()]
            )
            other = _other(table, row, name, reference)
            if other is not None and other is not entry and other.score is not None:
                pairs.setdefault("" if table.setting else name, []).append((entry, other))
    for family in pairs.values():
        for entry, other in family:
            entry.comparison = _compared(entry, other)
        compared = [entry for entry, _ in family if entry.comparison is not None]
        p_values = holm([entry.comparison.p_value for entry in compared if entry.comparison is not None])
        for entry, p_value in zip(compared, p_values, strict=True):
            entry.p_value = p_value


def is_noise(entry: Entry) -> bool:
    """Whether the difference from the reference can't be told from chance."""
    return entry.comparison is not None and (entry.p_value is None or entry.p_value >= ALPHA)


def reference_row(table: Table, row: TableRow, reference: str) -> TableRow | None:
    """The reference method's row that a row is compared with; None: the table has none."""
    wanted = (row.model, reference, row.variant)
    own = [one for one in table.rows if (one.model, one.method, one.variant) == wanted]
    plain = [one for one in own if one.label == f"{reference}{one.variant}"] or own[:1]
    for one in plain:
        if one.kv_ratio in (row.kv_ratio, None):  # the full cache as a reference has no budget
            return one
    return max(plain, key=lambda one: one.kv_ratio or 0, default=None) if row.kv_ratio is None else None


def is_sweep(table: Table) -> bool:
    """Whether the reference's rows are compared with themselves, at the setting's default.

    Not over KV budgets beside other rows: there each budget has its own comparisons.
    """
    return table.setting is not None and (len(table.rows) == 1 or table.setting != "kv_ratio")


def _other(table: Table, row: TableRow, name: str, reference: str) -> Entry | None:
    other = reference_row(table, row, reference)
    if other is None:
        return None
    if other is row and is_sweep(table):
        name = column_name(default_of(row.cells[0].about, table.setting or ""))
    return other.entries.get(name)


def _compared(entry: Entry, other: Entry) -> Comparison | None:
    pairs = []
    for part, cell in entry.parts.items():
        if part in other.parts:
            theirs = other.parts[part].scores
            shared = [sample for sample in cell.scores if sample in theirs]
            if shared:
                pairs.append(([cell.scores[s] for s in shared], [theirs[s] for s in shared]))
    return compare_groups(pairs) if pairs else None


def check_alike(cells: Iterable[Stored]) -> None:
    """See that rows may stand in one table: one protocol, and for each sample one prompt of one model.

    Raises:
        UserError: they don't; both are named.
    """
    protocols: dict[str, Stored] = {}
    models: dict[str, str] = {}
    prompts: dict[tuple[str, str, int, str], tuple[str, Stored]] = {}
    for cell in cells:
        protocols.setdefault(cell.about["names"]["protocol"], cell)
        for session in cell.about.get("sessions", ()):
            identity = json.dumps(session.get("model", {}), sort_keys=True)
            known_model = models.setdefault(cell.model, identity)
            if identity not in (known_model, "{}"):
                raise _mixed(f"two models called {cell.model}", f"weights {known_model}", identity)
        for sample, row in cell.ok.items():
            place = (cell.model, cell.subtask, cell.length, sample)
            digest, known = prompts.setdefault(place, (row.get("prompt_sha256", ""), cell))
            if row.get("prompt_sha256", "") != digest:
                raise _mixed(
                    f"different prompts for {cell.subtask} at {cell.length}", *_differing(known, cell)
                )
    if len(protocols) > 1:
        raise _mixed("different protocols", *protocols)


def _mixed(what: str, one: str, other: str, *_: str) -> UserError:
    return UserError(f"{what} in one table: {one} and {other}; choose --results or pass --allow-mixed")


def _differing(one: Stored, other: Stored) -> tuple[str, str]:
    """What the two cells' task settings and texts do not have in common."""
    first, second = (cell.about["config"]["task"] | _texts(cell) for cell in (one, other))
    keys = [key for key in first | second if first.get(key) != second.get(key)]
    told = [", ".join(f"{key}={of.get(key)}" for key in keys) or "other texts" for of in (first, second)]
    return told[0], told[1]


def _texts(cell: Stored) -> dict[str, str]:
    sessions = cell.about.get("sessions") or [{}]
    return {f"sha256 of {name}": value for name, value in (sessions[-1].get("sources") or {}).items()}
