"""SnapKV (Li et al., NeurIPS 2024, arXiv 2404.14469): what the last queries look at stays."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Kept, check_choice, check_window

from .allocation import Allocated
from .compat import is_fastkv
from .scoring import GROUPS, HEADS, POOLINGS, over_group, pool


@dataclass(frozen=True)
class SnapKV(Allocated):
    """s_j = sum over the last w queries of a_tj, pooled; keep the best and the window itself.

    The official code (FasterDecoding/SnapKV) ranks per query head and stores each query head's copy:
    `heads: query`. By default entries are chosen per KV head, so that 10 % is 10 % of the bytes.
    """

    pooling: str = "max"
    kernel: int = 7
    heads: str = "kv"
    group: str = "mean"
    """How a KV head's score comes from its query heads', before pooling (KVCache-Factory's order)."""
    compat: str = "none"
    """`fastkv`: `heads` is `query`, as FastKV's harness has it."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if is_fastkv(self.compat):
            object.__setattr__(self, "heads", "query")
        super().__post_init__()
        check_window(self.window, self.kernel)
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("heads", self.heads, HEADS)
        check_choice("group", self.group, GROUPS)

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt."""
        return _SnapKVCompressor(self, self.layer_budgets(prompt_tokens, layers))

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The window, unless everything is kept."""
        budgets = self.layer_budgets(prompt_tokens, layers)
        return [self.window if budget < prompt_tokens else 0 for budget in budgets]

    def stored_heads(self, heads: int, kv_heads: int) -> int:
        """Query heads store copies where they choose."""
        return heads if self.heads == "query" else kv_heads

    def scores(self, layer: LayerView) -> Tensor:
        """Score of each token before the window: [kv_heads or heads, tokens - window]."""
        attention = layer.window_attention(self.window)[:, :, : -self.window]
        scores = attention.sum(1)
        if self.heads == "kv":
            scores = over_group(scores, layer.kv_heads, self.group)
        return pool(scores, self.pooling, self.kernel)


@dataclass
class _SnapKVCompressor(Compressor):
    method: SnapKV
    budgets: list[int]
    """Per layer."""

    def keep_kv(self, layer: LayerView) -> Kept:
        budget = self.budgets[layer.index]
        if budget >= layer.tokens:
            return None
        return self.method.chosen(self.method.scores(layer), budget, layer.tokens)
