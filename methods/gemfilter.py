"""GemFilter (Shi et al., 2024, arXiv 2409.17422): an early layer chooses tokens, which then are the prompt.

    s_j = avgpool( sum over heads h of q_h . k_j )      q of the last token, at layer r: no scale, no softmax
    I   = top-k(s, N R)                                 no token is sure of its place, the last one neither

The pass over the prompt ends at layer r. The chosen tokens start again at the first layer, in their order,
at positions 0 .. k-1, and all their entries stay: one number is the budget of prefill and of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Budgeted, Compressor, check_layer, check_window
from structkv_bench.errors import UserError

from .scoring import best_and_last, pool

PUBLISHED = {32: 13, 36: 17, 40: 19}
"""r by depth: Llama-3.1-8B and Mistral-Nemo (the authors), Ministral-8B (FastKV's harness)."""


@dataclass(frozen=True)
class GemFilter(Budgeted):
    """Settings of GemFilter (SalesforceAIResearch/GemFilter); `kv_ratio` is R."""

    filter_layer: int | None = None
    """r; by default the published one for a model of this depth, else at 0.4 of the depth."""
    kernel: int = 5
    last: int = 0
    """How many last tokens are always chosen; the official 0 may cut the turn that asks for an answer."""

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_window(1, self.kernel)
        if self.last < 0:
            raise UserError(f"last={self.last}: give 0 or more")

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt.

        Raises:
            UserError: a layer outside the model, or a budget not above `last`.
        """
        chosen = self.entries(prompt_tokens, self.last)
        return _GemFilterCompressor(self, chosen, check_layer("filter_layer", self.filter(layers), layers))

    def layer_tokens(self, prompt_tokens: int, layers: int) -> list[int]:
        """The chosen tokens, and up to layer r the whole prompt beside them."""
        ways = self.passes(prompt_tokens, layers)
        return [sum(tokens) for tokens in zip_longest(*ways, fillvalue=0)]

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The last one, at layer r."""
        chooses = self.entries(prompt_tokens) < prompt_tokens
        return [int(chooses and layer == self.filter(layers)) for layer in range(layers)]

    def passes(self, prompt_tokens: int, layers: int) -> list[list[int]]:
        """The prompt up to layer r, then the chosen tokens through all layers."""
        chosen = self.entries(prompt_tokens, self.last)
        if chosen >= prompt_tokens:
            return [[prompt_tokens] * layers]
        return [[prompt_tokens] * (self.filter(layers) + 1), [chosen] * layers]

    def filter(self, layers: int) -> int:
        """r of a model of this many layers."""
        if self.filter_layer is not None:
            return self.filter_layer
        return PUBLISHED.get(layers, min(round(0.4 * layers), layers - 1))

    def scores(self, layer: LayerView) -> Tensor:
        """s of each token: [1, tokens]."""
        last = layer.query[:, -1].reshape(layer.kv_heads, layer.group_size, -1)
        products = (last @ layer.key.transpose(1, 2)).float()
        return pool(products.sum((0, 1))[None], "avg", self.kernel)


@dataclass
class _GemFilterCompressor(Compressor):
    method: GemFilter
    entries: int
    """k: more tokens than these is the pass that filters, and as many the one over the chosen."""
    filter: int
    begins_anew = True

    def keep_kv(self, layer: LayerView) -> Tensor | None:
        if self.entries >= layer.tokens:
            return None
        return torch.empty(layer.kv_heads, 0, dtype=torch.long, device=layer.key.device)

    def keep_tokens(self, layer: LayerView) -> Tensor | None:
        if layer.index != self.filter or self.entries >= layer.tokens:
            return None
        with layer.timed("scoring"):
            scores = self.method.scores(layer)
        return best_and_last(scores, self.entries, self.method.last, layer.tokens)[0]

    def facts(self) -> dict[str, Any]:
        """The layer that filters, in the column of StructKV's pivot."""
        return {"pivot": self.filter}
