"""One pass over a prompt that serves every method of a group.

Methods that only choose KV entries share one branch of hidden states and choose from the same q, k, v;
one that drops tokens forks off with fewer of them. Each row of a table then costs little beyond the first.
A method whose tokens begin anew (GemFilter) catches up with the others at once: all stay in step.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from structkv_bench.engine.attention import Projected, causal_attention
from structkv_bench.engine.cache import KVCache, LayerCache, RaggedLayer
from structkv_bench.engine.clock import now
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Attention, Compressor, Kept
from structkv_bench.engine.model import Model

K = TypeVar("K")

ATTENTION_BLOCK = 128
"""Queries per call of a method's own attention."""


PARTS = ("attention", "mlp", "scoring", "detection", "selection")
"""Of a method's time. Attention has its projections, mlp the norm before it; what a method does while it
chooses is scoring (attention probabilities), detection (`LayerView.timed`) or else selection."""


@dataclass
class Prefilled:
    """One method's prompt, ready to decode."""

    compressor: Compressor
    cache: KVCache
    prompt_tokens: int
    layer_tokens: list[int]
    """Tokens that each layer processed; those that began anew count again."""
    logits: Tensor | None = None
    """[vocabulary], fp32, after the last prompt token."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds of this method's own way through the layers, as if no other method had shared it."""
    fidelity: list[float] = field(default_factory=list)
    """For each layer after a cut: mean over the tokens left of the cosine between a token's hidden state and
    the one it has where no token was dropped; only if such a pass runs in the same group."""
    error: str | None = None
    """Traceback of what the method raised; it has then left the group."""
    _next_tokens: Tensor | None = None

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def prefill_share(self) -> float:
        """Mean over layers of the share of the prompt's tokens that were processed."""
        return sum(self.layer_tokens) / (len(self.layer_tokens) * self.prompt_tokens)


@dataclass
class _Branch:
    """Tokens on their way through the layers, for the methods that still agree on them."""

    hidden: Tensor
    """[1, tokens, hidden_size]"""
    tokens: Tensor
    """[tokens]: places in the prompt"""
    positions: Tensor
    """[tokens]: the places, or 0, 1, 2 ... where they began anew"""
    rotary: tuple[Tensor, Tensor]
    """cos and sin, [1, tokens, head_dim]"""
    members: list[Prefilled]
    attention: Attention | None
    begins_anew: bool = False

    def keeping(self, index: Tensor, members: list[Prefilled]) -> _Branch:
        """The branch of these members with the tokens `index` alone."""
        cos, sin = (_take(part, index, 1) for part in self.rotary)
        hidden = _take(self.hidden, index, 1)
        tokens, positions = (_take(part, index, 0) for part in (self.tokens, self.positions))
        begins_anew = members[0].compressor.begins_anew
        return _Branch(hidden, tokens, positions, (cos, sin), members, self.attention, begins_anew)


def _take(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Entries of `tensor`, which may lie on another device than the layer that chose them."""
    return tensor.index_select(dim, index.to(tensor.device))


@dataclass
class _PrefillStep:
    """One branch in one layer: its attention, then the choices of its methods."""

    branch: _Branch
    model: Model
    choosing_s: float = 0.0
    mlp_begins: float = 0.0

    def attend(self, projected: Projected) -> Tensor:
        branch = self.branch
        positions = branch.positions.to(projected.query.device)
        view = LayerView.of(projected, positions, branch.members[0].prompt_tokens)
        if branch.attention is None:
            out = causal_attention(projected, positions)
        else:
            out = _own_attention(branch.attention, projected, positions, self.model)
        started = now(out)
        for member in branch.members:
            _choose(member, view)
        self.choosing_s = now(out) - started
        return out

    def before_mlp(self, _: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        self.mlp_begins = now(inputs[0])


class _Prefill:
    """A model and a prompt: branches of it go through the layers side by side."""

    def __init__(self, model: Model, ids: Sequence[int]) -> None:
        self.model = model
        self.ids = torch.tensor(ids, device=model.device)

    def begin(self, tokens: Tensor, members: list[Prefilled], attention: Attention | None) -> _Branch:
        """A branch of these tokens, embedded, at positions 0, 1, 2 ..."""
        hidden = self.model.embed(_take(self.ids, tokens, 0)[None])
        positions = torch.arange(tokens.shape[0], device=hidden.device)
        return _Branch(
            hidden, tokens, positions, self.model.rotary(hidden, positions[None]), members, attention
        )

    def through(self, branches: list[_Branch], layers: int) -> list[_Branch]:
        """Take branches through the first `layers` layers; on their way they may fork, or end."""
        for number in range(layers):
            forks = [fork for branch in branches for fork in _run_layer(self.model, number, branch)]
            branches = [branch for fork in forks for branch in self._onward(fork, number + 1)]
            _compare(branches)
        return branches

    def _onward(self, fork: _Branch, layers: int) -> list[_Branch]:
        """The fork itself, or its tokens begun anew and brought to where the fork is."""
        if not fork.begins_anew:
            return [fork]
        for member in fork.members:
            member.cache = KVCache([], seen=fork.tokens.shape[0])
        return self.through([self.begin(fork.tokens, fork.members, fork.attention)], layers)


def prefill(model: Model, ids: Sequence[int], compressors: Sequence[Compressor]) -> list[Prefilled]:
    """Run the prompt `ids` once for all compressors; what each gets is what it would get alone.

    A compressor that raises is set aside with its traceback in `error`; the others go on.
    """
    layers = len(model.layers)
    results = [
        Prefilled(compressor, KVCache([], seen=len(ids)), len(ids), [0] * layers)
        for compressor in compressors
    ]
    with torch.inference_mode():
        run = _Prefill(model, ids)
        everything = torch.arange(len(ids), device=model.device)
        groups = _groups(results, lambda member: member.compressor.attention, lambda a, b: a == b)
        branches = [run.begin(everything, members, attention) for attention, members in groups]
        for branch in run.through(branches, layers):
            logits = model.logits(branch.hidden[:, -1])[0]
            for member in branch.members:
                member.logits = logits
    return results


def _run_layer(model: Model, number: int, branch: _Branch) -> list[_Branch]:
    """Take a branch through one layer; afterwards it may have forked, or ended for want of methods."""
    layer: Any = model.layers[number]
    step = _PrefillStep(branch, model)
    started = now(branch.hidden)
    hook = layer.mlp.register_forward_pre_hook(step.before_mlp)
    try:
        branch.hidden = model.run_layer(layer, branch.hidden, branch.positions[None], branch.rotary, step)
    finally:
        hook.remove()
    mlp_s = now(branch.hidden) - step.mlp_begins
    attention_s = step.mlp_begins - started - step.choosing_s
    members = [member for member in branch.members if member.error is None]
    for member in members:
        member.parts["attention"] += attention_s
        member.parts["mlp"] += mlp_s
        member.layer_tokens[number] += branch.hidden.shape[1]
    forks = []
    for (index, _), agreeing in _groups(members, _choice, _same_choice):
        if index is None:
            branch.members = agreeing
            forks.append(branch)
        else:
            forks.append(branch.keeping(index, agreeing))
    return forks


def _choose(member: Prefilled, view: LayerView) -> None:
    """Let one method choose its entries of this layer, and the tokens that go on."""
    started, view.borrowed_s, view.spent = now(view.query), 0.0, {}
    try:
        index = member.compressor.keep_kv(view)
        member._next_tokens = member.compressor.keep_tokens(view)
        member.cache.layers.append(_kept(view, index))
    except Exception:  # one method's fault is one failed row: the group goes on
        member.error = traceback.format_exc()
    seconds = now(view.query) - started + view.borrowed_s
    for part, spent in view.spent.items():
        member.parts[part] = member.parts.get(part, 0.0) + spent
    member.parts["selection"] += seconds - sum(view.spent.values())


def _kept(view: LayerView, index: Kept) -> LayerCache | RaggedLayer:
    """A layer's entries that a method has chosen."""
    cache = LayerCache.of_tokens(view.key, view.value, view.positions)
    if index is None:
        return cache
    return cache.kept(index) if isinstance(index, Tensor) else cache.kept_unevenly(index)


def _compare(branches: list[_Branch]) -> None:
    """Note how true the hidden states of each cut branch are to those where no token was dropped."""
    whole = next((branch for branch in branches if _is_whole(branch)), None)
    for branch in branches:
        if whole is None or _is_whole(branch) or branch.attention is not None:
            continue
        there = _take(whole.hidden, branch.tokens, 1).to(branch.hidden.device)
        cosine = torch.nn.functional.cosine_similarity(branch.hidden.float(), there.float(), dim=-1)
        fidelity = round(float(cosine.mean()), 6)
        for member in branch.members:
            member.fidelity.append(fidelity)


def _is_whole(branch: _Branch) -> bool:
    return branch.attention is None and branch.tokens.shape[0] == branch.members[0].prompt_tokens


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


def _choice(member: Prefilled) -> tuple[Tensor | None, bool]:
    return member._next_tokens, member.compressor.begins_anew


def _same_choice(one: tuple[Tensor | None, bool], other: tuple[Tensor | None, bool]) -> bool:
    (a, anew), (b, other_anew) = one, other
    if a is None or b is None:
        return a is b
    return anew == other_anew and torch.equal(a, b)
