"""Tokens of one layer and their attention to one another, taken anew where a method scores by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Attending:
    """Tokens of one layer that attend to one another."""

    query: Tensor
    """[heads, tokens, head_dim], post-RoPE"""
    key: Tensor
    """[kv_heads, tokens, head_dim], post-RoPE"""
    positions: Tensor
    """[tokens], ascending: a query sees the keys up to its own place, gaps or not."""
    scaling: float
    sliding_window: int | None = None
    """A query at position p sees no key at p - sliding_window or before."""
    causal_from: int = 0
    """Queries before this one see later keys too: what a public harness does, and no model."""

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self.key.shape[1]

    def probabilities(self, start: int, stop: int) -> Tensor:
        """Attention of queries start..stop-1 to keys 0..stop-1, fp32: [heads, stop-start, stop].

        It is to all keys where one of these queries sees later ones: [heads, stop-start, tokens]. Products
        are taken in the model's dtype, as its own attention takes them, and the softmax in fp32.
        """
        heads, _, head_dim = self.query.shape
        kv_heads, rows = self.key.shape[0], stop - start
        width = stop if start >= self.causal_from else self.tokens
        grouped = self.query[:, start:stop].reshape(kv_heads, heads // kv_heads * rows, head_dim)
        keys = self.key[:, :width].transpose(1, 2)
        # beta=0: the product is scaled where it is made, and the first argument is never read
        logits = torch.baddbmm(grouped.new_empty(1, 1, 1), grouped, keys, beta=0, alpha=self.scaling)
        logits = logits.float().view(heads, rows, width)
        at, keys_at = self.positions[start:stop, None], self.positions[:width]
        causal = max(start, self.causal_from)
        logits[:, causal - start :, causal:].masked_fill_(keys_at[causal:] > at[causal - start :], -torch.inf)
        if self.sliding_window is not None:
            logits.masked_fill_(keys_at <= at - self.sliding_window, -torch.inf)
        return logits.softmax(-1)


def query_weights(given: Attending, first: int, newest_weight: float) -> Tensor:
    """What each query from `first` on counts: [queries], fp32."""
    return torch.linspace(1.0, newest_weight, given.tokens - first, device=given.query.device)
