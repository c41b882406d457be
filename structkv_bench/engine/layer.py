"""What a method sees of one layer during prefill, and the attention scores that methods share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from structkv_bench.engine.attention import Projected
from structkv_bench.engine.clock import now

COLUMN_SUM_BLOCK = 64
"""Queries per block of `column_sums`: its largest tensor holds heads x tokens x this many numbers."""


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
        return self._once(("window", window), lambda: self._probabilities(self.tokens - window, self.tokens))

    def column_sums(self, last: int | None = None, newest_weight: float = 1.0) -> Tensor:
        """Attention that each key receives from the queries that see it, fp32: [heads, tokens].

        Exact and causal, in blocks of queries: no tokens x tokens matrix exists at any time.

        Args:
            last: of the last so many queries alone; by default of all.
            newest_weight: how much the last query counts, beside 1 for the first of them and even steps.
        """
        first = 0 if last is None else self.tokens - last

        def sums() -> Tensor:
            total = torch.zeros(self.query.shape[0], self.tokens, device=self.query.device)
            weights = torch.linspace(1.0, newest_weight, self.tokens - first, device=self.query.device)
            for start in range(first, self.tokens, COLUMN_SUM_BLOCK):
                stop = min(start + COLUMN_SUM_BLOCK, self.tokens)
                rows = self._probabilities(start, stop)
                if newest_weight != 1:
                    rows *= weights[start - first : stop - first, None]
                total[:, :stop] += rows.sum(1)
                del rows  # before the next block is made
            return total

        return self._once(("column_sums", first, newest_weight), sums)

    def _probabilities(self, start: int, stop: int) -> Tensor:
        """Causal attention of queries start..stop-1 to keys 0..stop-1, fp32: [heads, stop-start, stop]."""
        heads, _, head_dim = self.query.shape
        rows = stop - start
        grouped = self.query[:, start:stop].reshape(self.kv_heads, self.group_size * rows, head_dim)
        keys = self.key[:, :stop].transpose(1, 2)
        # beta=0: the product is scaled where it is made, and the first argument is never read
        logits = torch.baddbmm(grouped.new_empty(1, 1, 1), grouped, keys, beta=0, alpha=self.scaling)
        logits = logits.float().view(heads, rows, stop)
        at, keys_at = self.positions[start:stop, None], self.positions[:stop]
        logits[:, :, start:].masked_fill_(keys_at[start:] > at, -torch.inf)
        if self.sliding_window is not None:
            logits.masked_fill_(keys_at <= at - self.sliding_window, -torch.inf)
        return logits.softmax(-1)

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
