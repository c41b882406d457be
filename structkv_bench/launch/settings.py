"""Where a run's work is done. A launcher changes no prediction, so it is no part of a cell."""

from __future__ import annotations

from dataclasses import dataclass, field

from structkv_bench.errors import UserError


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}={value}: give at least {least}")


@dataclass(frozen=True)
class Launcher:
    """Settings of one way to run."""


@dataclass(frozen=True)
class LocalLauncher(Launcher):
    """On this machine."""

    processes: int = 1
    """Each takes a share of the samples, and a GPU of its own where there are some."""

    def __post_init__(self) -> None:
        """Check the number."""
        _at_least("processes", self.processes, 1)


HERE = LocalLauncher()
"""In this very process."""


@dataclass(frozen=True)
class SlurmLauncher(Launcher):
    """A Slurm array, a shard of the work in each task."""

    partition: str | None = None
    account: str | None = None
    max_parallel: int = 32
    """Tasks at the same time."""
    minutes: float = 60
    """Estimated work of a shard."""
    shards: int | None = None
    """How many, instead of by minutes."""
    time_limit: int = 120
    """Minutes, as sbatch's --time."""
    notice: int = 120
    """Seconds before the time limit when a task is told to stop."""
    gpus: int = 1
    cpus: int = 4
    mem: str | None = None
    """As sbatch takes it."""
    tflops: float | None = None
    """What a task computes, for the estimate, in 1e12 FLOP a second; None: by gpus and cpus."""
    sbatch: list[str] = field(default_factory=list)
    """Further arguments of sbatch."""
    submit: bool = True
    """Whether to hand the shards to sbatch, or only to write them."""
    wait: bool = True
    """Whether to follow until all is done."""

    def __post_init__(self) -> None:
        """Check what needs no cluster."""
        for name, least in (("max_parallel", 1), ("time_limit", 1), ("notice", 1), ("gpus", 0), ("cpus", 1)):
            _at_least(name, getattr(self, name), least)
        if self.shards is not None:
            _at_least("shards", self.shards, 1)
        for name in ("minutes", "tflops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name}={value}: give a number above 0")
        if self.notice >= 60 * self.time_limit:
            raise UserError(f"notice={self.notice}: give fewer seconds than time_limit={self.time_limit} has")
        for argument in self.sbatch:
            if not argument.startswith("--"):
                raise UserError(f"sbatch={argument}: give arguments such as --qos=high")

    @property
    def flops(self) -> float:
        """FLOP a second that a task is taken to do."""
        if self.tflops is not None:
            return 1e12 * self.tflops
        # about a third of an A100's bfloat16 peak; a CPU core as measured with the embedded model
        return 5e13 if self.gpus else 8e10 * self.cpus
