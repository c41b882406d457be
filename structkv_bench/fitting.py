"""What goes together within a memory: cells on one sample, and samples in one decode batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from structkv_bench.bounds import Bounds, size
from structkv_bench.cost.work import Need, batch_peak_bytes, group_need
from structkv_bench.errors import UserError
from structkv_bench.jobs import Job
from structkv_bench.plan import Cell


@dataclass(frozen=True)
class Part:
    """Cells of a job that are prefilled together: all of them, unless that takes too much memory."""

    job: Job
    cells: list[Cell]
    need: Need
    ends_job: bool = True

    @classmethod
    def of(cls, job: Job, cells: list[Cell]) -> Part:
        """These cells of a job, with the memory that they are estimated to need."""
        prompt, methods = job.prompt, [cell.method for cell in cells]
        need = group_need(job.model.shape, methods, prompt.context_tokens, prompt.question_tokens)
        return cls(job, cells, need)


def check_weights(jobs: Sequence[Job], bounds: Bounds) -> None:
    """Refuse a bound that no model fits into.

    Raises:
        UserError: the weights of one of the models alone take more.
    """
    for spec, model in {job.group.model: job.model for job in jobs}.items():
        weights = model.shape.weight_bytes
        if bounds.max_bytes is not None and weights > bounds.max_bytes:
            raise UserError(
                f"group.max_bytes: {size(bounds.max_bytes)} are given, and the weights of {spec.name} alone "
                f"take {size(weights)}"
            )


def peak_bytes(parts: Sequence[Part]) -> int:
    """Estimated memory of parts that decode together, the weights included."""
    new = max(part.job.prompt.sample.max_new_tokens for part in parts)
    return batch_peak_bytes(parts[0].job.model.shape, [part.need for part in parts], new)


def batches(jobs: Sequence[Job], most: int, allowed: int) -> Iterator[list[Part]]:
    """Jobs of one model in their order: up to `most` together, and no more than `allowed` bytes hold.

    A job that is too large by itself comes in several parts, each alone. What is split, and what may not fit
    even so, is said once per group.
    """
    told: set[int] = set()
    batch: list[Part] = []
    for job in jobs:
        parts = _split(job, allowed)
        is_large = peak_bytes(parts[:1]) > allowed or len(parts) > 1
        if is_large and id(job.group) not in told:
            told.add(id(job.group))
            print(_say(parts, allowed), file=sys.stderr)
        if batch and (is_large or len(batch) == most or peak_bytes([*batch, *parts]) > allowed):
            yield batch
            batch = []
        if is_large:
            yield from ([part] for part in parts)
        else:
            batch += parts
    if batch:
        yield batch


def _split(job: Job, allowed: int) -> list[Part]:
    """A job's cells in their order, as many together as fit; one that does not fit is alone."""
    whole = Part.of(job, job.cells)
    if peak_bytes([whole]) <= allowed:
        return [whole]
    parts: list[Part] = []
    for cell in job.cells:
        more = Part.of(job, [*parts[-1].cells, cell]) if parts else None
        if more and peak_bytes([more]) <= allowed:
            parts[-1] = more
        else:
            parts.append(Part.of(job, [cell]))
    return [*(replace(part, ends_job=False) for part in parts[:-1]), parts[-1]]


def _say(parts: Sequence[Part], allowed: int) -> str:
    """What becomes of a job that does not fit as a whole."""
    job = parts[0].job
    whole = peak_bytes([Part.of(job, job.cells)])
    line = (
        f"{job.group.model.name} on {job.group.subtask} at {job.group.length}: {len(job.cells)} cells take "
        f"{size(whole)}, {size(allowed)} are allowed (group.max_bytes): in {len(parts)} groups"
    )
    over = [part.cells[0].method_name for part in parts if peak_bytes([part]) > allowed]
    return f"{line}; tried although too large alone: {', '.join(dict.fromkeys(over))}" if over else line
