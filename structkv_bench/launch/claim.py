"""Which shards are at work, told by files that any machine of the cluster can read.

A shard's process keeps two files: a state (JSON, replaced whole, refreshed while it lives) and a lock. On
one machine the lock says exactly whether the process lives. Locks need not reach other machines, so there a
state that no longer changes is what tells that its process has gone; no clocks are compared.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from structkv_bench.errors import UserError
from structkv_bench.locks import is_held
from structkv_bench.paths import replace_whole

BEAT, LEASE = 5.0, 60.0
"""Seconds between two refreshes of a state, and after which one that stayed as it was is a dead one's."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class State:
    """How far the process of a shard is."""

    shard: str
    of: int = 0
    """Samples that it found left to do."""
    done: int = 0
    failed: int = 0
    """Rows that failed."""
    state: str = "running"
    """running, done, requeued (goes on by itself), stopped (was told to), or died."""
    error: str | None = None
    """Traceback of one that died."""
    host: str = ""
    machine: str = ""
    """Changes with every boot: two processes with the same one see each other's locks."""
    pid: int = 0
    job: str | None = None
    """Slurm's number of it."""
    started: str = ""
    beat: int = 0


def read_state(file: Path) -> State | None:
    """The state in a file; None: there is none that can be read."""
    with suppress(OSError, ValueError, TypeError):
        return State(**json.loads(file.read_bytes()))
    return None


def is_live(file: Path, state: State) -> bool:
    """Whether the process of a running shard lives, as far as can be told at once."""
    if state.state != "running":
        return False
    with suppress(OSError):
        if state.machine == machine():
            return is_held(file.with_suffix(".lock"))
    with suppress(OSError):
        return abs(time.time() - file.stat().st_mtime) < LEASE
    return False


def machine() -> str:
    """Identity of this machine since it was booted."""
    with suppress(OSError):
        return BOOT_ID.read_text().strip()
    return platform.node()


def slurm_job() -> str | None:
    """The Slurm job, or task of an array, that this process is."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


class Claim:
    """A shard of this process; its state is refreshed until `end`."""

    def __init__(self, file: Path, state: State) -> None:
        self.file, self.state, self.lost = file, state, False
        self._writing, self._ended = threading.Lock(), threading.Event()

    def write(self) -> None:
        """Put the state in its place, unless another process has taken the shard over meanwhile."""
        with self._writing:
            there = read_state(self.file)
            if there is not None and self.state.beat and _who(there) != _who(self.state):
                self.lost = True
                return
            self.state.beat += 1
            replace_whole(self.file, json.dumps(asdict(self.state), indent=1) + "\n")

    def end(self) -> None:
        """Write the state for the last time."""
        self._ended.set()
        self.write()

    def keep(self) -> None:
        """Refresh the state until the end; a disk that is full for a moment is no reason to stop."""
        while not self._ended.wait(BEAT):
            with suppress(OSError):
                self.write()


@contextmanager
def claimed(file: Path, shard: str) -> Iterator[Claim]:
    """Make a shard this process's own.

    Raises:
        UserError: another process is at it.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "ab") as lock:
        exact = _lock(lock.fileno())
        before = read_state(file)
        if exact is False or (before and not _gone(file, before, exact is True)):
            where = f" by {before.host}, process {before.pid}" if before else ""
            raise UserError(f"shard {shard} is being run{where}; when that has ended, start it again")
        state = State(shard, host=platform.node(), machine=machine(), pid=os.getpid(), job=slurm_job())
        state.started = datetime.now(UTC).isoformat(timespec="seconds")
        claim = Claim(file, state)
        claim.write()
        threading.Thread(target=claim.keep, daemon=True).start()
        try:
            yield claim
        finally:
            with suppress(OSError):
                claim.end()


def _gone(file: Path, state: State, locked: bool) -> bool:
    """Whether a state's process has ended. Of one on another machine it takes a lease's time to know."""
    if state.state != "running" or (locked and state.machine == machine()):
        return True
    until = time.monotonic() + LEASE
    while time.monotonic() < until:
        time.sleep(BEAT / 4)
        now = read_state(file)
        if now is not None and now != state:
            return now.state != "running"
    return True


def _lock(fd: int) -> bool | None:
    """Take a file's lock; False: another has it; None: there are no locks on this file system."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def _who(state: State) -> tuple[str, int, str]:
    return state.machine, state.pid, state.started
