"""One pass over a prompt that serves every method of a group.

Methods that only choose KV entries share one branch of hidden states and choose from the same q, k, v;
one that drops tokens forks off with fewer of them. Each row of a table then costs little beyond the first.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from structkv_bench.engine.attention import Projected, causal_attention
from structkv_bench.engine.cache import KVCache, LayerCache
from structkv_bench.engine.clock import now
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Attention, Compressor
from structkv_bench.engine.model import Model

K = TypeVar("K")

ATTENTION_BLOCK = 128
"""Queries per call of a method's own attention."""


@dataclass
class Prefilled:
    """One method's prompt, ready to decode."""

    compressor: Compressor
    cache: KVCache
    logits: Tensor | None = None
    """[vocabulary], fp32, after the last prompt token."""
    layer_tokens: list[int] = field(default_factory=list)
    """Tokens that each layer processed."""
    seconds: float = 0.0
    """Time of this method's own way through the layers, as if no other method had shared it."""
    error: str | None = None
    """Traceback of what the method raised; it has then left the group."""
    _next_tokens: Tensor | None = None

    @property
    def prefill_share(self) -> float:
        """Mean over layers of the share of the prompt's tokens that were processed."""
        return sum(self.layer_tokens) / (len(self.layer_tokens) * self.cache.seen)


@dataclass
class _Branch:
    """Tokens on their way through the layers, for the methods that still agree on them."""

    hidden: Tensor
    """[1, tokens, hidden_size]"""
    positions: Tensor
    """[tokens]"""
    rotary: tuple[Tensor, Tensor]
    """cos and sin, [1, tokens, head_dim]"""
    members: list[Prefilled]
    attention: Attention | None

    def keeping(self, index: Tensor, members: list[Prefilled]) -> _Branch:
        """The branch of these members with the tokens `index` alone."""
        cos, sin = (_take(part, index, 1) for part in self.rotary)
        hidden, positions = _take(self.hidden, index, 1), _take(self.positions, index, 0)
        return _Branch(hidden, positions, (cos, sin), members, self.attention)


def _take(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Entries of `tensor`, which may lie on another device than the layer that chose them."""
    return tensor.index_select(dim, index.to(tensor.device))


@dataclass
class _PrefillStep:
    """One branch in one layer: its attention, then the choices of its methods."""

    branch: _Branch
    model: Model
    choosing_s: float = 0.0

    def attend(self, projected: Projected) -> Tensor:
        branch = self.branch
        positions = branch.positions.to(projected.query.device)
        view = LayerView.of(projected, positions, branch.members[0].cache.seen)
        if branch.attention is None:
            out = causal_attention(projected, positions)
        else:
            out = _own_attention(branch.attention, projected, positions, self.model)
        started = now(out)
        for member in branch.members:
            _choose(member, view)
        self.choosing_s = now(out) - started
        return out


def prefill(model: Model, ids: Sequence[int], compressors: Sequence[Compressor]) -> list[Prefilled]:
    """Run the prompt `ids` once for all compressors; what each gets is what it would get alone.

    A compressor that raises is set aside with its traceback in `error`; the others go on.
    """
    results = [Prefilled(compressor, KVCache([], seen=len(ids))) for compressor in compressors]
    with torch.inference_mode():
        branches = _first_branches(model, ids, results)
        for layer in model.layers:
            branches = [fork for branch in branches for fork in _run_layer(model, layer, branch)]
        for branch in branches:
            logits = model.logits(branch.hidden[:, -1])[0]
            for member in branch.members:
                member.logits = logits
    return results


def _first_branches(model: Model, ids: Sequence[int], results: list[Prefilled]) -> list[_Branch]:
    hidden = model.embed(torch.tensor([list(ids)], device=model.device))
    positions = torch.arange(len(ids), device=hidden.device)
    rotary = model.rotary(hidden, positions[None])
    groups = _groups(results, lambda member: member.compressor.attention, lambda a, b: a == b)
    return [_Branch(hidden, positions, rotary, members, attention) for attention, members in groups]


def _run_layer(model: Model, layer: torch.nn.Module, branch: _Branch) -> list[_Branch]:
    """Take a branch through one layer; afterwards it may have forked, or ended for want of methods."""
    started = now(branch.hidden)
    step = _PrefillStep(branch, model)
    branch.hidden = model.run_layer(layer, branch.hidden, branch.positions[None], branch.rotary, step)
    shared_s = now(branch.hidden) - started - step.choosing_s
    members = [member for member in branch.members if member.error is None]
    for member in members:
        member.seconds += shared_s
        member.layer_tokens.append(branch.hidden.shape[1])
    forks = []
    for index, agreeing in _groups(members, lambda member: member._next_tokens, _same_tokens):
        if index is None:
            branch.members = agreeing
            forks.append(branch)
        else:
            forks.append(branch.keeping(index, agreeing))
    return forks


def _choose(member: Prefilled, view: LayerView) -> None:
    """Let one method choose its entries of this layer, and the tokens that go on."""
    started, view.borrowed_s = now(view.query), 0.0
    try:
        index = member.compressor.keep_kv(view)
        member._next_tokens = member.compressor.keep_tokens(view)
        cache = LayerCache.of_tokens(view.key, view.value, view.positions)
        member.cache.layers.append(cache if index is None else cache.kept(index))
    except Exception:  # one method's fault is one failed row: the group goes on
        member.error = traceback.format_exc()
    member.seconds += now(view.query) - started + view.borrowed_s


def _own_attention(attention: Attention, projected: Projected, positions: Tensor, model: Model) -> Tensor:
    """A method's own attention over the prompt, in blocks of queries: [1, heads, tokens, head_dim]."""
    blocks = []
    tokens = positions.shape[0]
    for start in range(0, tokens, ATTENTION_BLOCK):
        stop = min(start + ATTENTION_BLOCK, tokens)
        cache = LayerCache.of_tokens(
            projected.key[0, :, :stop], projected.value[0, :, :stop], positions[:stop]
        )
        block = replace(projected, query=projected.query[:, :, start:stop])
        blocks.append(attention(block, positions[start:stop], cache, model.rotate))
    return torch.cat(blocks, dim=1)[None]


def _groups(
    members: list[Prefilled], key: Callable[[Prefilled], K], same: Callable[[K, K], bool]
) -> list[tuple[K, list[Prefilled]]]:
    """Members by equal key, in order; for keys that can't be hashed."""
    groups: list[tuple[K, list[Prefilled]]] = []
    for member in members:
        for known, agreeing in groups:
            if same(known, key(member)):
                agreeing.append(member)
                break
        else:
            groups.append((key(member), [member]))
    return groups


def _same_tokens(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
