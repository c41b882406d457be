"""A batch of caches, whatever their methods, samples and lengths, on its way through the layers.

The weights are read once per step for all rows. Attention runs per bucket of rows whose layers are of
nearly equal length, each packed into one buffer, so that a short cache never pays for a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from structkv_bench.engine.attention import Projected, visible
from structkv_bench.engine.cache import PADDING, KVCache, LayerCache
from structkv_bench.engine.method import Compressor, Rotate
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled

WASTE = 1.25
"""Rows share a bucket while the longest cache is at most this many times the shortest."""


class _Bucket:
    """Rows of nearly equal length, layer by layer in buffers [rows, heads, capacity, head_dim].

    Caches are packed to the right, so that all rows of a layer end at the same slot and a step writes
    one slice; slots to the left of a shorter row hold PADDING.
    """

    def __init__(self, rows: list[int], caches: list[KVCache], room: int) -> None:
        self.rows = rows
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.filled: list[int] = []
        self.padded: list[bool] = []
        for _ in range(len(caches[0].layers)):
            self._pack([cache.layers.pop(0) for cache in caches], room)

    def _pack(self, layers: list[LayerCache], room: int) -> None:
        lengths = [layer.entries for layer in layers]
        longest, first = max(lengths), layers[0]
        heads, _, head_dim = first.keys.shape
        shape = (len(layers), heads, longest + room, head_dim)
        keys, values = first.keys.new_zeros(shape), first.values.new_zeros(shape)
        positions = first.positions.new_full(shape[:3], PADDING)
        for row, layer in enumerate(layers):
            slots = slice(longest - layer.entries, longest)
            keys[row, :, slots], values[row, :, slots] = layer.keys, layer.values
            positions[row, :, slots] = layer.positions
        self.keys.append(keys)
        self.values.append(values)
        self.positions.append(positions)
        self.filled.append(longest)
        self.padded.append(min(lengths) < longest)

    def attend(self, new: Projected, at: Tensor) -> Tensor:
        """Add the new tokens' entries at positions `at` [rows, n], then attend to all of them.

        Returns:
            [rows, heads, n, head_dim]
        """
        layer = new.layer
        self._append(layer, new.key, new.value, at)
        filled = self.filled[layer]
        keys, values = self.keys[layer][:, :, :filled], self.values[layer][:, :, :filled]
        rows, heads, tokens, head_dim = new.query.shape
        group = heads // keys.shape[1]
        # The query heads of a KV head stand in a row as if they were queries: no key is ever repeated.
        grouped = new.query.reshape(rows, keys.shape[1], group * tokens, head_dim)
        mask = None
        if tokens > 1 or self.padded[layer] or new.sliding_window is not None:
            mask = visible(at[:, None], self.positions[layer][:, :, :filled], new.sliding_window)
            mask = mask.repeat(1, 1, group, 1)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=new.scaling)
        return out.reshape(rows, heads, tokens, head_dim)

    def _append(self, layer: int, key: Tensor, value: Tensor, at: Tensor) -> None:
        copies = self.keys[layer].shape[1] // key.shape[1]
        slots = slice(self.filled[layer], self.filled[layer] + key.shape[2])
        self.keys[layer][:, :, slots] = key.repeat_interleave(copies, dim=1)
        self.values[layer][:, :, slots] = value.repeat_interleave(copies, dim=1)
        self.positions[layer][:, :, slots] = at[:, None]
        self.filled[layer] = slots.stop

    def cache(self, layer: int) -> LayerCache:
        """The entries of this bucket's first row, without a copy."""
        stored = slice(0, self.filled[layer])
        return LayerCache(
            self.keys[layer][0, :, stored],
            self.values[layer][0, :, stored],
            self.positions[layer][0, :, stored],
        )

    def select(self, kept: list[int]) -> None:
        """Keep these rows (places in this bucket) alone."""
        index = torch.tensor(kept, device=self.keys[0].device)
        for buffers in (self.keys, self.values, self.positions):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = buffer[index.to(buffer.device)]
        self.rows = [self.rows[place] for place in kept]


class _OwnedBucket(_Bucket):
    """One row whose method has an attention of its own or evicts while decoding."""

    def __init__(self, row: int, cache: KVCache, owner: Compressor, room: int, rotate: Rotate) -> None:
        super().__init__([row], [cache], room)
        self.owner = owner
        self.rotate = rotate

    def attend(self, new: Projected, at: Tensor) -> Tensor:
        """As any bucket, token by token: with the owner's attention in place of ours, and its eviction."""
        tokens = range(at.shape[1])
        steps = [self._attend_one(_token(new, i), at[:, i : i + 1]) for i in tokens]
        return torch.cat(steps, dim=2)

    def _attend_one(self, new: Projected, at: Tensor) -> Tensor:
        layer = new.layer
        if self.owner.attention is None:
            out = super().attend(new, at)
        else:
            self._append(layer, new.key, new.value, at)
            out = self.owner.attention(new, at[0], self.cache(layer), self.rotate)[None]
        if self.owner.evicts_in_decode:
            cache = self.cache(layer)
            self.owner.step(new, cache)
            entries = self.filled[layer] = cache.entries
            self.keys[layer][0, :, :entries] = cache.keys
            self.values[layer][0, :, :entries] = cache.values
            self.positions[layer][0, :, :entries] = cache.positions
        return out


def _token(new: Projected, i: int) -> Projected:
    """The i-th of several new tokens."""
    query, key, value = (part[:, :, i : i + 1] for part in (new.query, new.key, new.value))
    return replace(new, query=query, key=key, value=value)


class Batch:
    """Caches of several prompts and methods that go through the model together.

    It takes over the caches' layers, one at a time, so that a cache is never held twice.
    """

    def __init__(self, model: Model, rows: Sequence[Prefilled], room: int) -> None:
        """Pack `rows`; `room` is the number of tokens that will be appended to each at most."""
        self._model = model
        self._seen = torch.tensor([row.cache.seen for row in rows], device=model.device)
        self._buckets: list[_Bucket] = []
        for places in _bucket_rows(rows):
            caches = [rows[place].cache for place in places]
            owner = rows[places[0]].compressor
            self._buckets.append(
                _OwnedBucket(places[0], caches[0], owner, room, model.rotate)
                if _acts_in_decode(owner)
                else _Bucket(places, caches, room)
            )

    def forward(self, ids: Tensor) -> Tensor:
        """Feed tokens [rows, n] at the rows' next positions; fp32 logits after the last: [rows, vocabulary].

        The order of rows is that of the batch; see `retire`.
        """
        model = self._model
        self._at = self._seen[:, None] + torch.arange(ids.shape[1], device=ids.device)
        order = torch.tensor([row for bucket in self._buckets for row in bucket.rows], device=ids.device)
        self._at = self._at[order]
        hidden = model.embed(ids[order])
        rotary = model.rotary(hidden, self._at)
        for layer in model.layers:
            hidden = model.run_layer(layer, hidden, self._at, rotary, self)
        self._seen += ids.shape[1]
        logits = model.logits(hidden[:, -1])
        return logits[torch.argsort(order).to(logits.device)]

    def attend(self, projected: Projected) -> Tensor:
        """Attention of every row over its own entries, bucket by bucket; see attention.Step."""
        outputs, start = [], 0
        at = self._at.to(projected.query.device)
        for bucket in self._buckets:
            rows = slice(start, start + len(bucket.rows))
            query, key, value = projected.query[rows], projected.key[rows], projected.value[rows]
            outputs.append(bucket.attend(replace(projected, query=query, key=key, value=value), at[rows]))
            start = rows.stop
        return torch.cat(outputs)

    def retire(self, going_on: list[int]) -> None:
        """Drop all rows but these (places in the batch), which are then numbered from 0."""
        place = {row: new for new, row in enumerate(going_on)}
        for bucket in self._buckets:
            kept = [i for i, row in enumerate(bucket.rows) if row in place]
            if kept and len(kept) < len(bucket.rows):
                bucket.select(kept)
            bucket.rows = [place[row] for row in bucket.rows if row in place]
        self._buckets = [bucket for bucket in self._buckets if bucket.rows]
        self._seen = self._seen[going_on]


def _acts_in_decode(compressor: Compressor) -> bool:
    return compressor.evicts_in_decode or compressor.attention is not None


def _bucket_rows(rows: Sequence[Prefilled]) -> list[list[int]]:
    """Places of rows that share buffers; a row whose method acts in decode stands alone."""
    shape = [[(layer.keys.shape[0], layer.entries) for layer in row.cache.layers] for row in rows]
    alone = [place for place, row in enumerate(rows) if _acts_in_decode(row.compressor)]
    buckets: list[list[int]] = []
    for place in sorted(set(range(len(rows))) - set(alone), key=lambda place: (shape[place], place)):
        if buckets and _similar(shape[buckets[-1][0]], shape[place]):
            buckets[-1].append(place)
        else:
            buckets.append([place])
    return buckets + [[place] for place in alone]


def _similar(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> bool:
    """Whether rows of these (heads, entries) per layer may share a buffer."""
    return all(
        heads == other and max(m, n) <= WASTE * min(m, n) for (heads, m), (other, n) in zip(a, b, strict=True)
    )
