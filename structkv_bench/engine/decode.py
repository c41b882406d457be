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
    """Continue every row greedily to a stop id or `max_new_tokens`; takes the rows' caches over.

    Args:
        model: the model that filled the caches.
        rows: from `prefill`, none with an error.
        max_new_tokens: at most this many for each row.
        stop_ids: ids that end an answer beside the model's own.
        min_new_tokens: for so many tokens the best one that is no stop id is taken.
        question: tokens that every row is fed first, over its compressed cache.

    Raises:
        FloatingPointError: logits of a row are not finite.
    """
    if not rows:
        return []
    stop_ids |= model.stop_ids
    with torch.inference_mode():
        logits = torch.stack([row.logits for row in rows if row.logits is not None])
        started = now(logits)
        batch = None
        if question:
            batch = Batch(model, rows, room=len(question) + max_new_tokens)
            logits = batch.forward(torch.tensor([list(question)] * len(rows), device=model.device))
        results = [Generated([], float("inf"), 0.0, 0) for _ in rows]
        places = list(range(len(rows)))
        while places:
            if len(results[places[0]].ids) < min_new_tokens:  # rows that go on have equally many
                logits[:, sorted(stop_ids)] = -torch.inf
            chosen, going_on = _greedy(logits), []
            for i, place in enumerate(places):
                if _extend(results[place], *chosen[i], stop_ids, max_new_tokens):
                    going_on.append(i)
                else:
                    results[place].seconds = now(logits) - started
            if going_on and batch is None:
                batch = Batch(model, [rows[places[i]] for i in going_on], room=max_new_tokens)
            elif going_on and len(going_on) < len(places) and batch is not None:
                batch.retire(going_on)
            places = [places[i] for i in going_on]
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
