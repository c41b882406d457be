"""One sample, timed: seconds until the first token and per token after it, bytes that it holds."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from structkv_bench.bench.peak import Peak, peak_memory
from structkv_bench.engine.clock import now
from structkv_bench.engine.decode import decode
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import prefill


@dataclass(frozen=True)
class Spread:
    """Median and quartiles; of a single value all three are that value."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of some values, quartiles within their range."""
        some = list(values)
        low, middle, high = statistics.quantiles(some, method="inclusive") if len(some) > 1 else some * 3
        return cls(middle, low, high)


@dataclass(frozen=True)
class Timed:
    """One prefill and decode. Seconds on the wall clock, with the device's work done."""

    prefill_s: float
    """From token ids to the logits after the last of them, choosing included."""
    first_token_s: float
    """Prefill, and the choice of the first token."""
    decode_s: float
    """From the first token to the last: the cache is packed for decoding, and each further token made."""
    new_tokens: int
    """Of each row."""
    kept_bytes: int
    """Measured K and V of all rows after the prompt."""
    peak_bytes: int | None
    """None: not looked at, since looking takes time."""
    parts: dict[str, float]
    """Seconds of the prefill by prefill.PARTS, of the first row."""
    layer_tokens: list[int]
    """Tokens that each layer processed, of the first row."""
    pivot: int | None

    @property
    def seconds(self) -> float:
        """From token ids to the last token."""
        return self.first_token_s + self.decode_s

    @property
    def decode_s_per_token(self) -> float | None:
        """Mean over the tokens after the first; None: there are none."""
        return self.decode_s / (self.new_tokens - 1) if self.new_tokens > 1 else None


def timed(
    model: Model, methods: Sequence[Method], ids: Sequence[int], new_tokens: int, look: bool = False
) -> Timed:
    """Prefill `ids` once for all methods and decode `new_tokens` for each of them, whatever they say.

    Args:
        model: the model.
        methods: one, to be timed alone, or a group that shares what it can.
        ids: the prompt.
        new_tokens: at least 1; no token ends an answer before.
        look: whether to look at the peak memory on a CPU too, where that takes time: don't use the seconds.

    Raises:
        RuntimeError: a method failed.
    """
    compressors = [method.compressor(len(ids), model.shape.layers) for method in methods]
    watched = look or model.device.type == "cuda"
    like = torch.empty(0, device=model.device)
    with peak_memory(model.device, model.weight_bytes) if watched else nullcontext(Peak()) as peak:
        started = now(like)
        rows = prefill(model, ids, compressors)
        filled = now(like)
        for row in rows:
            if row.error is not None:
                raise RuntimeError(row.error.strip().splitlines()[-1])
        decode(model, rows, 1, min_new_tokens=1)  # its rows' caches stay as they are
        first = now(like)
        kept = sum(row.cache.bytes() for row in rows)
        going_on = now(like)
        if new_tokens > 1:
            decode(model, rows, new_tokens, min_new_tokens=new_tokens)
        ended = now(like)
    return Timed(
        prefill_s=filled - started,
        first_token_s=first - started,
        decode_s=ended - going_on,
        new_tokens=new_tokens,
        kept_bytes=kept,
        peak_bytes=peak.bytes if watched else None,
        parts=rows[0].parts,
        layer_tokens=rows[0].layer_tokens,
        pivot=compressors[0].facts().get("pivot"),
    )
