"""Groups of cells -> result rows on disk, model by model and batch by batch."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structkv_bench import models
from structkv_bench.batches import Order, out_of_memory, run_batch
from structkv_bench.bounds import Bounds, size
from structkv_bench.config import Setup
from structkv_bench.cost.sharing import run_line
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.fitting import Part, batches, check_weights, peak_bytes
from structkv_bench.jobs import Job, available, note_in_manifests, prepare
from structkv_bench.plan import Cell, plan
from structkv_bench.provenance import of_model, provenance
from structkv_bench.store import Row, Store


def run(setups: Sequence[Setup]) -> int:
    """Run all that the store does not hold yet; the number of rows that failed.

    Everything that can be refused is refused before the first row is written.

    Raises:
        UserError: a prompt that doesn't fit, a budget that can't work, no model, no room for results.
    """
    store = Store(setups[0].results_dir)
    store.check_writable()
    groups, left_out = available(plan(setups))
    work = prepare(groups, store)
    jobs, failed = work.jobs, 0
    check_weights(jobs, setups[0].bounds)
    if shared := run_line(jobs):
        print(shared, file=sys.stderr)
    with (
        store.locked({cell.key: cell for job in jobs for cell in job.cells}.values()),
        progress_bar() as progress,
    ):
        note_in_manifests(setups, work, left_out, store)
        bar = progress.add_task("samples", total=sum(job.prompt.tokens for job in jobs))
        for job, bad in execute(jobs, store, setups[0].bounds):
            failed += bad
            progress.advance(bar, job.prompt.tokens)
    return failed


def execute(
    jobs: Sequence[Job],
    store: Store,
    bounds: Bounds,
    about: Mapping[str, Any] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Job, int]]:
    """Run jobs in their order; each, with how many of its rows failed, comes once its rows are on disk.

    Args:
        jobs: what to do, those of one model side by side.
        store: where the rows go.
        bounds: how many samples decode together at most, and in how much memory.
        about: what a session's provenance is to say beside what can be measured here.
        is_stopped: asked before each batch whether to leave the rest.

    Raises:
        UserError: a model can't be loaded, a method not be calibrated, or a row not be written.
    """
    for _, its in groupby(jobs, key=lambda job: job.group.model):
        if not is_stopped():
            yield from _on_model(list(its), store, bounds, about or {}, is_stopped)


def _on_model(
    jobs: Sequence[Job],
    store: Store,
    bounds: Bounds,
    about: Mapping[str, Any],
    is_stopped: Callable[[], bool],
) -> Iterator[tuple[Job, int]]:
    """Jobs of one model, which is in memory only meanwhile."""
    spec, inspected = jobs[0].group.model, jobs[0].model
    allowed = bounds.allowed(spec.device_map)
    model = models.load(spec, inspected)
    origin = provenance(str(model.device)) | of_model(model)
    origin |= {"model": inspected.identity, "decode_batch": bounds.decode_batch, **about}
    methods: dict[str, Method] = {}
    failed: Counter[int] = Counter()
    for parts in batches(jobs, bounds.decode_batch, allowed):
        if is_stopped():
            return
        for cell in (cell for part in parts for cell in part.cells):
            if cell.key not in methods:
                methods[cell.key] = _calibrated(cell, model)
                store.cell(cell).begin(origin | {"sources": cell.task.sources(cell.subtask)})
        for part, rows in zip(parts, _rows(model, parts, methods, allowed), strict=True):
            for cell, row in zip(part.cells, rows, strict=True):
                if cell.key not in part.job.there:
                    store.cell(cell).append(row)
                    failed[id(part.job)] += row["status"] != "ok"
        yield from ((part.job, failed[id(part.job)]) for part in parts if part.ends_job)


def _rows(
    model: Model, parts: Sequence[Part], methods: Mapping[str, Method], allowed: int
) -> Iterator[list[Row]]:
    """Rows of each part's cells; where memory did not suffice, with the sizes."""
    orders = [
        Order(part.job.prompt.sample, part.cells, [methods[cell.key] for cell in part.cells])
        for part in parts
    ]
    for part, rows in zip(parts, run_batch(model, orders), strict=True):
        for cell, row in zip(part.cells, rows, strict=True):
            if out_of_memory(row["error"]):
                sizes = f"{size(peak_bytes([Part.of(part.job, [cell])]))}, {size(allowed)} were allowed"
                row["error"] += f"out of memory: {part.job.prompt.tokens} prompt tokens take about {sizes}"
        yield rows


def _calibrated(cell: Cell, model: Model) -> Method:
    try:
        return cell.method.calibrated(model)
    except UserError as error:
        raise UserError(f"{cell.method_name}: {error}") from error
    except Exception as error:
        raise UserError(f"{cell.method_name}: can't be calibrated: {kind_and_line(error)}") from error


def progress_bar() -> Progress:
    """A line on stderr that says how far a run is."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
