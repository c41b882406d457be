"""What a run stands in, for fault_drills.py: a disk that fills up, a clock that is late, another node."""

from __future__ import annotations

import platform
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

from structkv_bench import provenance
from structkv_bench.launch import claim

BACK = timedelta(hours=2)
SIZE, PAGE = 4 << 20, 4096


class SmallDisk:
    """A tmpfs of a few MiB; a file of zeros fills it to the last page."""

    kind = "a tmpfs of 4 MiB"

    def __init__(self, folder: Path) -> None:
        self.folder, self._ballast = folder, folder / "ballast"

    def fill(self, writers: Sequence[int]) -> None:
        """Leave no page free, whatever the processes `writers` do meanwhile."""
        with self._ballast.open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(PAGE))
            except OSError:
                return

    def free(self) -> None:
        """Make room again."""
        self._ballast.unlink()


class SmallFiles(SmallDisk):
    """Where nothing may be mounted: the kernel lets no file of the writers grow any further."""

    kind = "a limit of file size, since nothing may be mounted here"

    def fill(self, writers: Sequence[int]) -> None:
        """Give each writer a limit half a row above the largest file of rows."""
        largest = max(file.stat().st_size for file in self.folder.glob("*/*/rows*.jsonl"))
        for pid in writers:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (largest + 300, resource.RLIM_INFINITY))

    def free(self) -> None:
        """The writers are gone, and with them the limit."""


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """A disk at a folder, which is made."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield SmallDisk(folder) if mounted else SmallFiles(folder)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


def clock_late() -> None:
    """In this process the wall clock is two hours late, and four from a second on."""
    real, began = time.time, time.monotonic()

    def late() -> timedelta:
        return BACK * (1 + (time.monotonic() - began > 1))

    class Late(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Late:
            return super().now(tz) - late()

    time.time = lambda: real() - late().total_seconds()
    for module in (claim, provenance):
        module.datetime = Late  # type: ignore[attr-defined]


def on_another_node() -> None:
    """This process says that it is on another machine."""
    platform.node = lambda: "node-17"
    claim.machine = lambda: "boot of another machine"
