"""The attention function that takes the place of transformers' own, and masks made from positions alone.

Every attention module of the model calls `attend`; the per-call object `kv_step`, handed through the
layer's keyword arguments, decides what keys the queries meet (prefill.py, decode.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMPLEMENTATION = "structkv_bench"
QUERY_BLOCK = 512
"""Queries per block where a sliding window needs a mask: it never grows to tokens x tokens."""


@dataclass(frozen=True)
class Projected:
    """What one layer's attention is given: post-RoPE projections of the tokens at hand."""

    layer: int
    query: Tensor
    """[batch, heads, tokens, head_dim]"""
    key: Tensor
    """[batch, kv_heads, tokens, head_dim]"""
    value: Tensor
    """[batch, kv_heads, tokens, head_dim]"""
    scaling: float
    sliding_window: int | None


class Step(Protocol):
    """One pass of some tokens through the layers."""

    def attend(self, projected: Projected) -> Tensor:
        """Attention output [batch, heads, tokens, head_dim] over the keys that this step knows."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kv_step: Step | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function in the form that transformers calls; returns [batch, tokens, heads, head_dim].

    Raises:
        RuntimeError: the model was called outside this engine, whose loops alone know the positions.
    """
    if kv_step is None:
        raise RuntimeError("this model is driven by structkv_bench.engine: call prefill() and decode()")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = kv_step.attend(Projected(layer, query, key, value, scaling, sliding_window))
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(IMPLEMENTATION, attend)


def causal_attention(projected: Projected, positions: Tensor) -> Tensor:
    """Attention of tokens among themselves: [1, heads, tokens, head_dim].

    `positions` [tokens] ascend, so that causal by order is causal by position, gaps or not.
    """
    query, key, value, window = projected.query, projected.key, projected.value, projected.sliding_window
    attention = partial(scaled_dot_product_attention, scale=projected.scaling, enable_gqa=True)
    if window is None or positions[-1] - positions[0] < window:
        return attention(query, key, value, is_causal=True)
    blocks = []
    for start in range(0, query.shape[2], QUERY_BLOCK):
        at = positions[start : start + QUERY_BLOCK]
        stop = start + at.shape[0]
        first = int(torch.searchsorted(positions, at[0] - window, right=True))
        mask = visible(at, positions[first:stop], window)
        keys, values = key[:, :, first:stop], value[:, :, first:stop]
        blocks.append(attention(query[:, :, start:stop], keys, values, attn_mask=mask))
    return torch.cat(blocks, dim=2)


def visible(query_positions: Tensor, key_positions: Tensor, sliding_window: int | None) -> Tensor:
    """Which keys a query sees: bool [..., queries, keys] of positions [..., queries] and [..., keys]."""
    at, keys = query_positions[..., :, None], key_positions[..., None, :]
    seen = (keys >= 0) & (keys <= at)
    if sliding_window is not None:
        seen &= keys > at - sliding_window
    return seen
