"""Groups of cells -> result rows: one prefill and one decode a sample, a failure is a row."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structkv_bench import models
from structkv_bench.config import Setup
from structkv_bench.engine.decode import Generated, decode
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled, prefill
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.jobs import Job, available, note_in_manifests, prepare
from structkv_bench.model_spec import ModelSpec
from structkv_bench.plan import Cell, plan
from structkv_bench.provenance import provenance
from structkv_bench.samples import prompt_hash
from structkv_bench.store import Row, Store
from structkv_bench.task import Sample


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
    with (
        store.locked({cell.key: cell for job in jobs for cell in job.cells}.values()),
        progress_bar() as progress,
    ):
        note_in_manifests(setups, work, left_out, store)
        bar = progress.add_task("samples", total=sum(job.prompt.tokens for job in jobs))
        for job, bad in execute(jobs, store):
            failed += bad
            progress.advance(bar, job.prompt.tokens)
    return failed


def execute(
    jobs: Sequence[Job], store: Store, about: Mapping[str, Any] | None = None
) -> Iterator[tuple[Job, int]]:
    """Run jobs one by one; each, with how many of its rows failed, comes once its rows are on disk.

    Args:
        jobs: what to do, those of one model side by side.
        store: where the rows go.
        about: what a session's provenance is to say beside what can be measured here.

    Raises:
        UserError: a model can't be loaded, a method not be calibrated, or a row not be written.
    """
    for model, methods, job in _with_models(jobs, store, about or {}):
        rows = run_sample(model, job.prompt.sample, job.cells, methods)
        for cell, row in zip(job.cells, rows, strict=True):
            store.cell(cell).append(row)
        yield job, sum(row["status"] != "ok" for row in rows)


def run_sample(model: Model, sample: Sample, cells: Sequence[Cell], methods: Sequence[Method]) -> list[Row]:
    """One row per cell; what a method raises fails its own row alone.

    Where a fault can't be laid to one method (out of memory, say, or in a decode batch), each runs again
    by itself.
    """
    try:
        rows = _run_group(model, sample, cells, methods)
        json.dumps(rows, allow_nan=False)  # what a plug-in reports must be plain numbers and text
        return rows
    except Exception:
        if len(cells) == 1:
            ids = [id for part in model.prompts.parts(sample) for id in part]
            return [_row(model, sample, ids, cells[0], {}, None, traceback.format_exc())]
    return [
        row
        for cell, method in zip(cells, methods, strict=True)
        for row in run_sample(model, sample, [cell], [method])
    ]


def _run_group(model: Model, sample: Sample, cells: Sequence[Cell], methods: Sequence[Method]) -> list[Row]:
    """One prefill and one decode for all; a method that fails while choosing entries has left the group."""
    context, question = model.prompts.parts(sample)
    compressors = [method.compressor(len(context), model.shape.layers) for method in methods]
    prefilled = prefill(model, context, compressors)
    facts = [_facts(model, result) for result in prefilled]
    errors = [result.error for result in prefilled]
    going = [place for place, error in enumerate(errors) if error is None]
    newline = model.prompts.newline_ids() if sample.stop_at_newline else frozenset()
    rows = [prefilled[place] for place in going]
    decoded = decode(model, rows, sample.max_new_tokens, newline, sample.min_new_tokens, question)
    answers = dict(zip(going, decoded, strict=True))
    return [
        _row(model, sample, context + question, cell, facts[place], answers.get(place), errors[place])
        for place, cell in enumerate(cells)
    ]


def _facts(model: Model, result: Prefilled) -> dict[str, Any]:
    """What a prefill tells of itself, taken before decoding takes its cache over."""
    if result.error is not None:
        return {"prefill_s": result.seconds}
    tokens = result.prompt_tokens
    return {
        "kept_entries": result.cache.entries(),
        "kv_bytes": result.cache.bytes(),
        "kv_bytes_full": model.shape.kv_bytes([tokens] * model.shape.layers),
        "prefill_pct": round(100 * result.prefill_share, 4),
        "prefill_s": round(result.seconds, 4),
        "prefill_parts_s": {part: round(seconds, 5) for part, seconds in result.parts.items()},
        "fidelity": result.fidelity,
        **result.compressor.facts(),
    }


def _row(
    model: Model,
    sample: Sample,
    ids: list[int],
    cell: Cell,
    facts: dict[str, Any],
    answer: Generated | None,
    error: str | None,
) -> dict[str, Any]:
    """All that is needed to judge one prediction."""
    row: dict[str, Any] = {
        "sample": sample.id,
        "status": "ok" if error is None else "failed",
        "prompt_tokens": len(ids),
        "truncated_tokens": sample.truncated_tokens,
        "prompt_sha256": prompt_hash(ids),
        "references": list(sample.references),
        "fields": sample.fields,
        "pivot": None,
        **facts,
        "error": error,
    }
    if answer is not None:
        prediction = model.prompts.decode(answer.ids)
        row |= {
            "generated_ids": answer.ids,
            "prediction": prediction,
            "score": cell.task.score(cell.subtask, sample, prediction),
            "extra_scores": cell.task.extra_scores(cell.subtask, sample, prediction),
            "tie_margin": round(answer.tie_margin, 6),
            "decode_s": round(answer.seconds, 4),
        }
    return row


def _with_models(
    jobs: Sequence[Job], store: Store, about: Mapping[str, Any]
) -> Iterator[tuple[Model, list[Method], Job]]:
    """Jobs with their model, loaded once while it is needed, and the methods calibrated to it."""
    spec: ModelSpec | None = None
    methods: dict[str, Method] = {}
    origin: dict[str, Any] = {}
    for job in jobs:
        if spec != job.group.model:
            model, spec, methods = models.load(job.group.model), job.group.model, {}
            origin = provenance(str(model.device)) | {"model": job.model.identity, **about}
        for cell in job.cells:
            if cell.key not in methods:
                methods[cell.key] = _calibrated(cell, model)
                store.cell(cell).begin(origin | {"sources": cell.task.sources(cell.subtask)})
        yield model, [methods[cell.key] for cell in job.cells], job


def _calibrated(cell: Cell, model: Model) -> Method:
    try:
        return cell.method.calibrated(model)
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
