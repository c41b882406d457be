"""Attention that each key receives, summed over the queries: exact, and never a matrix of tokens x tokens.

One form is torch's, in blocks of queries, and runs anywhere; the other is a Triton kernel for CUDA
(column_sums_triton.py), taken where it has won a race against the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from structkv_bench.engine.race import Race

COLUMN_SUM_BLOCK = 64
"""Queries per block of torch's form: its largest tensor holds heads x tokens x this many numbers."""


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


def column_sums(given: Attending, first: int, newest_weight: float) -> Tensor:
    """Attention that each key receives from the queries `first` and later that see it, fp32: [heads, tokens].

    The queries' weights rise in even steps from 1 to `newest_weight`. On CUDA the first call of each size
    runs both forms and takes the time of them; which one is used from then on changes the rounding alone.
    """
    if not given.query.is_cuda or given.causal_from:
        return in_blocks(given, first, newest_weight)
    size = (given.query.device, given.query.dtype, given.query.shape[0], given.key.shape[::2])
    lengths = (given.tokens.bit_length(), (given.tokens - first).bit_length())
    return _race()((size, lengths), given, first, newest_weight)


@cache
def _race() -> Race:
    """Of the two forms; of torch's alone where triton is not installed."""
    try:
        from structkv_bench.engine.column_sums_triton import in_two_passes
    except ImportError:
        return Race(in_blocks, None)
    return Race(in_blocks, in_two_passes)


def in_blocks(given: Attending, first: int, newest_weight: float) -> Tensor:
    """Torch's form of `column_sums`."""
    total = torch.zeros(given.query.shape[0], given.tokens, device=given.query.device)
    weights = query_weights(given, first, newest_weight)
    for start in range(first, given.tokens, COLUMN_SUM_BLOCK):
        stop = min(start + COLUMN_SUM_BLOCK, given.tokens)
        rows = given.probabilities(start, stop)
        if newest_weight != 1:
            rows *= weights[start - first : stop - first, None]
        total[:, : rows.shape[-1]] += rows.sum(1)
        del rows  # before the next block is made
    return total


def query_weights(given: Attending, first: int, newest_weight: float) -> Tensor:
    """What each query from `first` on counts: [queries], fp32."""
    return torch.linspace(1.0, newest_weight, given.tokens - first, device=given.query.device)
