"""The largest memory of a piece of work: the allocator's on CUDA, that of live tensors on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {"cuda": "CUDA allocator", "cpu": "live tensors"}


@dataclass
class Peak:
    """What was found, once the work is done."""

    bytes: int = 0


@contextmanager
def peak_memory(device: torch.device, weight_bytes: int) -> Iterator[Peak]:
    """Measure what is done inside.

    On CUDA: the allocator's maximum over all devices, with whatever else is allocated. Elsewhere:
    `weight_bytes` and the storages that torch operations made inside and that are alive; what a kernel
    allocates for itself is not seen, and each operation takes some microseconds longer: don't time it.
    """
    peak = Peak()
    if device.type == "cuda":
        devices = range(torch.cuda.device_count())
        for number in devices:
            torch.cuda.reset_peak_memory_stats(number)
        yield peak
        peak.bytes = sum(torch.cuda.max_memory_allocated(number) for number in devices)
        return
    with LiveTensors() as live:
        yield peak
    peak.bytes = weight_bytes + live.peak


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages that operations make, until each is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(made, Tensor):
                self._note(made)
        return out

    def _note(self, made: Tensor) -> None:
        storage = made.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = storage.nbytes()
        self.now += self._known[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)
