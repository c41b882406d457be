"""PyramidInfer (Yang et al., ACL Findings 2024, arXiv 2405.12532): each layer passes fewer tokens on.

    p_j = sum over the recent queries t of u_t (mean over heads of a_tj)    u_t rises from 1 to newest_weight
    d_l = (1 - rho) (cos(pi l / L) + 1) / 2 + rho                           1 at the first layer, toward rho
    I_l = the first tokens, top-k(p, n d_l) of the n before the recent ones, and those: they run on in l + 1

Cuts add up from layer to layer. A layer's entries are those of all tokens that entered it, so the budget
is the mean over layers that comes out, not a share per layer: the rows tell it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Method, check_ratio
from structkv_bench.errors import UserError

from .scoring import best_and_last


@dataclass(frozen=True)
class PyramidInfer(Method):
    """Settings of PyramidInfer as FastKV's harness runs it; by default its "60 %" of Llama-3.1-8B."""

    recent_ratio: float = 0.2
    """Share of the prompt that is recent: it scores the tokens before it and is never cut itself."""
    decay_ratio: float = 0.7
    """rho, where the share that a layer passes on would end at layer L."""
    newest_weight: float = 1.2
    sinks: int = 4
    """First tokens, always passed on."""
    min_context: int = 64
    """A layer that would pass on no more than these of the tokens before the recent ones cuts none."""

    def __post_init__(self) -> None:
        """Check the settings."""
        check_ratio("recent_ratio", self.recent_ratio)
        check_ratio("decay_ratio", self.decay_ratio)
        if not 0 < self.newest_weight < math.inf:
            raise UserError(f"newest_weight={self.newest_weight}: give a number above 0")
        if not 0 <= self.sinks <= self.min_context:
            raise UserError(
                f"sinks={self.sinks} min_context={self.min_context}: give 0 or more sinks, and not more "
                "than the context that always stays"
            )

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt."""
        return _PyramidInferCompressor(
            self, self.recent(prompt_tokens), self.layer_tokens(prompt_tokens, layers)
        )

    def layer_tokens(self, prompt_tokens: int, layers: int) -> list[int]:
        """What the layers before have passed on."""
        recent, entering = self.recent(prompt_tokens), [prompt_tokens]
        for layer in range(layers - 1):
            context = entering[-1] - recent
            share = (1 - self.decay_ratio) * (math.cos(math.pi * layer / layers) + 1) / 2 + self.decay_ratio
            passed = int(context * share)
            entering.append(recent + (passed if passed > self.min_context else context))
        return entering

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """All that entered."""
        return self.layer_tokens(prompt_tokens, layers)

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The recent ones, in each layer that passes fewer tokens on."""
        entering = self.layer_tokens(prompt_tokens, layers)
        recent = self.recent(prompt_tokens)
        cuts = [passed < tokens for tokens, passed in pairwise(entering)]
        return [recent if cut else 0 for cut in [*cuts, False]]

    def recent(self, prompt_tokens: int) -> int:
        """How many tokens are recent, the last one beside its share."""
        return min(prompt_tokens, int(prompt_tokens * self.recent_ratio) + 1)


@dataclass
class _PyramidInferCompressor(Compressor):
    method: PyramidInfer
    recent: int
    entering: list[int]
    """Tokens, per layer."""

    def keep_tokens(self, layer: LayerView) -> Tensor | None:
        passed = self.entering[layer.index + 1 :][:1]
        if not passed or passed[0] >= layer.tokens:
            return None
        scores = layer.column_sums(self.recent, self.method.newest_weight).mean(0, keepdim=True)
        scores[:, : self.method.sinks] = torch.inf
        return best_and_last(scores, passed[0], self.recent, layer.tokens)[0]
