"""FastKV (Jo et al., 2025, arXiv 2502.01068): one layer chooses the tokens that all deeper layers run on.

    s_gj  = sum over heads h of group g of pool( sum over the last w queries t of a_tj^h )
    I_KV  = top-k(s_g, N R_KV) and the last w tokens             every layer, per KV head, from its own s
    I_TSP = top-k(sum over g of s_g, N R_TSP) and the last w     once, at layer l*: deeper layers run on these

Both budgets hold the window, and both are shares of the prompt: the official code's retain_rate / tsp_rate
of what is left after l* is R_KV of the prompt, give or take the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import (
    Compressor,
    Kept,
    check_choice,
    check_entries,
    check_layer,
    check_ratio,
    check_window,
)

from .allocation import Allocated
from .scoring import POOLINGS, best_and_last, over_group, pool


@dataclass(frozen=True)
class FastKV(Allocated):
    """Settings of FastKV (dongwonjo/FastKV); `kv_ratio` is R_KV."""

    tsp_ratio: float = 0.2
    """R_TSP: share of the prompt's tokens that the layers after l* run on; 1 never drops any."""
    tsp_layer: int | None = None
    """l*; by default layers // 2 - 1: 15 of 32, 17 of 36 and 19 of 40, as the official code has it."""
    pooling: str = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_ratio("tsp_ratio", self.tsp_ratio)
        check_window(self.window, self.kernel)
        check_choice("pooling", self.pooling, POOLINGS)

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt.

        Raises:
            UserError: a layer outside the model, or a budget not above the window.
        """
        return _FastKVCompressor(
            self,
            budgets=self.layer_budgets(prompt_tokens, layers),
            going_on=check_entries(
                f"tsp_ratio={self.tsp_ratio}", self.going_on(prompt_tokens), prompt_tokens, self.window
            ),
            cut=check_layer("tsp_layer", self.cut(layers), layers),
        )

    def layer_tokens(self, prompt_tokens: int, layers: int) -> list[int]:
        """Everything up to l*, the chosen tokens after it."""
        cut, going_on = self.cut(layers), self.going_on(prompt_tokens)
        return [prompt_tokens if layer <= cut else going_on for layer in range(layers)]

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The window, wherever entries or tokens are chosen."""
        cut = self.cut(layers) if self.going_on(prompt_tokens) < prompt_tokens else None
        budgets, tokens = self.layer_budgets(prompt_tokens, layers), self.layer_tokens(prompt_tokens, layers)
        chooses = [budget < count for budget, count in zip(budgets, tokens, strict=True)]
        return [self.window if chooses[layer] or layer == cut else 0 for layer in range(layers)]

    def cut(self, layers: int) -> int:
        """l* of a model of this many layers."""
        return max(0, layers // 2 - 1) if self.tsp_layer is None else self.tsp_layer

    def going_on(self, prompt_tokens: int) -> int:
        """N R_TSP."""
        return int(prompt_tokens * self.tsp_ratio)

    def scores(self, layer: LayerView) -> Tensor:
        """s of each token before the window: [kv_heads, tokens - window]."""
        received = layer.window_attention(self.window)[:, :, : -self.window].sum(1)
        return over_group(pool(received, self.pooling, self.kernel), layer.kv_heads, "sum")


@dataclass
class _FastKVCompressor(Compressor):
    method: FastKV
    budgets: list[int]
    """Per layer."""
    going_on: int
    cut: int

    def keep_kv(self, layer: LayerView) -> Kept:
        budget = self.budgets[layer.index]
        if budget >= layer.tokens:
            return None
        return self.method.chosen(self.method.scores(layer), budget, layer.tokens)

    def keep_tokens(self, layer: LayerView) -> Tensor | None:
        if layer.index != self.cut or self.going_on >= layer.tokens:
            return None
        scores = self.method.scores(layer).sum(0, keepdim=True)
        return best_and_last(scores, self.going_on, self.method.window, layer.tokens)[0]

    def facts(self) -> dict[str, Any]:
        """l*, in the column of StructKV's pivot."""
        return {"pivot": self.cut}
