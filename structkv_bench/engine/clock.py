"""Wall-clock seconds that are true on a GPU too."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def now(like: Tensor) -> float:
    """Seconds on a monotonic clock, after all work queued on the device of `like` has finished."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()
