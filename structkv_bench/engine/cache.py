"""Kept keys and values of one prompt, with the true position of each: eviction never renumbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1
"""Position of a slot that holds nothing; no query sees it."""


@dataclass
class LayerCache:
    """One layer's entries, equally many in each head.

    Heads are those stored: kv_heads, or more where query heads store copies.
    """

    keys: Tensor
    """[heads, entries, head_dim], post-RoPE at the true positions."""
    values: Tensor
    """[heads, entries, head_dim]"""
    positions: Tensor
    """[heads, entries]"""

    @classmethod
    def of_tokens(cls, keys: Tensor, values: Tensor, positions: Tensor) -> LayerCache:
        """All entries of a layer; `positions` [tokens] are the same in each head."""
        return cls(keys, values, positions.expand(keys.shape[0], -1))

    def kept(self, index: Tensor) -> LayerCache:
        """A copy of the entries `index` [heads or a multiple, kept]; the rest can be freed.

        Raises:
            ValueError: the index has another form.
        """
        if index.dim() != 2:
            raise ValueError(f"entries to keep are indices [heads, kept], not {list(index.shape)}")
        head = torch.tensor(self._stored_from(index.shape[0]), device=index.device)[:, None]
        return LayerCache(self.keys[head, index], self.values[head, index], self.positions[head, index])

    def kept_unevenly(self, index: Sequence[Tensor]) -> RaggedLayer:
        """As `kept`, with an index [kept] of its own for each stored head.

        Raises:
            ValueError: the index has another form.
        """
        if any(one.dim() != 1 for one in index):
            raise ValueError("entries to keep are, where heads differ, one list of indices for each head")
        heads = self.by_head()
        sources = self._stored_from(len(index))
        return RaggedLayer(
            [heads[source].kept(one[None]) for source, one in zip(sources, index, strict=True)]
        )

    def keep(self, index: Tensor) -> None:
        """Drop all entries but `index` [heads, kept]."""
        kept = self.kept(index)
        self.keys, self.values, self.positions = kept.keys, kept.values, kept.positions

    def by_head(self) -> list[LayerCache]:
        """Each head by itself, as a layer of one head; views."""
        return [
            LayerCache(self.keys[at], self.values[at], self.positions[at])
            for at in (slice(head, head + 1) for head in range(self.keys.shape[0]))
        ]

    @property
    def entries(self) -> int:
        """Entries per stored head."""
        return self.keys.shape[1]

    def bytes(self) -> int:
        """Bytes of the stored K and V."""
        return self.keys.numel() * self.keys.element_size() + self.values.numel() * self.values.element_size()

    def _stored_from(self, stored: int) -> list[int]:
        """The head that each of so many stored heads copies."""
        heads = self.keys.shape[0]
        if not stored or stored % heads:
            raise ValueError(f"entries to keep are for {heads} heads or a multiple, not for {stored}")
        return [head // (stored // heads) for head in range(stored)]


@dataclass
class RaggedLayer:
    """A layer whose heads hold unequal numbers of entries, each in memory of its own: nothing is padded."""

    heads: list[LayerCache]
    """Each a layer of one head."""

    def by_head(self) -> list[LayerCache]:
        """Each head by itself, as a layer of one head."""
        return self.heads

    def bytes(self) -> int:
        """Bytes of the stored K and V."""
        return sum(head.bytes() for head in self.heads)


@dataclass
class KVCache:
    """All layers of one prompt."""

    layers: list[LayerCache | RaggedLayer]
    seen: int
    """Tokens that have gone through the model: the true position of the next one."""

    def entries(self) -> list[int]:
        """Entries of each layer, all its heads together."""
        return [sum(head.entries for head in layer.by_head()) for layer in self.layers]

    def bytes(self) -> int:
        """Bytes of K and V over all layers, as stored."""
        return sum(layer.bytes() for layer in self.layers)
