"""The numbers that the paper prints (results/paper/), as they stand beside ours."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

ODDITIES = {
    "table1": "StreamingLLM's NarrativeQA 27.99 and TriviaQA 89.96 at 20 % stand in the paper's Table 5 too.",
    "table2": "The paper's full row is not monotone in length; its H2O has a value at 8K alone.",
    "table5": "The paper prints Qasper 44.79 for StreamingLLM at 10 %, at 20 % and for the full cache; its "
    "NarrativeQA 27.99 and TriviaQA 89.96 at 20 % stand in Table 1 too.",
}
"""Of the printed tables; the values are kept as they are."""
FILES = ("longbench.csv", "ruler.csv", "decay.csv")


@dataclass(frozen=True)
class Printed:
    """One number of the paper's."""

    value: float
    secondary: bool
    """Whether it was read by others in the paper and quoted by them."""


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, as far as its numbers could be had."""

    model: str
    scores: dict[tuple[str, float | None, str], Printed]
    """By method, KV in percent (None: not said) and column."""
    prefill_pct: dict[tuple[str, float | None], float]
    oddities: list[str]

    def score(self, method: str, kv_pct: float | None, column: str) -> Printed | None:
        """What the paper prints there; None: nothing that could be had."""
        return self.scores.get((method, kv_pct, column_name(column)))


def paper_table(name: str) -> PaperTable:
    """A table by the name that results/paper/ gives it."""
    rows = [row for file in FILES for row in read_csv(file) if row["table"] == name]
    scores, prefill = {}, {}
    for row in rows:
        method, kv = row["method"], float(row["kv_pct"]) if row["kv_pct"] else None
        column = row.get("task") or row.get("length") or row["decay"]
        scores[method, kv, column_name(column)] = Printed(float(row["score"]), row["source"] != "paper")
        if row.get("prefill_pct"):
            prefill[method, kv] = float(row["prefill_pct"])
    odd = [ODDITIES[name]] if name in ODDITIES else []
    return PaperTable(rows[0]["model"] if rows else "", scores, prefill, odd)


def column_name(value: Any) -> str:
    """Numbers as they are compared: 0.50 and 0.5 are one column."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return str(value)


def read_csv(name: str) -> list[dict[str, str]]:
    """Rows of one of the files."""
    text = (files("structkv_bench.paper") / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
