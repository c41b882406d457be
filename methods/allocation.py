"""How the budget of a method that scores entries is dealt out over layers and heads.

`method.allocator`: `uniform`, a reading of `pyramidkv` (over layers), `adakv` (over the heads of a layer),
or one of each joined by a plus.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from structkv_bench.engine.method import Budgeted, check_choice, check_window
from structkv_bench.errors import UserError

from .adakv import head_budgets
from .pyramidkv import READINGS, layer_budgets
from .scoring import best_and_last

UNIFORM, ADAKV = "uniform", "adakv"
USED_BY = {"beta": READINGS, "alpha": (ADAKV,), "normalize": (ADAKV,)}


@dataclass(frozen=True)
class Allocated(Budgeted):
    """A method with scores for the entries before its window, and a budget that an allocator deals out."""

    window: int = 8
    """w, the last tokens: always kept, inside each budget."""
    allocator: str = UNIFORM
    beta: int = 20
    """PyramidKV's."""
    alpha: float = 0.2
    """AdaKV's; 0.2 as in the authors' LongBench runs."""
    normalize: bool = False
    """AdaKV's."""

    def __post_init__(self) -> None:
        """Check the settings; those of an allocator that isn't used are without a say."""
        super().__post_init__()
        check_window(self.window)
        parts = self.allocator.split("+")
        for part in parts:
            check_choice("allocator", part, (UNIFORM, *READINGS, ADAKV))
        if len(parts) > 1 and (len(parts) > 2 or parts.count(ADAKV) != 1 or UNIFORM in parts):
            raise UserError(f"allocator={self.allocator}: join one of {', '.join(READINGS)} with {ADAKV}")
        if self.beta < 1:
            raise UserError(f"beta={self.beta}: give at least 1")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"alpha={self.alpha}: give a share from 0 to 1")
        for field in fields(Allocated):
            if field.name in USED_BY and not set(parts) & set(USED_BY[field.name]):
                object.__setattr__(self, field.name, field.default)

    def layer_budgets(self, prompt_tokens: int, layers: int) -> list[int]:
        """Entries per head of each layer, before a layer's own tokens bound it.

        Raises:
            UserError: the budget leaves no room beside the window.
        """
        entries = self.entries(prompt_tokens, self.window)
        for part in self.allocator.split("+"):
            if part in READINGS:
                exact = self.budget or prompt_tokens * self.kv_ratio
                mean = exact if part == "pyramidkv_kvpress" else entries
                return layer_budgets(part, mean, self.window, prompt_tokens, layers, self.beta)
        return [entries] * layers

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """A layer's budget, and no more than its tokens."""
        budgets = self.layer_budgets(prompt_tokens, layers)
        tokens = self.layer_tokens(prompt_tokens, layers)
        return [min(pair) for pair in zip(budgets, tokens, strict=True)]

    def chosen(self, scores: Tensor, entries: int, tokens: int) -> Tensor | list[Tensor]:
        """Indices of the entries that stay: the window, and the best before it.

        Args:
            scores: [stored heads, at least tokens - window]
            entries: the layer's budget per head, window included.
            tokens: of the layer.
        """
        if ADAKV not in self.allocator.split("+"):
            return best_and_last(scores, entries, self.window, tokens)
        before = scores[:, : tokens - self.window]
        budgets = head_budgets(before, entries - self.window, self.alpha, self.normalize)
        return [
            best_and_last(row[None], budget + self.window, self.window, tokens)[0]
            for row, budget in zip(before, budgets, strict=True)
        ]
