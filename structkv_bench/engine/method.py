"""What a compression method is: frozen settings, and a compressor that lives for one prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import Tensor

from structkv_bench.engine.attention import Projected
from structkv_bench.engine.layer import LayerView
from structkv_bench.errors import UserError

if TYPE_CHECKING:
    from structkv_bench.engine.cache import LayerCache
    from structkv_bench.engine.model import Model

Kept: TypeAlias = Tensor | Sequence[Tensor] | None
"""Entries of a layer: indices [heads, kept]; for each head its own [kept]; None: all."""


class Attention(Protocol):
    """An attention other than the causal one; methods with equal ones (dataclasses) share a prefill."""

    def __call__(self, new: Projected, at: Tensor, cache: LayerCache, rotate: Rotate) -> Tensor:
        """Attention output [heads, n, head_dim] of the queries of `new`, a batch of one, over a cache.

        Args:
            new: queries, scaling and sliding window; its keys and values are in the cache already.
            at: [n], the queries' ascending positions.
            cache: the entries that there are.
            rotate: turns rotary vectors on.
        """


class Rotate(Protocol):
    """Turns rotary vectors on by a number of positions (the model's own frequencies)."""

    def __call__(self, vectors: Tensor, shift: Tensor) -> Tensor:
        """`vectors` [heads, n, head_dim] as they would be at positions moved by `shift` [n]."""


class Compressor:
    """Answers for one prompt, layer by layer; this one keeps everything. Made by `Method.compressor`."""

    attention: Attention | None = None
    """Takes the place of causal attention, in prefill and decode, where a method sees less than all keys."""
    evicts_in_decode: bool = False
    """Whether `step` is to be called after each decoded token."""
    begins_anew: bool = False
    """Whether the tokens that `keep_tokens` has just chosen are a prompt of their own: they start again
    at the first layer, with positions 0, 1, 2 ..., and the entries kept so far are dropped."""

    def keep_kv(self, layer: LayerView) -> Kept:
        """Which KV entries of this layer stay: ascending indices into its tokens.

        There are kv_heads of heads, or a multiple of it up to the query heads: then each query head (or
        each equal part of a group) stores its own copy, and the bytes count it.
        """
        return None

    def keep_tokens(self, layer: LayerView) -> Tensor | None:
        """Which tokens go on to the next layer: ascending indices [kept] into this layer's; None: all."""
        return None

    def step(self, new: Projected, cache: LayerCache) -> None:
        """After a decode step's attention: drop entries of this layer's cache (`cache.keep`).

        Args:
            new: the newest token, a batch of one; its entry is the cache's last.
            cache: what its query has just attended to; the cache's bounds are the method's affair.
        """

    def facts(self) -> dict[str, Any]:
        """What the method found out on this prompt, for the result row (StructKV: pivot)."""
        return {}


@dataclass(frozen=True)
class Method(ABC):
    """Hyper-parameters; all that varies with the prompt lives in the compressor."""

    @abstractmethod
    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A fresh compressor for a prompt of `prompt_tokens` on a model of `layers`.

        Raises:
            UserError: the settings can't work on such a prompt (a budget not above the window, say).
        """

    def layer_tokens(self, prompt_tokens: int, layers: int) -> list[int]:
        """Tokens that each layer processes, as far as it is known before the prompt is seen."""
        return [prompt_tokens] * layers

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """Entries that each layer keeps per stored head, on average over its heads."""
        return [prompt_tokens] * layers

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The last so many queries whose product with the keys each layer takes once more, for scores."""
        return [0] * layers

    def passes(self, prompt_tokens: int, layers: int) -> list[list[int]]:
        """Tokens per layer of each way from the first layer on.

        There are two where tokens begin anew: the first ends at the layer that chose them, and it is the
        one that scores.
        """
        return [self.layer_tokens(prompt_tokens, layers)]

    def reach(self, prompt_tokens: int) -> int:
        """Keys that a query of the prompt meets at most."""
        return prompt_tokens

    def stored_heads(self, heads: int, kv_heads: int) -> int:
        """Heads that each layer stores, of so many query and KV heads."""
        return kv_heads

    def calibrated(self, model: Model) -> Method:
        """This method with what it learns once per model filled in; itself if there is nothing."""
        return self


@dataclass(frozen=True)
class Budgeted(Method):
    """A method with a KV budget: a share of the prompt, or a number of entries, per layer and head."""

    kv_ratio: float = 0.1
    budget: int | None = None
    """Entries per layer and head; where given, it takes the place of kv_ratio."""

    def __post_init__(self) -> None:
        """Check the ratio and the budget."""
        check_ratio("kv_ratio", self.kv_ratio)
        if self.budget is None:
            return
        if self.budget < 1:
            raise UserError(f"budget={self.budget}: give at least 1 entry")
        object.__setattr__(self, "kv_ratio", 1.0)  # without a say: cells with the same budget are one

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The same budget in each layer, and no more than there is."""
        return [
            min(self.entries(prompt_tokens), tokens) for tokens in self.layer_tokens(prompt_tokens, layers)
        ]

    def entries(self, prompt_tokens: int, protected: int = 0) -> int:
        """Entries a layer holds per head, `protected` (window, sinks) included: int(N * kv_ratio) as all do.

        A budget above the prompt's length stands as it is, for methods that go on while decoding.

        Raises:
            UserError: the budget leaves no room beside the protected entries.
        """
        if self.budget is not None:
            return check_entries(f"budget={self.budget}", self.budget, prompt_tokens, protected)
        entries = int(prompt_tokens * self.kv_ratio)
        return check_entries(f"kv_ratio={self.kv_ratio}", entries, prompt_tokens, protected)


def check_entries(setting: str, entries: int, tokens: int, protected: int) -> int:
    """`entries`, as what `setting` says to keep of `tokens`.

    Raises:
        UserError: it leaves no room beside the `protected` ones.
    """
    if entries <= protected and entries < tokens:
        raise UserError(
            f"{setting} keeps {entries} of {tokens} prompt tokens, not more than the {protected} that "
            f"this method always keeps: raise it, to at least {protected + 1} entries"
        )
    return entries


def check_layer(name: str, layer: int, layers: int) -> int:
    """`layer`, as what the setting `name` says.

    Raises:
        UserError: the model has no such layer.
    """
    if not 0 <= layer < layers:
        raise UserError(f"{name}={layer}: the model has layers 0 to {layers - 1}")
    return layer


def check_ratio(name: str, ratio: float) -> None:
    """Raise UserError unless 0 < ratio <= 1."""
    if not 0 < ratio <= 1:
        raise UserError(f"{name}={ratio}: give a share above 0 and up to 1")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise UserError unless value is one of choices."""
    if value not in choices:
        raise UserError(f"{name}={value}: choose one of {', '.join(choices)}")


def check_window(window: int, kernel: int = 1) -> None:
    """Raise UserError unless the window holds a query and the pooling kernel is odd."""
    if window < 1:
        raise UserError(f"window={window}: give at least 1 query")
    if kernel < 1 or kernel % 2 == 0:
        raise UserError(f"kernel={kernel}: give an odd number, so that pooling keeps each score in its place")
