"""AdaKV (Feng et al., NeurIPS 2025, arXiv 2407.11550): heads whose attention is spread out hold more.

    T   = the H b best of all scores of a layer's H heads     b = C - w, the mean budget beside the window
    b_h = round( (1 - alpha) |T in head h| + floor(alpha b) )    a head then holds its own best b_h and the w

alpha is what no head falls below; rounding may leave a layer a few entries off H C.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .scoring import best


def head_budgets(scores: Tensor, entries: int, alpha: float, normalize: bool) -> list[int]:
    """b_h of each head (FFY0/AdaKV).

    Args:
        scores: [heads, tokens before the window]
        entries: b
        alpha: share of b that each head is sure of.
        normalize: count a head's scores by the share of them that its best b hold; off in the authors'
            LongBench runs, on in KVCache-Factory's.
    """
    heads, tokens = scores.shape
    if normalize:
        whole = scores.sum(1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)  # of a head without any
        scores = scores * (scores.topk(entries).values.sum(1, keepdim=True) / whole)
    [together] = best(scores.flatten()[None], heads * entries)
    counts = torch.bincount(together // tokens, minlength=heads).tolist()
    return [round(count * (1 - alpha) + int(entries * alpha)) for count in counts]
