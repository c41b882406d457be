"""Greedy decode, equal to one row at a time for any batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structkv_bench.engine.batch import Batch
from structkv_bench.engine.clock import now
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled


@dataclass(frozen=True)
class Ending:
    """When an answer ends."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    """Ids that end it beside the model's own."""
    min_new_tokens: int = 0
    """For so many tokens the best one that is no stop id is taken."""


@dataclass
class Generated:
    """What one row produced."""

    ids: list[int]
    """Without the stop id."""
    tie_margin: float
    """Smallest gap between the best and second logit: near 0, another batch may have chosen otherwise."""
    seconds: float
    """Wall time of the batch until this row finished."""
    forward_passes: int
    """Prefill included."""


def decode(
    model: Model,
    rows: Sequence[Prefilled],
    max_new_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    min_new_tokens: int = 0,
    question: Sequence[int] = (),
) -> list[Generated]:
    """As `decode_batch`, with one ending for all rows, after a `question` that each is fed first."""
    asked_s = ask(model, rows, question)
    ending = Ending(max_new_tokens, stop_ids, min_new_tokens)
    answers = decode_batch(model, rows, [ending] * len(rows))
    for answer in answers:
        answer.seconds += asked_s
    return answers


def ask(model: Model, rows: Sequence[Prefilled], question: Sequence[int]) -> float:
    """Feed every row `question` over its compressed cache, as if it had been prefilled too; the seconds."""
    if not rows or not question:
        return 0.0
    with torch.inference_mode():
        ids = torch.tensor([list(question)] * len(rows), device=model.device)
        started = now(ids)
        batch = Batch(model, rows, room=len(question))
        logits = batch.forward(ids)
        for row, cache, its in zip(rows, batch.release(), logits, strict=True):
            row.cache, row.logits = cache, its
        return now(logits) - started


def decode_batch(model: Model, rows: Sequence[Prefilled], endings: Sequence[Ending]) -> list[Generated]:
    """Continue rows of any prompts greedily, each to its own ending; takes their caches over.

    Args:
        model: the model that filled the caches.
        rows: from `prefill`, none with an error.
        endings: of each row.

    Raises:
        FloatingPointError: logits of a row are not finite.
    """
    if not rows:
        return []
    stops = [ending.stop_ids | model.stop_ids for ending in endings]
    with torch.inference_mode():
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        started = now(logits)
        batch: Batch | None = None
        results = [Generated([], float("inf"), 0.0, 0) for _ in rows]
        places = list(range(len(rows)))
        while places:
            for i, place in enumerate(places):
                if len(results[place].ids) < endings[place].min_new_tokens:
                    logits[i, sorted(stops[place])] = -torch.inf
            chosen, going_on = _greedy(logits), []
            for i, place in enumerate(places):
                if _extend(results[place], *chosen[i], stops[place], endings[place].max_new_tokens):
                    going_on.append(i)
                else:
                    results[place].seconds = now(logits) - started
            left = [places[i] for i in going_on]
            if left and batch is None:
                room = max(endings[place].max_new_tokens for place in left)
                batch = Batch(model, [rows[place] for place in left], room)
            elif left and len(left) < len(places) and batch is not None:
                batch.retire(going_on)
            places = left
            if places and batch is not None:
                last = [[results[place].ids[-1]] for place in places]
                logits = batch.forward(torch.tensor(last, device=model.device))
        return results


def _greedy(logits: Tensor) -> list[tuple[int, float]]:
    """Best token of each row and its lead over the second; of equals, the lowest id.

    Raises:
        FloatingPointError: a row has overflowed.
    """
    best = logits.argmax(-1)
    top = logits.topk(2, dim=-1).values
    margins = (top[:, 0] - top[:, 1]).tolist()
    if not all(map(math.isfinite, margins)):
        raise FloatingPointError("logits are not finite")
    return list(zip(best.tolist(), margins, strict=True))


def _extend(row: Generated, token: int, margin: float, stop_ids: frozenset[int], limit: int) -> bool:
    """Add a token to a row; False when the row is finished."""
    row.forward_passes += 1
    row.tie_margin = min(row.tie_margin, margin)
    if token in stop_ids:
        return False
    row.ids.append(token)
    return len(row.ids) < limit
