"""What one sample of a cell takes in FLOPs, bytes and peak memory, from the shapes of model and method alone.

FLOPs are those of matrix products, 2 m n k each; a causal attention has its lower triangle alone. Norms,
rotary, softmax, pooling and sorting are not counted: they are a few numbers per token and head beside
thousands. The counts are held to torch's own (FlopCounterMode), and the bytes to measured ones, by
tests/test_cost.py. A model's sliding window is not counted: its attention is taken for a full one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from structkv_bench.engine.column_sums import COLUMN_SUM_BLOCK
from structkv_bench.shape import ModelShape

if TYPE_CHECKING:
    from structkv_bench.cost.speed import Device
    from structkv_bench.engine.method import Method

BALANCE = 20
"""FLOPs that a device does while it reads a byte, for one that is not known: 6 on a small CPU, 300 on a GPU,
whose attention and decode reach less of it."""


class _Place(NamedTuple):
    """Tokens in one layer; methods whose places are equal share them."""

    way: int
    """0: from the prompt; 1: of tokens that began anew."""
    layer: int
    tokens: int
    reach: int
    alike: Any
    """What chose the tokens; None: none has been dropped yet."""


@dataclass(frozen=True)
class Cost:
    """One sample of one method, prefilled alone. FLOPs and bytes."""

    projections: int
    """FLOPs of a prefill to q, k, v and back."""
    attention: int
    """FLOPs of its scores and weighted values."""
    mlp: int
    head: int
    """FLOPs of the logits after the last token."""
    scoring: int
    """FLOPs of the products q k that the method takes once more."""
    decode_flops: int
    """Of one decoded token, halfway through the answer."""
    decode_bytes: int
    """Read for one decoded token: layers, head, kept keys and values."""
    kept_bytes: int
    """K and V held after the prompt."""
    peak_bytes: int
    """At the largest moment: weights, what a layer makes of its tokens, and the cache so far."""
    weight_bytes: int

    @property
    def forward(self) -> int:
        """FLOPs of the layers and the head alone: what dropping tokens saves, before what choosing costs."""
        return self.projections + self.attention + self.mlp + self.head

    @property
    def prefill_flops(self) -> int:
        """All of a prefill."""
        return self.forward + self.scoring

    def prefill_seconds(self, device: Device) -> float:
        """At the device's full speed: the weights are read once at least."""
        return max(self.prefill_flops / device.flops, self.weight_bytes / device.bandwidth)

    def decode_seconds(self, device: Device) -> float:
        """One token at the device's full speed."""
        return max(self.decode_flops / device.flops, self.decode_bytes / device.bandwidth)


def cost(
    shape: ModelShape, method: Method, tokens: int, new: int = 1, processed: Sequence[int] | None = None
) -> Cost:
    """The cost of a prompt of `tokens` and `new` decoded tokens.

    Args:
        shape: of the model.
        method: where a layer's tokens are found only in the pass (an online pivot), they count at most.
        tokens: of the prompt.
        new: decoded tokens, over which a token's decode is a mean.
        processed: tokens that each layer did process (`Prefilled.layer_tokens`), where a pass has shown it.
    """
    ways = method.passes(tokens, shape.layers)
    if processed is not None and len(ways) == 1:
        ways = [list(processed)]
    queries = method.layer_queries(tokens, shape.layers)
    entries = method.layer_entries(tokens, shape.layers)
    copies = _copies(shape, method)
    halfway = [kept + (new + 1) // 2 for kept in entries]
    layers = [layer for way in ways for layer in way]
    return Cost(
        projections=2 * shape.projection_weights * sum(layers),
        attention=4 * _width(shape) * sum(_pairs(layer, method.reach(tokens)) for layer in layers),
        mlp=2 * shape.mlp_weights * sum(layers),
        head=2 * shape.head_weights,
        scoring=sum(_scoring(shape, *pair) for pair in zip(ways[0], queries, strict=False)),
        decode_flops=shape.decode_flops(halfway),
        decode_bytes=_read_bytes(shape) + copies * shape.kv_bytes(halfway),
        kept_bytes=copies * shape.kv_bytes(entries),
        peak_bytes=shape.weight_bytes + _peak(shape, ways, queries, entries, copies, new),
        weight_bytes=shape.weight_bytes,
    )


def check_sizes(method: Method, tokens: int, layers: int) -> None:
    """Whether a method tells a whole number for each layer, which all estimates rest on.

    Raises:
        ValueError: it does not.
    """
    for name in ("layer_entries", "layer_tokens", "layer_queries"):
        told = list(getattr(method, name)(tokens, layers))
        try:
            whole = len(told) == layers and all(index(number) >= 0 for number in told)
        except TypeError:  # a fraction, or no number
            whole = False
        if not whole:
            raise ValueError(f"{name} gives {told}, not a count for each of {layers} layers")


def group_flops(
    shape: ModelShape, methods: Sequence[Method], tokens: int, new: int, balance: float = BALANCE
) -> float:
    """Work of one sample for a group that shares all it can, in FLOPs of a prefill.

    Layers count once for methods that still have the same tokens: all of them, or what methods have left
    that differ in their KV budget alone; scores count once for methods with equally many queries. Decoding
    reads the weights once for all, and a byte counts as `balance` FLOPs.
    """
    prefill = dict(unit for method in methods for unit in _units(shape, method, tokens))
    costs = [cost(shape, method, tokens, new) for method in methods]
    flops = sum(one.decode_flops for one in costs)
    read = _read_bytes(shape) + sum(one.decode_bytes - _read_bytes(shape) for one in costs)
    return sum(prefill.values()) + new * max(flops, balance * read)


class Need(NamedTuple):
    """Bytes that a group takes on one sample, beside the weights."""

    kept: int
    """All caches after the prompt, as if complete."""
    token: int
    """What one more token adds to them."""
    working: int
    """The states of each way through the layers, and the largest work of a layer in any of them."""
    decoding: int
    """The largest layer of each cache, copied as it is packed, and the logits."""


def group_need(shape: ModelShape, methods: Sequence[Method], tokens: int, asked: int = 0) -> Need:
    """What methods that go through the layers side by side take, a bound on what is measured.

    Args:
        shape: of the model.
        methods: of the group.
        tokens: of the prompt.
        asked: tokens fed after compression, which all caches keep.
    """
    kept, token, working, decoding, places = 0, 0, 0, 0, set[_Place]()
    for method in methods:
        copies = _copies(shape, method)
        entries = [count + asked for count in method.layer_entries(tokens, shape.layers)]
        kept += shape.kv_bytes(entries) * copies
        token += shape.kv_bytes([1] * shape.layers) * copies
        decoding += shape.kv_bytes([max(entries)]) * copies + 3 * 4 * shape.vocabulary  # fp32, and two copies
        queries = method.layer_queries(tokens, shape.layers)
        for number, way in enumerate(method.passes(tokens, shape.layers)):
            for layer, left in enumerate(way):
                scored = queries[layer] if number == 0 else 0
                working = max(working, _attending(shape, left, scored), _mlp_bytes(shape, left))
        places |= set(_places(shape, method, tokens))
    beside = [sum(at.tokens for at in places if at.layer == layer) for layer in range(shape.layers)]
    return Need(kept, token, working + max(beside) * shape.hidden * shape.itemsize, decoding)


def batch_peak_bytes(shape: ModelShape, needs: Sequence[Need], new: int) -> int:
    """Peak of groups that are prefilled one after another and then decode `new` tokens together.

    Weights, all caches with room for the answers, and the largest prefill, or what decoding takes.
    """
    kept = sum(need.kept + new * need.token for need in needs)
    beside = max(max(need.working for need in needs), sum(need.decoding for need in needs))
    return shape.weight_bytes + kept + beside


def passes_per_layer(shape: ModelShape, methods: Sequence[Method], tokens: int) -> list[int]:
    """How many different sets of tokens go through each layer for a group that shares all it can."""
    places = {place for method in methods for place in _places(shape, method, tokens)}
    return [sum(place.layer == layer for place in places) for layer in range(shape.layers)]


def _places(shape: ModelShape, method: Method, tokens: int) -> Iterator[_Place]:
    return (place for place, _ in _units(shape, method, tokens) if isinstance(place, _Place))


def _units(shape: ModelShape, method: Method, tokens: int) -> Iterator[tuple[Any, int]]:
    """Pieces of a prefill with their FLOPs, under names that are equal where methods share the piece."""
    names = (field.name for field in fields(method) if field.name not in ("kv_ratio", "budget"))
    settings = [(name, getattr(method, name)) for name in names]
    own, reach = (type(method).__qualname__, repr(settings)), method.reach(tokens)
    queries = method.layer_queries(tokens, shape.layers)
    for number, way in enumerate(method.passes(tokens, shape.layers)):
        for layer, left in enumerate(way):
            alike = None if number == 0 and left == tokens else own
            place = _Place(number, layer, left, reach, alike)
            weights = shape.projection_weights + shape.mlp_weights
            yield place, 2 * weights * left + 4 * _width(shape) * _pairs(left, reach)
            if number == 0 and queries[layer]:
                yield (place, queries[layer]), _scoring(shape, left, queries[layer])
        if len(way) == shape.layers:
            yield (place, "head"), 2 * shape.head_weights


def _copies(shape: ModelShape, method: Method) -> int:
    """How often a KV head's entries are stored."""
    return method.stored_heads(shape.heads, shape.kv_heads) // shape.kv_heads


def _width(shape: ModelShape) -> int:
    """Numbers of one token's query."""
    return shape.heads * shape.head_dim


def _pairs(tokens: int, reach: int) -> int:
    """Queries and the keys that each sees: the lower triangle, or a band of it."""
    seen = min(tokens, reach)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen


def _scoring(shape: ModelShape, tokens: int, queries: int) -> int:
    """FLOPs of the last queries' q k."""
    return 2 * _width(shape) * sum(_blocks(tokens, queries))


@lru_cache(maxsize=64)  # the layers of a prompt ask for the same
def _blocks(tokens: int, queries: int) -> tuple[int, ...]:
    """Products q k of the last queries, in the engine's blocks: each up to its last query's key."""
    starts = range(tokens - min(queries, tokens), tokens, COLUMN_SUM_BLOCK)
    stops = [min(start + COLUMN_SUM_BLOCK, tokens) for start in starts]
    return tuple((stop - start) * stop for start, stop in zip(starts, stops, strict=True))


def _read_bytes(shape: ModelShape) -> int:
    """Weights that every decoded token needs; of the embedding one row."""
    layers = shape.layers * (shape.projection_weights + shape.mlp_weights)
    return (layers + shape.head_weights) * shape.itemsize


def _peak(
    shape: ModelShape,
    ways: Sequence[Sequence[int]],
    queries: Sequence[int],
    entries: Sequence[int],
    copies: int,
    new: int,
) -> int:
    """Bytes beside the weights at the largest moment of prefill and decode."""
    peak, kept = 0, [copies * shape.kv_bytes([count]) for count in entries]
    for number, way in enumerate(ways):
        last = number == len(ways) - 1
        held = 0  # where tokens begin anew, what the pass before kept is dropped
        for layer, tokens in enumerate(way):
            scored = queries[layer] if number == 0 else 0
            attending = held + _attending(shape, tokens, scored)
            held += kept[layer] if last else 0
            peak = max(peak, attending, held + _mlp_bytes(shape, tokens))
    decoding = copies * shape.kv_bytes([count + new for count in entries]) + max(kept)
    return max(peak, decoding)


def _along(shape: ModelShape, tokens: int) -> int:
    """Bytes that go with tokens through all layers: cosine and sine, and ids, places and positions."""
    return tokens * (2 * shape.head_dim * shape.itemsize + 3 * 8)


def _attending(shape: ModelShape, tokens: int, queries: int) -> int:
    """Bytes in a layer's attention: input and normed states, q, k and v; beside them rotary's three copies
    of q, or the output and the scores: logits and softmax of a block of queries in fp32."""
    width = _width(shape)
    base = tokens * (2 * shape.hidden + width + 2 * shape.kv_heads * shape.head_dim) * shape.itemsize
    scores = 4 * shape.heads * 2 * max(_blocks(tokens, queries), default=0)
    rotating, choosing = 3 * tokens * width * shape.itemsize, tokens * width * shape.itemsize + scores
    return _along(shape, tokens) + base + max(rotating, choosing)


def _mlp_bytes(shape: ModelShape, tokens: int) -> int:
    """Bytes in a layer's MLP: input, residual and normed states; gate, up and their product."""
    return _along(shape, tokens) + tokens * 3 * (shape.hidden + shape.intermediate) * shape.itemsize
