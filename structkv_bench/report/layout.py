"""A table as it is printed: the grid with its marks and footnotes, or tidy lines for a CSV file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from structkv_bench.report.compare import is_noise, is_sweep, reference_row
from structkv_bench.report.paper import PaperTable
from structkv_bench.report.render import Grid
from structkv_bench.report.results import averages_of, scored
from structkv_bench.report.stored import Evidence
from structkv_bench.report.table import AVERAGE, Entry, Table, TableRow

NOISE, PARTIAL, SECONDARY = "≈", "*", "†"
FAMILIES = (
    "full cache",
    "decoding only: every layer processes the whole prompt",
    "prefill-aware: tokens are dropped on the way",
)


@dataclass(frozen=True)
class Style:
    """What is shown beside the scores."""

    title: str
    reference: str
    intervals: bool = False
    """Whether each score has its 95 % interval; averages always do."""
    paper: PaperTable | None = None
    """Whose numbers stand below ours, with the difference; None: none do."""


def grid(table: Table, evidence: Evidence, style: Style) -> Grid:
    """The table as texts, in the paper's layout."""
    models = list(dict.fromkeys(row.model for row in table.rows))
    ordered = sorted(table.rows, key=lambda row: (models.index(row.model), family(row)))
    texts: list[list[str]] = []
    groups: dict[int, str] = {}
    heading = None
    for row in ordered:
        named = (row.model, family(row))
        if named != heading:
            heading = named
            groups[len(texts)] = (f"{row.model}, " if len(models) > 1 else "") + FAMILIES[family(row)]
        texts += _lines(row, table, style)
    head = ["method", "KV %", "prefill %", *table.names]
    done, asked = (sum(getattr(e, name) for e in _entries(table)) for name in ("n", "asked"))
    title = f"{style.title} · {', '.join(models)}"
    if not table.is_whole:
        title += f" · INCOMPLETE: {done} of {asked} samples"
    return Grid(head, texts, ("method",), title, list(_notes(table, evidence, style)), groups)


def family(row: TableRow) -> int:
    """Place in FAMILIES, by what was measured."""
    if row.method == "full":
        return 0
    return 1 if min(row.prefill_shares, default=100) > 99.99 else 2


def _entries(table: Table) -> list[Entry]:
    return [row.entries[name] for row in table.rows for name in table.columns if name in row.entries]


def _lines(row: TableRow, table: Table, style: Style) -> Iterator[list[str]]:
    """A row; compared with the paper, the paper's and the difference below it."""
    nominal = None if row.kv_ratio is None else 100 * row.kv_ratio
    paper = style.paper
    printed_prefill = paper.prefill_pct.get((row.method, nominal or 100)) if paper else None
    yield [
        row.label,
        _nominal_and_measured(nominal, row.kv_shares),
        _nominal_and_measured(printed_prefill, row.prefill_shares),
        *(entry_text(row.entries.get(name), style.intervals or name == AVERAGE) for name in table.names),
    ]
    if paper is None:
        return
    printed = [_printed(paper, row, table, name) for name in table.names]
    if any(printed):
        shown = ["" if p is None else f"{p.value:.2f}{SECONDARY if p.secondary else ''}" for p in printed]
        ours = [row.entries[name].score if name in row.entries else None for name in table.names]
        differences = [
            "" if p is None or score is None else f"{score - p.value:+.2f}"
            for p, score in zip(printed, ours, strict=True)
        ]
        yield ["  paper", "", "", *shown]
        yield ["  ours less paper", "", "", *differences]


def _printed(paper: PaperTable, row: TableRow, table: Table, name: str) -> Any:
    if row.label != row.method:  # other settings than the paper's
        return None
    kv_pct = 100 * row.kv_ratio if row.kv_ratio is not None else 100
    return paper.score(row.method, round(kv_pct, 6), name)


def _nominal_and_measured(nominal: float | None, measured: Sequence[float]) -> str:
    """Their mean, or where a sweep changes it from the least to the most."""
    shown = [] if nominal is None else [f"{nominal:.4g}"]
    if measured and max(measured) - min(measured) > 1:
        shown.append(f"{min(measured):.4g} to {max(measured):.4g}")
    elif measured:
        shown.append(f"{fmean(measured):.4g}")
    return " → ".join(shown)


def entry_text(entry: Entry | None, interval: bool) -> str:
    """A score with its marks; empty where there is none, n of N where something is missing."""
    if entry is None:
        return ""
    if entry.score is None:
        return f"{entry.n}/{entry.asked}" if entry.asked else ""
    text = f"{entry.score:.2f}{NOISE if is_noise(entry) else ''}"
    if interval and entry.interval.low is not None and entry.interval.high is not None:
        text += f" [{100 * entry.interval.low:.1f}, {100 * entry.interval.high:.1f}]"
    return text if entry.is_whole else f"{text}{PARTIAL} {entry.n}/{entry.asked}"


def _notes(table: Table, evidence: Evidence, style: Style) -> Iterator[str]:
    cells = table.cells
    rows = [row for cell in cells for row in cell.ok.values()]
    protocols = ", ".join(dict.fromkeys(str(cell.about["names"]["protocol"]) for cell in cells))
    cut = sum(bool(row["truncated_tokens"]) for row in rows)
    failed = sum(cell.failed for cell in cells)
    sizes = sorted({len(cell.ok) for cell in cells if cell.ok} or {0})
    nominal = "the paper's → " if style.paper else ""
    n = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    yield (
        f"Protocol: {protocols}. n = {n} samples a task and length; {cut} of {len(rows)} prompts truncated; "
        f"{failed} samples failed, which no mean holds. KV %: nominal → bytes measured; prefill %: {nominal}"
        "share of tokens processed, measured. Brackets: 95 % interval."
    )
    yield from _averages_note(table)
    if evidence.left_out:
        yield "Left out: " + "; ".join(f"{name} ({why})" for name, why in evidence.left_out.items()) + "."
    yield from _reference_notes(table, style.reference)
    if not table.is_whole:
        yield f"{PARTIAL} rests on n of N samples; without a score a task has not begun."
    if style.paper is not None:
        yield (
            f"Paper: its model is {style.paper.model}. {SECONDARY} read in the paper by others; a value that "
            "could not be had is empty."
        )
        yield from style.paper.oddities
    yield from evidence.notes


def _averages_note(table: Table) -> Iterator[str]:
    """Over what the averages are, and the suite's other averages of each row."""
    others: dict[str, list[str]] = {}
    for row in table.rows:
        for length in dict.fromkeys(cell.length for cell in row.cells):
            its = [cell for cell in row.cells if cell.length == length and cell.ok]
            scores = {cell.subtask: [scored(r) for r in cell.ok.values()] for cell in its}
            for label, value in (averages_of(its[0].about, scores) if scores else {}).items():
                told = others.setdefault(label, [])
                if table.setting is None:
                    told.append(f"{_name(row)} at {length} {value:.2f}")
    plain = [label for label in others if "mean of" in label and "category" not in label]
    if plain:
        yield f"Averaged over tasks: {'; '.join(plain)}."
    for label in [label for label in others if label not in plain and others[label]]:
        yield f"{label}: {'; '.join(others[label])}."


def _reference_notes(table: Table, reference: str) -> Iterator[str]:
    compared = [
        (row, name, entry)
        for row in table.rows
        for name, entry in row.entries.items()
        if entry.comparison is not None and (name == AVERAGE or len(table.columns) == 1 or table.setting)
    ]
    if not compared:
        return
    itself = f" (itself: from its default {table.setting})" if is_sweep(table) else ""
    yield (
        f"{NOISE} can't be told from {reference}{itself} at the same KV budget (full: at the largest), 5 % "
        "level, on the same samples: McNemar for one task of rights and wrongs, else paired t; Holm over "
        f"{'all' if table.setting else 'the rows'}."
    )
    needed = [
        f"{_name(row)} {f'at {table.setting}={name} ' if table.setting else ''}{entry.comparison.n_needed}"
        for row, name, entry in compared
        if is_noise(entry) and entry.comparison is not None and entry.comparison.n_needed
    ]
    if needed:
        yield (
            "Samples that would tell a true difference of the size seen, were it the only one (80 % power, "
            f"no Holm): {'; '.join(needed)}."
        )


def _name(row: TableRow) -> str:
    return row.label if row.kv_ratio is None else f"{row.label} {100 * row.kv_ratio:g} %"


def tidy(table: Table, style: Style) -> list[dict[str, Any]]:
    """A line for each entry, with all that is known of it; None where there is nothing to say."""
    return [
        _tidy(table, row, name, entry, style) for row in table.rows for name, entry in row.entries.items()
    ]


def _tidy(table: Table, row: TableRow, name: str, entry: Entry, style: Style) -> dict[str, Any]:
    comparison = entry.comparison
    other = reference_row(table, row, style.reference)
    printed = _printed(style.paper, row, table, name) if style.paper else None

    def percent(value: float | None) -> float | None:
        return None if value is None else round(100 * value, 4)

    return {
        "model": row.model,
        "method": row.label,
        "kv_nominal_pct": percent(row.kv_ratio),
        "kv_pct": None if entry.kv_pct is None else round(entry.kv_pct, 4),
        "prefill_pct": None if entry.prefill_pct is None else round(entry.prefill_pct, 4),
        "column": name,
        "score": None if entry.score is None else round(entry.score, 4),
        "low": percent(entry.interval.low),
        "high": percent(entry.interval.high),
        "n": entry.n,
        "asked": entry.asked,
        "reference": other.label if comparison and other else None,
        "difference": percent(comparison.difference) if comparison else None,
        "difference_low": percent(comparison.low) if comparison else None,
        "difference_high": percent(comparison.high) if comparison else None,
        "p_holm": None if entry.p_value is None else float(f"{entry.p_value:.4g}"),
        "n_needed": comparison.n_needed if comparison else None,
        "paper": printed.value if printed else None,
        "paper_secondary": printed.secondary if printed else None,
    }
