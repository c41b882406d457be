"""Cells of two result sets side by side, sample by sample; or why a cell has no equal in the other set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from structkv_bench.gate.baseline import Cell, ResultSet
from structkv_bench.store import Row

FULL = "full"
"""The method whose time the others' are a share of."""
SECONDS = ("prefill_s", "decode_s")


@dataclass(frozen=True)
class Share:
    """Seconds of one sample as a share of the full cache's on the same sample."""

    before: float
    after: float
    full_s: float
    """The full cache's own, after."""


@dataclass(frozen=True)
class Pair:
    """A cell before and after."""

    cell: Cell
    rows: list[tuple[Row, Row]]
    """Of the samples that worked both times."""
    failed: list[str]
    """Samples that work no longer."""
    shares: dict[str, list[Share]]
    """By the kind of seconds; empty where a set has no full cache beside the cell."""

    def same_answer(self) -> list[tuple[Row, Row]]:
        """Rows of the samples with the same ids."""
        return [(a, b) for a, b in self.rows if a["generated_sha256"] == b["generated_sha256"]]

    def other_answer(self) -> list[tuple[Row, Row]]:
        """Rows of the samples with other ids."""
        return [(a, b) for a, b in self.rows if a["generated_sha256"] != b["generated_sha256"]]


@dataclass(frozen=True)
class Obstacle:
    """Why a cell can't be compared."""

    label: str
    says: str


def paired(before: ResultSet, after: ResultSet) -> tuple[list[Pair], list[Obstacle]]:
    """A pair for each cell of `before` that can be compared, and for each other one an obstacle."""
    pairs: list[Pair] = []
    obstacles: list[Obstacle] = []
    full_before, full_after, places = _full(before), _full(after), _places(after)
    for cell in before.cells.values():
        other = after.cells.get(cell.key)
        if other is None:
            obstacles.append(Obstacle(cell.label, _nearest(cell, places.get(_place(cell), []))))
        elif why := _obstacle(cell, other):
            obstacles.append(Obstacle(cell.label, why))
        else:
            full = [rows.get(_beside(cell), {}) for rows in (full_before, full_after)]
            pairs.append(_pair(cell, other, full[0], full[1]))
    return pairs, obstacles


def named(samples: Sequence[str]) -> str:
    """How many samples, and the first few."""
    return f"{len(samples)} ({', '.join(samples[:4])}{', ...' if len(samples) > 4 else ''})"


def _obstacle(cell: Cell, other: Cell) -> str | None:
    """Why rows of the same settings can't be compared."""
    if cell.model and other.model and cell.model != other.model:
        return f"another model: {_differing(cell.model, other.model)}"
    failed = [row["sample"] for row in cell.rows if row["status"] != "ok"]
    if failed:
        return f"samples that failed in the baseline: {named(failed)}"
    prompts = {row["sample"]: row["prompt_sha256"] for row in other.rows}
    missing = [row["sample"] for row in cell.rows if row["sample"] not in prompts]
    if missing:
        return f"missing samples: {named(missing)}"
    others = [row["sample"] for row in cell.rows if row["prompt_sha256"] != prompts[row["sample"]]]
    return f"other prompts: {named(others)}" if others else None


def _place(cell: Cell) -> tuple[str, ...]:
    """What the user takes a cell for, its settings aside."""
    return (cell.names["model"], cell.names["method"], cell.config["subtask"], str(cell.config["length"]))


def _places(results: ResultSet) -> dict[tuple[str, ...], list[Cell]]:
    places: dict[tuple[str, ...], list[Cell]] = {}
    for cell in results.cells.values():
        places.setdefault(_place(cell), []).append(cell)
    return places


def _nearest(cell: Cell, alike: Sequence[Cell]) -> str:
    """Whether a missing cell is there under another protocol or with other settings."""
    if not alike:
        return "missing"
    nearest = min((_differing(cell.config, other.config) for other in alike), key=len)
    return f"{'another protocol' if nearest.startswith('protocol ') else 'other settings'}: {nearest}"


def _differing(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What differs between two settings, the protocol first."""
    old, new = dict(_flat(a)), dict(_flat(b))
    names = [name for name in old | new if old.get(name) != new.get(name)]
    names.sort(key=lambda name: name != "protocol")
    return ", ".join(f"{name} {old.get(name)}, now {new.get(name)}" for name in names)


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _beside(cell: Cell) -> str:
    """Equal for cells on the same prompts and model."""
    return json.dumps({**cell.config, "method": None}, sort_keys=True)


def _full(results: ResultSet) -> dict[str, dict[str, Row]]:
    """Rows of the full caches by sample, for each set of prompts."""
    return {
        _beside(cell): {row["sample"]: row for row in cell.rows if row["status"] == "ok"}
        for cell in results.cells.values()
        if cell.names["method"] == FULL
    }


def _pair(cell: Cell, other: Cell, full_before: dict[str, Row], full_after: dict[str, Row]) -> Pair:
    now = {row["sample"]: row for row in other.rows}
    both = [(row, now[row["sample"]]) for row in cell.rows]
    rows = [(a, b) for a, b in both if b["status"] == "ok"]
    failed = [a["sample"] for a, b in both if b["status"] != "ok"]
    shares: dict[str, list[Share]] = {}
    for a, b in rows:
        x, y = full_before.get(a["sample"], {}), full_after.get(a["sample"], {})
        for name in SECONDS if _decoded_alike(a, x, b, y) else SECONDS[:1]:
            if x.get(name) and y.get(name):
                shares.setdefault(name, []).append(Share(a[name] / x[name], b[name] / y[name], y[name]))
    return Pair(cell, rows, failed, shares)


def _decoded_alike(*rows: Row) -> bool:
    """Whether all are of decode batches of one size: the seconds of a larger one are no measure of others."""
    return len({row.get("decode_rows") for row in rows}) == 1
