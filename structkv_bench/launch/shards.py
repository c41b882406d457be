"""The work of a run, cut into shards of about equal cost; a file says what each of them is to do.

The cut covers all that a command asks for, done or not: the same command gives the same shards with the same
names, whatever has been run meanwhile, and any of them can be run by itself.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structkv_bench import bounds
from structkv_bench.errors import UserError
from structkv_bench.paths import write_whole

if TYPE_CHECKING:  # status reads plans, and imports no torch
    from structkv_bench.jobs import Job
    from structkv_bench.plan import Group
    from structkv_bench.shape import ModelShape

FOLDER = "shards"


@dataclass(frozen=True)
class Piece:
    """Samples of one group of cells."""

    cells: list[str]
    """Their folders."""
    samples: list[str]
    """Ids."""


@dataclass(frozen=True)
class Plan:
    """What a command was cut into, as its file says it."""

    file: Path
    overrides: list[str]
    """What the command says of the work; not of the launcher."""
    shards: list[list[Piece]]

    @property
    def results_dir(self) -> Path:
        """Where the rows go."""
        return self.file.parent.parent

    @property
    def folder(self) -> Path:
        """Where its shards' states and logs are."""
        return self.file.with_suffix("")

    def name(self, number: int) -> str:
        """What a shard's files are called."""
        return f"{self.file.stem}.{number:04d}"

    def state_file(self, number: int) -> Path:
        """Where a shard's state is."""
        return self.folder / f"{number:04d}.json"


def flops(group: Group, shape: ModelShape, tokens: int, new: int) -> float:
    """Estimated work of one sample for all cells of a group, in FLOP of a prefill."""
    from structkv_bench.cost.work import group_flops  # only now: it imports torch

    return group_flops(shape, [cell.method for cell in group.cells], tokens, new)


def costs(jobs: Sequence[Job]) -> list[float]:
    """Estimated FLOP of each job, done or not; within a group they grow with its tokens."""
    found = []
    for _, same in groupby(jobs, key=lambda job: id(job.group)):
        its = list(same)
        longest = max(its, key=lambda job: job.prompt.tokens)
        new = max(job.prompt.sample.max_new_tokens for job in its)
        whole = flops(longest.group, longest.model.shape, longest.prompt.tokens, new)
        found += [whole * job.prompt.tokens / longest.prompt.tokens for job in its]
    return found


def cut(jobs: Sequence[Job], work: Sequence[float], count: int) -> list[list[Job]]:
    """The jobs in up to `count` shards of about equal cost, in their order; none of them empty."""
    whole, before = sum(work), 0.0
    shards: dict[int, list[Job]] = {}
    for job, cost in zip(jobs, work, strict=True):
        # where the middle of the job lies in the whole work
        shards.setdefault(int((before + cost / 2) / whole * count), []).append(job)
        before += cost
    return list(shards.values())


def shard_count(work: Sequence[float], seconds: float, speed: float) -> int:
    """How many shards of so many seconds a work of FLOP makes, at so many FLOP a second."""
    return min(len(work), max(1, math.ceil(sum(work) / speed / seconds)))


def make_plan(shards: Sequence[Sequence[Job]], overrides: Sequence[str], results_dir: Path) -> Plan:
    """The plan of these shards, on disk. Bounds are not in its name: shards that wait get the latest ones.

    Raises:
        UserError: it can't be written.
    """
    own = [text for text in overrides if text.partition("=")[0].partition(".")[0] != "launcher"]
    pieces = [list(_pieces(jobs)) for jobs in shards]
    content = {"overrides": own, "shards": [[asdict(piece) for piece in shard] for shard in pieces]}
    text = _text(content)
    lasting = [setting for setting in own if setting.partition("=")[0] not in bounds.SETTINGS]
    name = hashlib.sha256(_text(content | {"overrides": lasting}).encode()).hexdigest()[:8]
    file = results_dir.absolute() / FOLDER / f"{name}.json"
    write_whole(file, text)
    return Plan(file, own, pieces)


def _text(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def read_plan(file: Path) -> Plan:
    """The plan in a file.

    Raises:
        UserError: there is none, or it is damaged.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
        shards = [[Piece(**piece) for piece in shard] for shard in content["shards"]]
        return Plan(file.absolute(), content["overrides"], shards)
    except OSError as error:
        raise UserError(f"{file}: no plan of shards there ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: damaged; the run command that made it writes it anew") from error


def _pieces(jobs: Sequence[Job]) -> Iterator[Piece]:
    for _, same in groupby(jobs, key=lambda job: id(job.group)):
        its = list(same)
        yield Piece([cell.folder for cell in its[0].group.cells], [job.prompt.sample.id for job in its])
