"""FastKV (Jo et al., 2025, arXiv 2502.01068): one layer chooses the tokens that all deeper layers run on.

    s_gj  = sum over heads h of group g of pool( sum over the last w queries t of a_tj^h )
    I_KV  = top-k(s_g, N R_KV) and the last w tokens             every layer, per KV head, from its own s
    I_TSP = top-k(sum over g of s_g, N R_TSP) and the last w     once, at layer l*: deeper layers run on these

Both budgets hold the window, and both are shares of the prompt: the official code's retain_rate / tsp_rate
of what is left after l* is R_KV of the prompt, give or take the rounding.

The authors fix l* per model, having looked at how far a cut moves the final hidden states. A rule is made
of that by `tsp_layer: calibrated`: with x_j the last layer's output for a token j that goes on, scaled to
length 1, and x'_j the same where the cut is at l,

    d_l = sqrt( mean over j of |x_j - x'_j|^2 )     mean over prompts
    l*  = the first l with d_l <= tsp_distance

The rule is ours, and so are the prompts, in no benchmark, and the number in `tsp_distance`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from structkv_bench.calibration import calibration_prompts, once_per_model
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import (
    Compressor,
    Kept,
    Method,
    check_choice,
    check_entries,
    check_layer,
    check_ratio,
    check_window,
)
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError

from .allocation import Allocated
from .scoring import POOLINGS, best_and_last, over_group, pool

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

CALIBRATED = "calibrated"
PROMPTS = 3
"""To calibrate on: each takes the time of some four prefills, and they hardly differ."""


@dataclass(frozen=True)
class FastKV(Allocated):
    """Settings of FastKV (dongwonjo/FastKV); `kv_ratio` is R_KV."""

    tsp_ratio: float = 0.2
    """R_TSP: share of the prompt's tokens that the layers after l* run on; 1 never drops any."""
    tsp_layer: int | str | None = None
    """l*; by default layers // 2 - 1: 15 of 32, 17 of 36 and 19 of 40, as the official code has it.

    `calibrated`: found once per model; the default stands in for it until a model is there.
    """
    tsp_distance: float = 0.3
    """With a calibrated l*, how far from those of the whole prompt the final states may be: from 0 to 2.

    0.3 lies between 0.35 or more up to layer 13 of SmolLM2 and 0.26 at layer 14, which is the default's.
    """
    pooling: str = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_ratio("tsp_ratio", self.tsp_ratio)
        check_window(self.window, self.kernel)
        check_choice("pooling", self.pooling, POOLINGS)
        if isinstance(self.tsp_layer, str):
            check_choice("tsp_layer", self.tsp_layer, (CALIBRATED, "or a layer's number"))
        if not 0 <= self.tsp_distance <= 2:
            raise UserError(f"tsp_distance={self.tsp_distance}: give a number from 0 to 2")
        if self.tsp_layer != CALIBRATED:  # it is without a say
            object.__setattr__(self, "tsp_distance", FastKV.tsp_distance)

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt.

        Raises:
            UserError: a layer outside the model, or a budget not above the window.
        """
        return _FastKVCompressor(
            self,
            budgets=self.layer_budgets(prompt_tokens, layers),
            going_on=self.going_on(prompt_tokens),
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
        return self.tsp_layer if isinstance(self.tsp_layer, int) else max(0, layers // 2 - 1)

    def going_on(self, prompt_tokens: int) -> int:
        """N R_TSP.

        Raises:
            UserError: that is not above the window.
        """
        going_on = int(prompt_tokens * self.tsp_ratio)
        return check_entries(f"tsp_ratio={self.tsp_ratio}", going_on, prompt_tokens, self.window)

    def scores(self, layer: LayerView) -> Tensor:
        """s of each token before the window: [kv_heads, tokens - window]."""
        received = layer.window_attention(self.window)[:, :, : -self.window].sum(1)
        return over_group(pool(received, self.pooling, self.kernel), layer.kv_heads, "sum")

    def calibrated(self, model: Model) -> Method:
        """With `tsp_layer: calibrated`, this method with the model's own l* as a number."""
        if self.tsp_layer != CALIBRATED:
            return self
        prompts = calibration_prompts(model)[:PROMPTS]

        def measure() -> int:
            distances = torch.tensor([self.distances(model, ids) for ids in prompts]).mean(0)
            return int((distances <= self.tsp_distance).nonzero()[0])  # there is one: the last is 0

        what = (
            f"fastkv tsp_layer within {self.tsp_distance} at {self.tsp_ratio}, "
            f"{self.pooling} over {self.kernel} of {self.window} queries"
        )
        return replace(self, tsp_layer=once_per_model(model, what, prompts, measure))

    def distances(self, model: Model, ids: Sequence[int]) -> list[float]:
        """d_l of a prompt for each layer l, in one pass in which each cut forks off where it falls."""
        layers = len(model.layers)
        cuts = [_Cut(self, [], self.going_on(len(ids)), layer) for layer in range(layers)]
        whole, *rows = prefill(model, ids, [_Cut(self, [], len(ids), 0), *cuts])
        for row in (whole, *rows):
            if row.error is not None:
                raise RuntimeError(f"calibration failed:\n{row.error}")
        cosines = [row.fidelity[-1] if row.fidelity else 1.0 for row in rows]  # none: nothing was dropped
        return [math.sqrt(max(0.0, 2 - 2 * cosine)) for cosine in cosines]  # |x - x'|^2 of length 1


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


class _Cut(_FastKVCompressor):
    """The cut alone; entries are not chosen, and none is kept."""

    def keep_kv(self, layer: LayerView) -> Kept:
        return torch.empty(layer.kv_heads, 0, dtype=torch.long, device=layer.key.device)
