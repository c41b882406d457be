"""What a method sees of one layer during prefill, and the attention scores that methods share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from structkv_bench.engine.attending import Attending
from structkv_bench.engine.attention import Projected
from structkv_bench.engine.clock import now
from structkv_bench.engine.column_sums import COLUMN_SUM_BLOCK, column_sums


@dataclass
class LayerView:
    """Post-RoPE queries, keys and values of the tokens that one layer processes in prefill.

    Scores that several methods want are computed once and kept for as long as the layer is processed.
    """

    index: int
    """The layer's number, from 0."""
    query: Tensor
    """[heads, tokens, head_dim]"""
    key: Tensor
    """[kv_heads, tokens, head_dim]"""
    value: Tensor
    """[kv_heads, tokens, head_dim]"""
    positions: Tensor
    """[tokens], ascending: the true position of each token in the prompt; gaps where tokens were dropped."""
    prompt_tokens: int
    """Length of the whole prompt (N of every budget), however many tokens are left here."""
    scaling: float
    sliding_window: int | None = None
    spent: dict[str, float] = field(default_factory=dict)
    """Seconds of the method that is choosing, by part; of scores that another took before it, too."""
    borrowed_s: float = 0.0
    """How many of those it did not have to spend itself."""
    _scores: dict[Any, tuple[Tensor, float]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, projected: Projected, positions: Tensor, prompt_tokens: int) -> LayerView:
        """The view of a batch of one."""
        q, k, v = projected.query[0], projected.key[0], projected.value[0]
        return cls(
            projected.layer, q, k, v, positions, prompt_tokens, projected.scaling, projected.sliding_window
        )

    @property
    def tokens(self) -> int:
        """How many tokens this layer processes."""
        return self.key.shape[1]

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self.key.shape[0]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (GQA)."""
        return self.query.shape[0] // self.key.shape[0]

    def window_attention(self, window: int) -> Tensor:
        """Attention of the last `window` queries, softmax in fp32: [heads, window, tokens]."""
        first, last = self.tokens - window, self.tokens
        return self._once(("window", window), lambda: self._attending().probabilities(first, last))

    def column_sums(
        self, last: int | None = None, newest_weight: float = 1.0, causal_last: int | None = None
    ) -> Tensor:
        """Attention that each key receives from the queries that see it, fp32: [heads, tokens].

        Exact, and no tokens x tokens matrix exists at any time.

        Args:
            last: of the last so many queries alone; by default of all.
            newest_weight: how much the last query counts, beside 1 for the first of them and even steps.
            causal_last: only the last so many queries are kept from seeing later keys; by default all are.
        """
        if last is not None and last <= COLUMN_SUM_BLOCK and causal_last is None:
            weights = torch.linspace(1.0, newest_weight, last, device=self.query.device)
            return (self.window_attention(last) * weights[:, None]).sum(1)  # one product serves both
        first = 0 if last is None else self.tokens - last
        causal_from = 0 if causal_last is None else self.tokens - causal_last
        given = self._attending(causal_from)
        name = ("column_sums", first, newest_weight, causal_from)
        return self._once(name, lambda: column_sums(given, first, newest_weight))

    def _attending(self, causal_from: int = 0) -> Attending:
        return Attending(self.query, self.key, self.positions, self.scaling, self.sliding_window, causal_from)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count what is done inside as this part of the method's time (prefill.PARTS)."""
        started = now(self.query)
        yield
        self._spend(part, now(self.query) - started)

    def _once(self, name: Any, compute: Callable[[], Tensor]) -> Tensor:
        if name not in self._scores:
            started = now(self.query)
            result = compute()
            self._scores[name] = (result, now(self.query) - started)
        else:
            self.borrowed_s += self._scores[name][1]
        scores, seconds = self._scores[name]
        self._spend("scoring", seconds)
        return scores

    def _spend(self, part: str, seconds: float) -> None:
        self.spent[part] = self.spent.get(part, 0.0) + seconds
