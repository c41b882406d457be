"""What a run may hold at once, and what is free here. It changes no prediction: no part of a cell."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError

SETTINGS = ("decode.batch", "group.max_bytes")
"""As overrides call them; they stand in no choice's file."""
HEADROOM = 0.9
"""Of the memory that is free: fragments, a library's own buffers, and what estimates leave out."""
UNITS = {"": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
         "TIB": 2**40}  # fmt: skip
SIZE = re.compile(r"([\d.]+(?:e\+?\d+)?) ?([kmgt]i?b)?", re.IGNORECASE)


@dataclass(frozen=True)
class Bounds:
    """Samples and bytes."""

    decode_batch: int = 1
    """Samples whose answers are decoded together at most."""
    max_bytes: int | None = None
    """Of memory, the model's weights included; None: what is free."""
    processes: int = 1
    """Of this run, that share what is free."""

    @classmethod
    def of(cls, decode_batch: Any, max_bytes: Any) -> Bounds:
        """From the values of decode.batch and group.max_bytes.

        Raises:
            UserError: one of them is no such number.
        """
        if not (type(decode_batch) is int and decode_batch >= 1):
            raise UserError(f"decode.batch={decode_batch}: give a whole number of samples, at least 1")
        return cls(decode_batch, None if max_bytes is None else _bytes(max_bytes))

    def allowed(self, device_map: str | None) -> int:
        """Bytes that a model with this `device_map`, not loaded yet, and all that runs on it may take."""
        if self.max_bytes is not None:
            return self.max_bytes
        free = free_bytes(device_map)
        return sys.maxsize if free is None else int(HEADROOM * free / self.processes)


DEFAULT = Bounds()


def _bytes(given: Any) -> int:
    found = None if isinstance(given, bool) else SIZE.fullmatch(str(given))
    with suppress(ValueError, OverflowError):
        size = int(float(found[1]) * UNITS[(found[2] or "").upper()]) if found else 0
        if size >= 1:
            return size
    raise UserError(f"group.max_bytes={given}: give bytes, such as 2e9 or 2GiB, or null for what is free")


def size(count: int) -> str:
    """Bytes in a readable unit."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def free_bytes(device_map: str | None) -> int | None:
    """Memory that is free where a model with this `device_map` goes, before it is loaded; None: unknown."""
    import torch

    if device_map == "cpu" or not torch.cuda.is_available():
        return min(_cpu_bytes(), default=None)
    torch.cuda.empty_cache()  # of a model before this one
    if device_map is None or device_map.startswith("cuda"):
        return torch.cuda.mem_get_info(device_map or "cuda")[0]
    return sum(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))


def _cpu_bytes() -> Iterator[int]:
    """What the machine has left, and each control group that this process is in (Slurm, containers)."""
    with suppress(OSError):  # no Linux
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        yield next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _left(Path("/sys/fs/cgroup"), path, "memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                yield from _left(Path("/sys/fs/cgroup/memory"), path, *names)


def _left(mount: Path, path: str, limit: str, used: str) -> Iterator[int]:
    """Bytes left in a control group and in those around it."""
    own = mount / path.lstrip("/")
    for folder in (own, *own.parents):
        if not folder.is_relative_to(mount):
            return
        with suppress(OSError, ValueError, StopIteration):  # it has no limit, or is not to be seen from here
            most, taken = (int((folder / file).read_text(encoding="utf-8")) for file in (limit, used))
            stat = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
            files = next(int(entry.split()[1]) for entry in stat if entry.startswith("inactive_file "))
            yield most - taken + files  # pages of files make room when it is needed
