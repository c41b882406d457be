"""How fast a device is at best: two numbers, from its data sheet or from a probe of a moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from structkv_bench.errors import UserError

HERE = "here"
KNOWN = {"a100": (312e12, 2.04e12), "h100": (989e12, 3.35e12), "h200": (989e12, 4.8e12),
         "l40s": (362e12, 0.864e12)}  # fmt: skip
"""FLOP/s in bf16 without sparsity, and bytes/s, as NVIDIA's data sheets have them (80 GB SXM variants)."""
SIDE, COPIED, TRIES = 1024, 128 * 2**20, 3
"""Rows of the probe's square matrices, bytes of its copy, and how often each is tried."""


@dataclass(frozen=True)
class Device:
    """A device's best speeds."""

    name: str
    flops: float
    """FLOP/s of a matrix product."""
    bandwidth: float
    """Bytes/s read or written."""

    def __str__(self) -> str:
        return f"{self.name}: {self.flops / 1e12:.3g} TFLOP/s, {self.bandwidth / 1e9:.3g} GB/s"


def device(text: str, dtype: str = "float32") -> Device:
    """The device that a text names: `here`, one of KNOWN, or FLOP/s and bytes/s as two numbers.

    Raises:
        UserError: it is none of these.
    """
    if text == HERE:
        return probed(dtype)
    if text in KNOWN:
        return Device(f"{text} at its data sheet's speed", *KNOWN[text])
    try:
        flops, bandwidth = (float(part) for part in text.split(","))
    except ValueError:
        flops = bandwidth = 0.0
    if not (0 < flops < float("inf") and 0 < bandwidth < float("inf")):
        raise UserError(
            f"device {text}: give {HERE}, {', '.join(KNOWN)}, or FLOP/s and bytes/s, as in 9.9e14,3.35e12"
        )
    return Device("as given", flops, bandwidth)


@cache
def probed(dtype: str) -> Device:
    """This machine, measured once a process: the best of a few matrix products and copies.

    A busy machine measures low.
    """
    import torch

    from structkv_bench.engine.clock import now
    from structkv_bench.provenance import device_name

    place = "cuda" if torch.cuda.is_available() else "cpu"
    side = 8 * SIDE if place == "cuda" else SIDE
    a = torch.ones(side, side, dtype=getattr(torch, dtype), device=place)
    source = torch.ones(COPIED, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(TRIES):
            started = now(a)
            work()
            times.append(now(a) - started)
        return max(min(times), time.get_clock_info("perf_counter").resolution)

    name = f"this machine ({device_name(place)}, probed in {dtype})"
    with torch.inference_mode():
        return Device(
            name, 2 * side**3 / seconds(lambda: a @ a), 2 * COPIED / seconds(lambda: target.copy_(source))
        )
