"""A method that gives a test the time to interfere, outside of pytest's process."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Method
from structkv_bench.engine.model import Model


@dataclass(frozen=True)
class Slow(Method):
    """Keeps the last entries; takes SLOW_S seconds for a prompt, unless its task was requeued."""

    keep: int = 50

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return _Slow(self.keep)

    def calibrated(self, model: Model) -> Method:
        if "SLOW_DIES" in os.environ:
            raise ZeroDivisionError("told to die")
        return self


class _Slow(Compressor):
    def __init__(self, keep: int) -> None:
        self.keep = keep

    def keep_kv(self, layer: LayerView) -> torch.Tensor:
        if layer.index == 0 and not os.environ.get("SLURM_RESTART_COUNT"):
            time.sleep(float(os.environ.get("SLOW_S", "0")))
        return torch.arange(layer.tokens - self.keep, layer.tokens).expand(layer.kv_heads, -1)
