"""Samples -> rows: a prefill for each, one decode for all; a failure is a row, and no other row's affair.

What fails is run again in smaller company: a batch's samples each by itself, a sample's cells each by itself.
Only what was lost with a fault is computed twice.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from structkv_bench.engine.decode import Ending, Generated, ask, decode_batch
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled, prefill
from structkv_bench.plan import Cell
from structkv_bench.samples import prompt_hash
from structkv_bench.store import Row
from structkv_bench.task import Sample

OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory")
"""At the end of tracebacks: of torch on a GPU, of Python, of torch on a CPU."""
OWN = {"sample", "status", "prompt_tokens", "truncated_tokens", "prompt_sha256", "references", "fields",
       "error", "generated_ids", "prediction", "score", "extra_scores", "tie_margin", "decode_s",
       "decode_rows"}  # fmt: skip
"""Of a row, beside what a prefill measures; no method may say these of itself."""


@dataclass(frozen=True)
class Order:
    """A sample, and the cells that are to run on it with their methods, as calibrated."""

    sample: Sample
    cells: Sequence[Cell]
    methods: Sequence[Method]

    def alone(self) -> list[Order]:
        """Each cell by itself."""
        return [
            Order(self.sample, [cell], [method])
            for cell, method in zip(self.cells, self.methods, strict=True)
        ]


@dataclass
class _Filled:
    """A sample whose prompt has gone through the model."""

    order: Order
    ids: list[int]
    rows: list[Prefilled]
    """Of each cell."""
    facts: list[dict[str, Any]]
    """Of each cell, taken before decoding takes its cache over."""
    asked_s: float
    """Seconds of the question that was fed over the compressed caches."""

    @property
    def going(self) -> list[Prefilled]:
        """Rows that can be decoded."""
        return [row for row in self.rows if row.error is None]


def run_batch(model: Model, orders: Sequence[Order]) -> list[list[Row]]:
    """The rows of each order's cells; what a method raises fails its own row alone.

    Rows decode together as far as memory allows: an order that does not fit beside those that wait for their
    answers comes after them.
    """
    found: list[list[Row]] = []
    while len(found) < len(orders):
        filled, error = _fill(model, orders[len(found) :])
        if filled:
            found += _answered(model, filled)
        else:
            found.append(_cell_by_cell(model, orders[len(found)], error))
    return found


def out_of_memory(error: str | None) -> bool:
    """Whether a traceback is one of memory that was not to be had."""
    _, _, last_code = (error or "").rpartition("\n  ")
    _, _, message = last_code.partition("\n")  # of several lines, perhaps
    return any(kind in message for kind in OUT_OF_MEMORY)


def _fill(model: Model, orders: Sequence[Order]) -> tuple[list[_Filled], str]:
    """Orders prefilled one after another, up to a fault that can't be laid to one method; and that fault."""
    filled: list[_Filled] = []
    try:
        for order in orders:
            filled.append(_filled(model, order))
    except Exception:
        return filled, traceback.format_exc()
    return filled, ""


def _filled(model: Model, order: Order) -> _Filled:
    """One prefill for all cells; a method that fails while choosing entries has left the group."""
    context, question = model.prompts.parts(order.sample)
    compressors = [method.compressor(len(context), model.shape.layers) for method in order.methods]
    rows = prefill(model, context, compressors)
    filled = _Filled(order, context + question, rows, [_facts(model, row) for row in rows], 0.0)
    filled.asked_s = ask(model, filled.going, question)
    return filled


def _answered(model: Model, filled: list[_Filled]) -> list[list[Row]]:
    """Decode all rows together. Where a fault can't be laid to one of them, each order begins anew by itself.

    `filled` is empty afterwards, so that what runs again has the memory to itself.
    """
    orders, error = [one.order for one in filled], ""
    try:
        found = _decoded(model, filled)
    except Exception:
        error = traceback.format_exc()
    filled.clear()
    if error:
        return [
            run_batch(model, [order])[0] if len(orders) > 1 else _cell_by_cell(model, order, error)
            for order in orders
        ]
    for order, rows in zip(orders, found, strict=True):
        for place, row in enumerate(rows):
            if out_of_memory(row["error"]) and (len(orders) > 1 or len(rows) > 1):
                [[rows[place]]] = run_batch(model, [order.alone()[place]])
    return found


def _decoded(model: Model, filled: Sequence[_Filled]) -> list[list[Row]]:
    going = [(row, _ending(model, one.order.sample)) for one in filled for row in one.going]
    answers = iter(decode_batch(model, [row for row, _ in going], [ending for _, ending in going]))
    together = {"decode_rows": len(going)} if len(filled) > 1 else {}
    found = []
    for one in filled:
        its = [next(answers) if row.error is None else None for row in one.rows]
        found.append([_row(model, one, place, answer, together) for place, answer in enumerate(its)])
    return found


def _ending(model: Model, sample: Sample) -> Ending:
    newline = model.prompts.newline_ids() if sample.stop_at_newline else frozenset[int]()
    return Ending(sample.max_new_tokens, newline, sample.min_new_tokens)


def _cell_by_cell(model: Model, order: Order, error: str) -> list[Row]:
    """Rows of an order that failed as a whole."""
    torch.cuda.empty_cache()  # what is free lies in pieces after an attempt that was broken off
    if len(order.cells) > 1:
        return [run_batch(model, [alone])[0][0] for alone in order.alone()]
    ids = [id for part in model.prompts.parts(order.sample) for id in part]
    return [_about(order.sample, ids) | {"status": "failed", "error": error}]


def _facts(model: Model, result: Prefilled) -> dict[str, Any]:
    """What a prefill tells of itself; where a method can't tell, it has failed."""
    facts: dict[str, Any] = {"prefill_s": round(result.seconds, 4)}
    if result.error is not None:
        return facts
    tokens = result.prompt_tokens
    measured = facts | {
        "kept_entries": result.cache.entries(),
        "kv_bytes": result.cache.bytes(),
        "kv_bytes_full": model.shape.kv_bytes([tokens] * model.shape.layers),
        "prefill_pct": round(100 * result.prefill_share, 4),
        "prefill_parts_s": {part: round(seconds, 5) for part, seconds in result.parts.items()},
        "fidelity": result.fidelity,
    }
    try:
        own = _plain(result.compressor.facts())
        if taken := own.keys() & (measured.keys() | OWN):
            raise ValueError(f"facts() may not say {', '.join(sorted(taken))}: a row has that already")
    except Exception:
        result.error = traceback.format_exc()
        return facts
    return measured | own


def _plain(reported: dict[str, Any]) -> dict[str, Any]:
    """What a plug-in reports, which must be plain numbers and text.

    Raises:
        TypeError, ValueError: it is not.
    """
    plain = json.loads(json.dumps(reported, allow_nan=False, sort_keys=True))
    if not isinstance(plain, dict):
        raise TypeError(f"names and values are wanted, not {reported!r}")
    return plain


def _row(
    model: Model, filled: _Filled, place: int, answer: Generated | None, together: dict[str, int]
) -> Row:
    """All that is needed to judge one prediction."""
    sample, cell = filled.order.sample, filled.order.cells[place]
    row = _about(sample, filled.ids) | filled.facts[place]
    if answer is None:
        return row | {"status": "failed", "error": filled.rows[place].error}
    prediction = model.prompts.decode(answer.ids)
    try:
        scores = _plain(
            {
                "score": cell.task.score(cell.subtask, sample, prediction),
                "extra_scores": cell.task.extra_scores(cell.subtask, sample, prediction),
            }
        )
    except Exception:
        return row | {"status": "failed", "error": traceback.format_exc()}
    measured = {
        "tie_margin": round(answer.tie_margin, 6),
        "decode_s": round(filled.asked_s + answer.seconds, 4),
        **together,
    }
    return row | {"generated_ids": answer.ids, "prediction": prediction, **scores, **measured}


def _about(sample: Sample, ids: list[int]) -> Row:
    """What a row tells of its prompt; beside it what holds where nothing else is said."""
    return {
        "sample": sample.id,
        "status": "ok",
        "prompt_tokens": len(ids),
        "truncated_tokens": sample.truncated_tokens,
        "prompt_sha256": prompt_hash(ids),
        "references": list(sample.references),
        "fields": sample.fields,
        "pivot": None,
        "error": None,
    }
