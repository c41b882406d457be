"""Kept keys and values of one prompt, with the true position of each: eviction never renumbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = -1
"""Position of a slot that holds nothing; no query sees it."""


@dataclass
class LayerCache:
    """One layer's entries. Heads are those stored: kv_heads, or more where query heads store copies."""

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
        if index.dim() != 2 or not index.shape[0] or index.shape[0] % self.keys.shape[0]:
            raise ValueError(
                f"entries to keep are indices [heads, kept] with {self.keys.shape[0]} heads or a multiple, "
                f"not {list(index.shape)}"
            )
        copies = index.shape[0] // self.keys.shape[0]
        head = torch.arange(index.shape[0], device=index.device)[:, None] // copies
        return LayerCache(self.keys[head, index], self.values[head, index], self.positions[head, index])

    def keep(self, index: Tensor) -> None:
        """Drop all entries but `index` [heads, kept]."""
        kept = self.kept(index)
        self.keys, self.values, self.positions = kept.keys, kept.values, kept.positions

    @property
    def entries(self) -> int:
        """Entries per stored head."""
        return self.keys.shape[1]

    def bytes(self) -> int:
        """Bytes of the stored K and V."""
        return self.keys.numel() * self.keys.element_size() + self.values.numel() * self.values.element_size()


@dataclass
class KVCache:
    """All layers of one prompt."""

    layers: list[LayerCache]
    seen: int
    """Tokens that have gone through the model: the true position of the next one."""

    def bytes(self) -> int:
        """Bytes of K and V over all layers, as stored."""
        return sum(layer.bytes() for layer in self.layers)
