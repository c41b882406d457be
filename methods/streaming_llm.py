"""StreamingLLM (Xiao et al., ICLR 2024, arXiv 2309.17453): attention sinks and the latest tokens stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structkv_bench.engine.attention import Projected
from structkv_bench.engine.cache import LayerCache
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Budgeted, Compressor, Rotate, check_choice
from structkv_bench.errors import UserError

from .compat import is_fastkv

VARIANTS = ("harness", "rolling")


@dataclass(frozen=True)
class StreamingLLM(Budgeted):
    """Keeps the first `sinks` tokens and the last ones up to the budget.

    `variant: harness` is what long-context harnesses call StreamingLLM (KVCache-Factory, FastKV): the
    prompt is prefilled with full attention and evicted once, keys stay at their positions. The early
    layers have then seen everything. `variant: rolling` is the method of the paper
    (mit-han-lab/streaming-llm): no token, in prefill or decode, ever sees more than the budget, and
    positions count inside the cache.
    """

    sinks: int = 4
    variant: str = "harness"
    compat: str = "none"
    """`fastkv`: each query head stores a copy, as FastKV's harness has it; the entries are the same."""

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.sinks < 0:
            raise UserError(f"sinks={self.sinks}: give 0 or more")
        check_choice("variant", self.variant, VARIANTS)
        if is_fastkv(self.compat) and self.variant != "harness":
            raise UserError(f"compat={self.compat}: that harness evicts once, give variant=harness")

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt."""
        entries = self.entries(prompt_tokens, self.sinks)
        if self.variant == "harness":
            return _SinksAndLast(self.sinks, entries, is_fastkv(self.compat))
        return _Rolling(self.sinks, entries)

    def stored_heads(self, heads: int, kv_heads: int) -> int:
        """KV heads, but for FastKV's harness."""
        return heads if is_fastkv(self.compat) else kv_heads

    def reach(self, prompt_tokens: int) -> int:
        """The budget, where the window rolls in prefill too."""
        return prompt_tokens if self.variant == "harness" else min(self.entries(prompt_tokens), prompt_tokens)


@dataclass
class _SinksAndLast(Compressor):
    sinks: int
    entries: int
    per_query_head: bool = False

    def keep_kv(self, layer: LayerView) -> Tensor | None:
        if self.entries >= layer.tokens:
            return None
        heads = layer.query.shape[0] if self.per_query_head else layer.kv_heads
        return self.choice(layer.tokens, heads, layer.key.device)

    def choice(self, tokens: int, heads: int, device: torch.device) -> Tensor:
        """Indices of the sinks and the last entries, the same for each head: [heads, entries]."""
        last = torch.arange(tokens - self.entries + self.sinks, tokens, device=device)
        return torch.cat((torch.arange(self.sinks, device=device), last)).expand(heads, -1)


@dataclass(frozen=True)
class _RollingAttention:
    """Each query sees the sinks and the last `recent` tokens, itself included.

    Positions count inside the cache: once it is full the query stands at its last place, so that a sink
    is never further off than the cache is long. Between recent tokens that changes no distance; for the
    sinks the query is turned back from its true position to its place.
    """

    sinks: int
    recent: int

    def __call__(self, new: Projected, at: Tensor, cache: LayerCache, rotate: Rotate) -> Tensor:
        """Output [heads, n, head_dim]; a model's own sliding window counts places in the cache too."""
        query, positions = new.query[0], cache.positions[0]
        is_sink = positions < self.sinks
        is_recent = ~is_sink & (positions > at[0] - self.recent)
        order = torch.cat((is_sink.nonzero()[:, 0], is_recent.nonzero()[:, 0]))
        places = torch.minimum(at, torch.full_like(at, self.sinks + self.recent - 1))
        to_sinks = _logits(rotate(query, places - at), cache.keys[:, is_sink])
        to_recent = _logits(query, cache.keys[:, is_recent])
        logits = torch.cat((to_sinks, to_recent), dim=-1).float() * new.scaling
        keys_at = positions[order]
        distance = torch.where(keys_at < self.sinks, places[:, None], at[:, None]) - keys_at
        reach = torch.where(keys_at < self.sinks, self.sinks + self.recent, self.recent)
        if new.sliding_window is not None:
            reach = reach.clamp(max=new.sliding_window)
        hidden = (distance < 0) | (distance >= reach)
        attention = logits.masked_fill(hidden, -torch.inf).softmax(-1).to(query.dtype)
        return _weighted(attention, cache.values[:, order])


@dataclass
class _Rolling(_SinksAndLast):
    """Holds one entry less than the budget between steps: the newest token takes the last place."""

    evicts_in_decode = True

    def __post_init__(self) -> None:
        self.attention = _RollingAttention(self.sinks, self.entries - self.sinks)
        self.entries -= 1

    def step(self, new: Projected, cache: LayerCache) -> None:
        """Drop the oldest entry that is no sink once the cache is full."""
        if cache.entries > self.entries:
            cache.keep(self.choice(cache.entries, cache.keys.shape[0], cache.keys.device))


def _logits(query: Tensor, keys: Tensor) -> Tensor:
    """q k^T of query heads [heads, n, head_dim] with their KV heads' keys: [heads, n, keys]."""
    heads, new, head_dim = query.shape
    return (query.reshape(keys.shape[0], -1, head_dim) @ keys.transpose(1, 2)).reshape(heads, new, -1)


def _weighted(attention: Tensor, values: Tensor) -> Tensor:
    """Attention [heads, n, keys] times values [kv_heads, keys, head_dim]: [heads, n, head_dim]."""
    heads, new, keys = attention.shape
    return (attention.reshape(values.shape[0], -1, keys) @ values).reshape(heads, new, -1)
