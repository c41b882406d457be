"""Dynamic pivot detection (StructKV): the layer after which the skeleton of the prompt can be trusted.

Three signals per layer, from p_j, the share of the window's attention that token j before the window
receives: entropy H, sparsity rho (mass of the top tokens) and variance V of n p_j. The transition score

    T_l = 0.2 g(-H_l) + 0.3 g(rho_l) + 0.5 g(V_l),     L* = argmax_l T_l + 1

takes their normalised gradients over depth. The paper leaves g, the top tokens and the range of l open:
here g is the first difference over the largest absolute one in the range, the top tokens are 10 %, and
l runs from 1/4 to 2/3 of the depth. The range is what makes the rule work: the first layers settle with
larger steps than the pivot's, and the last ones prepare the output with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SIGN = torch.tensor([-1.0, 1.0, 1.0], dtype=torch.float64)
"""Signals are kept as (-H, rho, V): a layer whose attention narrows has steps above 0 in all three."""


@dataclass(frozen=True)
class PivotRule:
    """Open choices of the detection."""

    weights: tuple[float, float, float]
    """Of the steps of -H, rho and V."""
    first: int
    """First layer of the range."""
    last: int
    """Last layer of the range, itself included."""
    top_share: float
    """Share of the tokens whose mass is rho."""
    floor: float
    """Least T, on the scale of all layers so far, of an online pivot."""


@dataclass
class PivotDetector:
    """Signals of the layers seen so far on one prompt."""

    rule: PivotRule
    signals: list[Tensor] = field(default_factory=list)
    """Per layer (-H, rho, V), fp64."""

    def observe(self, received: Tensor) -> None:
        """Add a layer: attention received by each token before the window, [tokens]."""
        share = received.double() / received.double().sum()
        entropy = -torch.special.xlogy(share, share).sum()
        top = max(1, int(share.shape[0] * self.rule.top_share))
        sparsity = share.topk(top).values.sum()
        variance = (share * share.shape[0]).var(correction=0)
        self.signals.append(torch.stack((-entropy, sparsity, variance)).cpu())

    def scores(self, from_layer: int) -> list[float]:
        """T of layers from_layer .. the newest (up to the range's last), normalised over just these."""
        signals = torch.stack(self.signals[from_layer - 1 : self.rule.last + 1])
        steps = signals.diff(dim=0)
        largest = steps.abs().amax(dim=0).clamp_min(torch.finfo(steps.dtype).tiny)
        weights = torch.tensor(self.rule.weights, dtype=steps.dtype)
        return [float(score) for score in (steps / largest) @ weights]

    def decides_online(self) -> bool:
        """Whether the newest layer is the pivot, from the layers so far alone.

        It is when the layer before has the highest score so far and this one a lower one: one look
        ahead, the paper's + 1. At the start of the range any step looks large, so the score must also
        clear `floor` beside the steps of all layers before. The range's end decides in any case.
        """
        rule, newest = self.rule, len(self.signals) - 1
        if newest >= rule.last:
            return True
        if newest <= rule.first:
            return False
        scores = self.scores(rule.first)
        best_before = max(scores[:-1])
        clears = self.scores(1)[-2] >= rule.floor
        return scores[-2] == best_before and scores[-1] < best_before and clears

    def trace(self) -> dict[str, list[Any]]:
        """H, rho, V of the layers seen, and T of those within the range (None elsewhere)."""
        signals = torch.stack(self.signals) if self.signals else torch.empty(0, 3)
        scores: list[Any] = [None] * len(self.signals)
        if len(self.signals) > self.rule.first:
            within = self.scores(self.rule.first)
            scores[self.rule.first : self.rule.first + len(within)] = [round(score, 4) for score in within]
        entropy, sparsity, variance = (
            [round(float(value), 4) for value in column] for column in (signals * SIGN).T
        )
        return {"entropy": entropy, "sparsity": sparsity, "variance": variance, "transition": scores}

    def argmax(self) -> int:
        """L* = argmax of T over the whole range, plus 1."""
        scores = self.scores(self.rule.first)
        return self.rule.first + scores.index(max(scores)) + 1


def majority(pivots: Sequence[int]) -> int:
    """The most frequent pivot; of equals, the lowest."""
    return max(sorted(set(pivots)), key=list(pivots).count)
