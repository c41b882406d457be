"""StructKV (ACL 2026, arXiv 2604.06746): a skeleton of the prompt, found once and followed from there.

    S_j^l = sum over groups ( 1/w sum over the last w queries t, sum over heads h of the group, a_tj )
    C    <- decay C + S^l                                  while l <= L*
    L*    = argmax_l T_l + 1                               (pivot.py)
    I_struct = top-k(C, N R_struct) and the last w tokens  once, at L*: deeper layers run on these
    I_KV^l   = top-k(S^l, N R_KV) and the last w tokens    every layer, from its own S

The paper has no public code. What it leaves open is a setting here: the window stands inside both
budgets, layer L* still runs on everything, and entries are chosen per KV head from max-pooled scores as
FastKV does (`kv_selection: shared` is the formula as written).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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
from .pivot import PivotDetector, PivotRule, majority
from .scoring import POOLINGS, best_and_last, over_group, pool

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

SELECTIONS = ("per_head", "shared")


@dataclass(frozen=True)
class StructKV(Allocated):
    """Settings of StructKV; `kv_ratio` is R_KV."""

    struct_ratio: float = 0.2
    """R_struct: share of the prompt's tokens that the layers after L* run on; 1 never drops any."""
    decay: float = 0.9
    """lambda"""
    pivot: int | str = "online"
    """L* itself, `online` (found in this pass) or `calibrated` (once per model, by majority)."""
    kv_selection: str = "per_head"
    kv_pooling: str = "max"
    centrality_pooling: str = "none"
    kernel: int = 7
    entropy_weight: float = 0.2
    sparsity_weight: float = 0.3
    variance_weight: float = 0.5
    sparsity_top: float = 0.1
    search_from: float = 0.25
    """Share of the depth at which the search for L* begins."""
    search_to: float = 0.667
    pivot_floor: float = 0.35
    """Between what small first steps reach and what the pivot does: on SmolLM2, over 34 prompts of seeds
    that no table uses, at most 0.24 and at least 0.49."""

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        for name in ("struct_ratio", "sparsity_top"):
            check_ratio(name, getattr(self, name))
        if not 0 <= self.decay <= 1:
            raise UserError(f"decay={self.decay}: give a number from 0 to 1")
        for name in ("entropy_weight", "sparsity_weight", "variance_weight", "pivot_floor"):
            if not math.isfinite(getattr(self, name)):
                raise UserError(f"{name}={getattr(self, name)}: give a finite number")
        if not 0 <= self.search_from < self.search_to <= 1:
            raise UserError(
                f"search_from={self.search_from} search_to={self.search_to}: give rising shares from 0 to 1"
            )
        check_window(self.window, self.kernel)
        check_choice("kv_selection", self.kv_selection, SELECTIONS)
        check_choice("kv_pooling", self.kv_pooling, POOLINGS)
        check_choice("centrality_pooling", self.centrality_pooling, POOLINGS)
        if isinstance(self.pivot, str):
            check_choice("pivot", self.pivot, ("online", "calibrated", "or a layer's number"))

    def compressor(self, prompt_tokens: int, layers: int) -> StructKVCompressor:
        """A compressor for one prompt.

        Raises:
            UserError: a pivot outside the model, or a budget not above the window.
        """
        if isinstance(self.pivot, int):
            check_layer("pivot", self.pivot, layers)
        skeleton = int(prompt_tokens * self.struct_ratio)
        return StructKVCompressor(
            self,
            budgets=self.layer_budgets(prompt_tokens, layers),
            skeleton=check_entries(f"struct_ratio={self.struct_ratio}", skeleton, prompt_tokens, self.window),
            detector=PivotDetector(self.pivot_rule(layers)),
            fixed_pivot=self.pivot if isinstance(self.pivot, int) else None,
        )

    def layer_tokens(self, prompt_tokens: int, layers: int) -> list[int]:
        """Everything up to L*, the skeleton after it; at most, where L* is found only in the pass itself."""
        pivot = self.pivot if isinstance(self.pivot, int) else self.pivot_rule(layers).last
        skeleton = int(prompt_tokens * self.struct_ratio)
        return [prompt_tokens if layer <= pivot else skeleton for layer in range(layers)]

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The window."""
        return [min(self.window, tokens) for tokens in self.layer_tokens(prompt_tokens, layers)]

    def pivot_rule(self, layers: int) -> PivotRule:
        """The detection's choices for a model of this many layers; the last layer is never searched."""
        last = max(1, min(int(layers * self.search_to), layers - 2))
        return PivotRule(
            weights=(self.entropy_weight, self.sparsity_weight, self.variance_weight),
            first=min(max(1, int(layers * self.search_from)), last),
            last=last,
            top_share=self.sparsity_top,
            floor=self.pivot_floor,
        )

    def calibrated(self, model: Model) -> Method:
        """With `pivot: calibrated`, this method with the model's own L* as a number."""
        if self.pivot != "calibrated":
            return self

        prompts = calibration_prompts(model)

        def measure() -> int:
            # where nothing is dropped the detector sees the whole range
            watching = replace(self, pivot="online", struct_ratio=1.0, kv_ratio=1.0, budget=None)
            pivots = []
            for ids in prompts:
                compressor = watching.compressor(len(ids), len(model.layers))
                [row] = prefill(model, ids, [compressor])
                if row.error is not None:
                    raise RuntimeError(f"calibration failed:\n{row.error}")
                pivots.append(compressor.detector.argmax())
            return majority(pivots)

        what = f"structkv pivot {self.pivot_rule(len(model.layers))} window={self.window}"
        return replace(self, pivot=once_per_model(model, what, prompts, measure))


@dataclass
class StructKVCompressor(Compressor):
    """One prompt's way: full context up to L*, the cut, the rest on the skeleton."""

    method: StructKV
    budgets: list[int]
    """N R_KV, or what an allocator makes of it, per layer."""
    skeleton: int
    """N R_struct"""
    detector: PivotDetector
    fixed_pivot: int | None
    centrality: Tensor | None = None
    """C, [tokens before the window]"""
    pivot: int | None = None
    """L*, once found."""
    at_pivot: bool = field(default=False, repr=False)

    def keep_kv(self, layer: LayerView) -> Kept:
        """I_KV of this layer; also takes its S into C and into the search for L*."""
        window, pooling, kernel = self.window(layer), self.method.kv_pooling, self.method.kernel
        received = layer.window_attention(window).mean(1)[:, :-window]
        self.at_pivot = False
        if layer.tokens == layer.prompt_tokens > window:
            with layer.timed("detection"):
                self._observe(layer.index, received)
        budget = self.budgets[layer.index]
        if budget >= layer.tokens:
            return None
        if self.method.kv_selection == "shared":
            scores = pool(received.sum(0, keepdim=True), pooling, kernel).expand(layer.kv_heads, -1)
        else:
            scores = over_group(pool(received, pooling, kernel), layer.kv_heads, "sum")
        return self.method.chosen(scores, budget, layer.tokens)

    def keep_tokens(self, layer: LayerView) -> Tensor | None:
        """I_struct after L*."""
        if not self.at_pivot or self.centrality is None or self.skeleton >= layer.tokens:
            return None
        return best_and_last(self.centrality[None], self.skeleton, self.window(layer), layer.tokens)[0]

    def window(self, layer: LayerView) -> int:
        """w, or as many tokens as there are."""
        return min(self.method.window, layer.tokens)

    def facts(self) -> dict[str, Any]:
        """L* of this prompt, and the signals of the layers that saw all of it."""
        return {"pivot": self.pivot, "signals": self.detector.trace()}

    def _observe(self, layer: int, received: Tensor) -> None:
        """C <- decay C + S, and one step of the search for L*.

        `received` [heads, tokens before the window]: its sum over the heads is S of these tokens.
        """
        saliency = pool(received, self.method.centrality_pooling, self.method.kernel).sum(0)
        if self.centrality is not None:  # the layer before may lie on another device
            saliency += self.method.decay * self.centrality.to(saliency.device)
        self.centrality = saliency
        self.detector.observe(received.sum(0))
        if self.pivot is not None:  # with R_struct = 1, where nothing is ever dropped
            return
        found = layer == self.fixed_pivot if self.fixed_pivot is not None else self.detector.decides_online()
        if found:
            self.pivot, self.at_pivot = layer, True
