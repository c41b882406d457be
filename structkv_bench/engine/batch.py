"""A batch of caches, whatever their methods, samples and lengths, on its way through the layers.

The weights are read once per step for all rows. In each layer the stored heads of all rows are lanes, and
lanes of nearly equal length are packed into one buffer: neither a short cache nor a head that keeps little
pays for a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from structkv_bench.engine.attention import Projected, visible
from structkv_bench.engine.cache import PADDING, KVCache, LayerCache, RaggedLayer
from structkv_bench.engine.method import Compressor, Rotate
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled

WASTE = 1.01
"""Lanes share a buffer while the longest is at most this many times the shortest."""


class _Lane(NamedTuple):
    """A stored head of a row."""

    row: int
    head: int
    stored: int
    """Stored heads of that row in this layer."""
    cache: LayerCache
    """Of one head."""


class _Bucket:
    """Lanes of nearly equal length in buffers [lanes, capacity, head_dim].

    They are packed to the right, so that all end at the same slot and a step writes one slice; slots to
    the left of a shorter lane hold PADDING.
    """

    def __init__(self, lanes: Sequence[_Lane], room: int) -> None:
        lengths = [lane.cache.entries for lane in lanes]
        self.places = [(lane.row, lane.head) for lane in lanes]
        self.stored = lanes[0].stored
        self.filled = max(lengths)
        self.starts = [self.filled - length for length in lengths]
        first = lanes[0].cache
        shape = (len(lanes), self.filled + room, first.keys.shape[-1])
        self.keys, self.values = first.keys.new_zeros(shape), first.values.new_zeros(shape)
        self.positions = first.positions.new_full(shape[:2], PADDING)
        for place, (lane, start) in enumerate(zip(lanes, self.starts, strict=True)):
            slots = slice(start, self.filled)
            self.keys[place, slots], self.values[place, slots] = lane.cache.keys[0], lane.cache.values[0]
            self.positions[place, slots] = lane.cache.positions[0]
        self._index = _Index.of(self.places, self.stored, self.keys.device)

    def attend(self, new: Projected, at: Tensor, out: Tensor) -> None:
        """Add the new tokens' entries, attend to all there are, and write the lanes' part of `out`.

        Args:
            new: of all rows.
            at: [rows, n], positions of the new tokens.
            out: [rows, heads, n, head_dim]
        """
        self._append(new, at)
        rows, heads, tokens, head_dim = new.query.shape
        group = heads // self.stored
        # The query heads of a stored head stand in a row as if they were queries: no key is ever repeated.
        lanes = (rows * self.stored, group * tokens, head_dim)
        query = self._index.lanes(new.query.reshape(lanes))
        mask = None
        if tokens > 1 or any(self.starts) or new.sliding_window is not None:
            its = self._index.rows(at)
            mask = visible(its, self.positions[:, : self.filled], new.sliding_window).repeat(1, group, 1)[
                None
            ]
        keys, values = self.keys[None, :, : self.filled], self.values[None, :, : self.filled]
        attended = scaled_dot_product_attention(query[None], keys, values, attn_mask=mask, scale=new.scaling)
        self._index.write(out.view(lanes), attended[0])

    def _append(self, new: Projected, at: Tensor) -> None:
        rows, kv_heads, tokens, head_dim = new.key.shape
        slots = slice(self.filled, self.filled + tokens)
        for buffer, part in ((self.keys, new.key), (self.values, new.value)):
            copies = part.repeat_interleave(self.stored // kv_heads, dim=1)
            buffer[:, slots] = self._index.lanes(copies.reshape(rows * self.stored, tokens, head_dim))
        self.positions[:, slots] = self._index.rows(at)
        self.filled = slots.stop

    def caches(self) -> list[_Lane]:
        """The lanes as they are now; views."""
        return [
            _Lane(row, head, self.stored, self._cache(slice(place, place + 1), start))
            for place, ((row, head), start) in enumerate(zip(self.places, self.starts, strict=True))
        ]

    def _cache(self, lanes: slice, start: int) -> LayerCache:
        slots = slice(start, self.filled)
        return LayerCache(self.keys[lanes, slots], self.values[lanes, slots], self.positions[lanes, slots])

    def select(self, new_row: dict[int, int]) -> bool:
        """Keep the lanes of these rows alone, under their new numbers; whether there are any."""
        kept = [place for place, (row, _) in enumerate(self.places) if row in new_row]
        if not kept:
            return False
        if len(kept) < len(self.places):
            index = torch.tensor(kept, device=self.keys.device)
            self.keys, self.values, self.positions = (
                buffer[index] for buffer in (self.keys, self.values, self.positions)
            )
        self.starts = [self.starts[place] for place in kept]
        self.places = [(new_row[row], head) for row, head in (self.places[place] for place in kept)]
        self._index = _Index.of(self.places, self.stored, self.keys.device)
        return True


class _Index(NamedTuple):
    """Where a bucket's lanes are among all rows' heads."""

    row: Tensor
    """[lanes]"""
    lane: Tensor
    """[lanes]: row x stored heads + head"""
    in_order: bool
    """Whether the lanes are 0, 1, 2 ...: where they are all lanes nothing need be gathered."""

    @classmethod
    def of(cls, places: Sequence[tuple[int, int]], stored: int, device: torch.device) -> _Index:
        row = torch.tensor([row for row, _ in places], device=device)
        lanes = [row * stored + head for row, head in places]
        return cls(row, torch.tensor(lanes, device=device), lanes == list(range(len(lanes))))

    def lanes(self, everyone: Tensor) -> Tensor:
        """This bucket's of [all lanes, ...]."""
        return everyone if self._all_of(everyone) else everyone[self.lane]

    def rows(self, everyone: Tensor) -> Tensor:
        """Of [rows, ...], what each lane's row has."""
        return everyone[self.row]

    def write(self, everyone: Tensor, own: Tensor) -> None:
        """Put this bucket's into [all lanes, ...]."""
        if self._all_of(everyone):
            everyone.copy_(own)
        else:
            everyone[self.lane] = own

    def _all_of(self, everyone: Tensor) -> bool:
        return self.in_order and everyone.shape[0] == self.lane.shape[0]


class _OwnedBucket(_Bucket):
    """All heads of one row whose method has an attention of its own or evicts while decoding."""

    def __init__(self, lanes: Sequence[_Lane], room: int, owner: Compressor, rotate: Rotate) -> None:
        super().__init__(lanes, room)
        self.owner = owner
        self.rotate = rotate

    def attend(self, new: Projected, at: Tensor, out: Tensor) -> None:
        """As any bucket, token by token: with the owner's attention in place of ours, and its eviction."""
        for i in range(at.shape[1]):
            self._attend_one(_token(new, i), at[:, i : i + 1], out[:, :, i : i + 1])

    def _attend_one(self, new: Projected, at: Tensor, out: Tensor) -> None:
        row = self.places[0][0]
        its = slice(row, row + 1)
        alone = replace(new, query=new.query[its], key=new.key[its], value=new.value[its])
        if self.owner.attention is None:
            whole = torch.empty_like(out, memory_format=torch.contiguous_format)
            super().attend(new, at, whole)
            out[its] = whole[its]
        else:
            self._append(new, at)
            out[its] = self.owner.attention(alone, at[row], self.cache(), self.rotate)
        if self.owner.evicts_in_decode:
            cache = self.cache()
            self.owner.step(alone, cache)
            self.filled = cache.entries
            self.keys[:, : self.filled], self.values[:, : self.filled] = cache.keys, cache.values
            self.positions[:, : self.filled] = cache.positions

    def cache(self) -> LayerCache:
        """The row's entries of this layer; views."""
        return self._cache(slice(None), 0)


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
        owners = {place: row.compressor for place, row in enumerate(rows) if _acts_in_decode(row.compressor)}
        self._layers: list[list[_Bucket]] = []
        while rows[0].cache.layers:
            layer = [row.cache.layers.pop(0).by_head() for row in rows]
            self._layers.append(_packed(layer, owners, room, model.rotate))

    def forward(self, ids: Tensor) -> Tensor:
        """Feed tokens [rows, n] at the rows' next positions; fp32 logits after the last: [rows, vocabulary].

        The order of rows is that of the batch; see `retire`.
        """
        model = self._model
        self._at = self._seen[:, None] + torch.arange(ids.shape[1], device=ids.device)
        hidden = model.embed(ids)
        rotary = model.rotary(hidden, self._at)
        for layer in model.layers:
            hidden = model.run_layer(layer, hidden, self._at, rotary, self)
        self._seen += ids.shape[1]
        return model.logits(hidden[:, -1])

    def attend(self, projected: Projected) -> Tensor:
        """Attention of every row over its own entries, bucket by bucket; see attention.Step."""
        out = torch.empty_like(projected.query, memory_format=torch.contiguous_format)
        at = self._at.to(projected.query.device)
        for bucket in self._layers[projected.layer]:
            bucket.attend(projected, at, out)
        return out

    def retire(self, going_on: list[int]) -> None:
        """Drop all rows but these (places in the batch), which are then numbered from 0."""
        new_row = {row: new for new, row in enumerate(going_on)}
        for number, buckets in enumerate(self._layers):
            self._layers[number] = [bucket for bucket in buckets if bucket.select(new_row)]
        self._seen = self._seen[going_on]

    def release(self) -> list[KVCache]:
        """The rows' caches, with what was appended; the batch is then used up."""
        caches = [KVCache([], seen) for seen in self._seen.tolist()]
        while self._layers:
            lanes = [lane for bucket in self._layers.pop(0) for lane in bucket.caches()]
            lanes.sort(key=lambda lane: (lane.row, lane.head))
            for row, cache in enumerate(caches):
                cache.layers.append(RaggedLayer([lane.cache for lane in lanes if lane.row == row]))
        return caches


def _acts_in_decode(compressor: Compressor) -> bool:
    return compressor.evicts_in_decode or compressor.attention is not None


def _packed(
    layer: Sequence[Sequence[LayerCache]], owners: dict[int, Compressor], room: int, rotate: Rotate
) -> list[_Bucket]:
    """One layer's buckets of rows of heads; a row whose method acts in decode stands alone."""
    rows = [
        [_Lane(row, head, len(heads), cache) for head, cache in enumerate(heads)]
        for row, heads in enumerate(layer)
    ]
    shared: list[list[_Lane]] = []
    lanes = [lane for row, its in enumerate(rows) if row not in owners for lane in its]
    for lane in sorted(lanes, key=lambda lane: (lane.stored, lane.cache.entries)):
        if shared and _similar(shared[-1][0], lane):
            shared[-1].append(lane)
        else:
            shared.append([lane])
    owned = [_OwnedBucket(rows[row], room, owner, rotate) for row, owner in owners.items()]
    return [*(_Bucket(lanes, room) for lanes in shared), *owned]


def _similar(shortest: _Lane, longer: _Lane) -> bool:
    """Whether lanes may share a buffer."""
    return shortest.stored == longer.stored and longer.cache.entries <= WASTE * shortest.cache.entries
