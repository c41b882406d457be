"""Whether somebody on this machine has locked a byte of a file, without taking a lock oneself."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

FLOCK = "hhqqi0q"
"""Linux' struct flock: kind, whence, start, length, process."""


def is_held(file: Path, place: int = 0) -> bool:
    """Whether another process holds a lock (`fcntl.lockf`) on the byte at `place`.

    Raises:
        OSError: there is no such file, or its file system has no locks.
    """
    query = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
    with open(file, "rb") as opened:
        kind = struct.unpack(FLOCK, fcntl.fcntl(opened, fcntl.F_GETLK, query))[0]
    return bool(kind != fcntl.F_UNLCK)
