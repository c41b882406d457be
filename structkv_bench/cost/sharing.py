"""What the cells of a group share: the passes through the layers that one makes for several."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from structkv_bench.bounds import size
from structkv_bench.cost.work import batch_peak_bytes, cost, group_flops, group_need, passes_per_layer
from structkv_bench.shape import ModelShape

if TYPE_CHECKING:
    from structkv_bench.engine.method import Method
    from structkv_bench.jobs import Job

Work = tuple[float, float]
"""FLOPs of a prefill for all cells together, and of one for each of them."""


def work(shape: ModelShape, methods: Sequence[Method], tokens: int) -> Work:
    """The FLOPs of a prompt of `tokens`."""
    alone = sum(cost(shape, method, tokens).prefill_flops for method in methods)
    return group_flops(shape, methods, tokens, 0), alone


def group_line(shape: ModelShape, methods: Sequence[Method], tokens: int, new: int = 1) -> str:
    """What a group's cells share on one prompt with `new` decoded tokens, and the memory that it takes."""
    passes = by_layer(passes_per_layer(shape, methods, tokens), "pass", "passes")
    shared = f"{len(methods)} cells share a prefill, {passes}: {_told(*work(shape, methods, tokens))}"
    peak = batch_peak_bytes(shape, [group_need(shape, methods, tokens)], new)
    return f"{shared}; {size(peak)} of memory, a sample at a time"


def run_line(jobs: Sequence[Job]) -> str | None:
    """What all that is left of a run shares; None: no job has several cells."""
    works: list[Work] = []
    for _, same in groupby(jobs, key=lambda job: (id(job.group), len(job.cells))):
        its = list(same)  # at one length: the longest stands for all
        longest = max(its, key=lambda job: job.prompt.tokens)
        methods = [cell.method for cell in longest.cells]
        together, alone = work(longest.model.shape, methods, longest.prompt.context_tokens)
        works.append((len(its) * together, len(its) * alone))
    rows = sum(len(job.cells) for job in jobs)
    if rows == len(jobs):
        return None
    together, alone = (sum(some) for some in zip(*works, strict=True))
    return f"{rows} rows to make from {len(jobs)} prefills: {_told(together, alone)}"


def by_layer(numbers: Sequence[int], one: str = "", many: str = "") -> str:
    """Runs of equal layers: '4096 in layers 0-13, 819 in layers 14-29', with a noun after each number."""
    parts = []
    for number, run in groupby(enumerate(numbers), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in run]
        where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        noun = one if number == 1 else many
        parts.append(f"{number} {noun} in {where}" if noun else f"{number} in {where}")
    return ", ".join(parts)


def _told(together: float, alone: float) -> str:
    return (
        f"{_tera(together)} TFLOP instead of {_tera(alone)} one by one "
        f"({100 * together / alone:.1f} %, {alone / together:.1f} times less)"
    )


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g}" if flops < 1e15 else f"{flops / 1e12:.0f}"
