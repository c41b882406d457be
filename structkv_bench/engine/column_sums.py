"""Attention that each key receives, summed over the queries: exact, and never a matrix of tokens x tokens.

One form is torch's, in blocks of queries, and runs anywhere; the other is a Triton kernel for CUDA
(column_sums_triton.py), taken where it has won a race against the first.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from structkv_bench.engine.attending import Attending, query_weights
from structkv_bench.engine.race import Race

COLUMN_SUM_BLOCK = 64
"""Queries per block of torch's form: its largest tensor holds heads x tokens x this many numbers."""


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
