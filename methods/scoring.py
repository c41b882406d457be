"""Steps that several methods share: pooling, sums over a GQA group, and the choice of entries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

POOLINGS = ("none", "max", "avg")
HEADS = ("kv", "query")
GROUPS = ("mean", "max", "sum")


def pool(scores: Tensor, kind: str, kernel: int) -> Tensor:
    """Smooth scores [rows, tokens] along tokens; stride 1, same length (SnapKV, section 4).

    The average counts the zeros beyond both ends; the maximum does not.
    """
    if kind == "none":
        return scores
    if kind == "max":
        return max_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]
    return avg_pool1d(scores[None], kernel, stride=1, padding=kernel // 2)[0]


def over_group(scores: Tensor, kv_heads: int, how: str) -> Tensor:
    """Reduce query-head scores [heads, tokens] over each GQA group: [kv_heads, tokens]."""
    grouped = scores.reshape(kv_heads, -1, scores.shape[-1])
    if how == "max":
        return grouped.amax(1)
    return grouped.sum(1) if how == "sum" else grouped.mean(1)


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores per row, ascending: [rows, count]; of equals, the earliest."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=-1).values


def best_and_last(scores: Tensor, entries: int, last: int, tokens: int) -> Tensor:
    """The `last` tokens, and the best of those before up to `entries` in all: [rows, entries], ascending.

    Args:
        scores: [rows, at least tokens - last]; the last tokens' own scores play no part.
        entries: how many to keep per row, more than `last`.
        last: how many at the end are always kept.
        tokens: how many there are.
    """
    chosen = best(scores[:, : tokens - last], entries - last)
    ending = torch.arange(tokens - last, tokens, device=scores.device).expand(scores.shape[0], -1)
    return torch.cat((chosen, ending), dim=1)
