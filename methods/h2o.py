"""H2O (Zhang et al., NeurIPS 2023, arXiv 2306.14048): entries that gathered most attention stay."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from structkv_bench.engine.attention import Projected
from structkv_bench.engine.cache import LayerCache
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Kept, check_choice
from structkv_bench.errors import UserError

from .allocation import UNIFORM, Allocated
from .compat import is_fastkv
from .scoring import GROUPS, HEADS, best_and_last, over_group


@dataclass(frozen=True)
class H2O(Allocated):
    """s_j = sum over all queries t >= j of a_tj, exact and causal; keep the best and the last `window`.

    One shot after the prompt by default, as long-context harnesses run it (KVCache-Factory). With
    `running: true` each decoded token adds its attention to the scores of what is kept and the cache
    stays at its budget (the authors' utils_real_drop; there half of the budget is recent tokens).
    """

    heads: str = "kv"
    group: str = "mean"
    running: bool = False
    compat: str = "none"
    """`fastkv`: as FastKV's harness has it, `heads` is `query`, and only the last `window` queries are kept
    from seeing later keys: the others' attention is spread over the whole prompt. Never what H2O means."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if is_fastkv(self.compat):
            object.__setattr__(self, "heads", "query")
            if self.running:
                raise UserError(f"compat={self.compat}: that harness evicts once, give running=false")
        super().__post_init__()
        check_choice("heads", self.heads, HEADS)
        check_choice("group", self.group, GROUPS)
        if self.running and self.allocator != UNIFORM:
            raise UserError(f"allocator={self.allocator}: running=true holds one budget, give {UNIFORM}")

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt."""
        return _H2OCompressor(self, self.layer_budgets(prompt_tokens, layers), self.running)

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """All of them, unless everything is kept for good."""
        budgets = self.layer_budgets(prompt_tokens, layers)
        return [prompt_tokens if self.running or budget < prompt_tokens else 0 for budget in budgets]

    def stored_heads(self, heads: int, kv_heads: int) -> int:
        """Query heads store copies where they choose."""
        return heads if self.heads == "query" else kv_heads

    def scores(self, layer: LayerView) -> Tensor:
        """s of each token: [kv_heads or heads, tokens]."""
        causal_last = self.window if is_fastkv(self.compat) else None
        return self.per_stored_head(layer.column_sums(causal_last=causal_last), layer.kv_heads)

    def per_stored_head(self, scores: Tensor, kv_heads: int) -> Tensor:
        """[heads, tokens] -> [kv_heads or heads, tokens]."""
        return over_group(scores, kv_heads, self.group) if self.heads == "kv" else scores


@dataclass
class _H2OCompressor(Compressor):
    method: H2O
    budgets: list[int]
    """Per layer."""
    evicts_in_decode: bool
    gathered: dict[int, Tensor] = field(default_factory=dict)
    """Per layer, attention gathered so far by each kept entry: [stored heads, entries]."""

    def keep_kv(self, layer: LayerView) -> Kept:
        budget = self.budgets[layer.index]
        if budget >= layer.tokens and not self.evicts_in_decode:
            return None
        scores = self.method.scores(layer)
        if not self.evicts_in_decode:
            return self.method.chosen(scores, budget, layer.tokens)
        if budget >= layer.tokens:
            index = torch.arange(layer.tokens, device=scores.device).expand(scores.shape[0], -1)
        else:
            index = best_and_last(scores, budget, self.method.window, layer.tokens)
        self.gathered[layer.index] = scores.gather(1, index)
        return index

    def step(self, new: Projected, cache: LayerCache) -> None:
        """Add the newest query's attention to what each entry has gathered; then hold the budget."""
        heads, entries, head_dim = cache.keys.shape
        grouped = new.query.reshape(heads, -1, head_dim)
        logits = (grouped @ cache.keys.transpose(1, 2)).float().mul(new.scaling)
        if new.sliding_window is not None:
            oldest = cache.positions[:, None, -1:] - new.sliding_window
            logits.masked_fill_(cache.positions[:, None] <= oldest, -torch.inf)
        received = self.method.per_stored_head(logits.softmax(-1).flatten(0, 1), heads)
        received[:, :-1] += self.gathered[new.layer]
        budget = self.budgets[new.layer]
        if entries > budget:
            index = best_and_last(received, budget, self.method.window, entries)
            cache.keep(index)
            received = received.gather(1, index)
        self.gathered[new.layer] = received
