"""Groups of cells -> result rows: one prefill and one decode a sample, a failure is a row."""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from structkv_bench import models
from structkv_bench.config import Setup
from structkv_bench.engine.decode import Generated, decode
from structkv_bench.engine.method import Method
from structkv_bench.engine.prefill import Prefilled, prefill
from structkv_bench.errors import UserError
from structkv_bench.model_spec import ModelSpec
from structkv_bench.models import Model
from structkv_bench.plan import Cell, Group, plan
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.provenance import provenance
from structkv_bench.shape import ModelShape
from structkv_bench.store import CellStore, Store
from structkv_bench.task import Sample


@dataclass
class Job:
    """One sample, and the cells of its group that have no row of it yet."""

    group: Group
    sample: Sample
    prompt_tokens: int
    cells: list[Cell]


def run(setups: Sequence[Setup]) -> int:
    """Run all that the store does not hold yet; the number of rows that failed, now or before.

    Everything that can be refused is refused before the first row is written.

    Raises:
        UserError: a prompt that doesn't fit, a budget that can't work, no model, no room for results.
    """
    store = Store(setups[0].results_dir)
    store.check_writable()
    jobs = list(_jobs(plan(setups), store))
    failed = 0
    with _progress() as progress:
        bar = progress.add_task("samples", total=sum(job.prompt_tokens for job in jobs))
        for model, methods, job in _with_models(jobs, store):
            rows = run_sample(model, job.sample, job.cells, methods)
            for cell, row in zip(job.cells, rows, strict=True):
                store.cell(cell).append(row)
                failed += row["status"] != "ok"
            progress.advance(bar, job.prompt_tokens)
    return failed


def run_sample(
    model: Model, sample: Sample, cells: Sequence[Cell], methods: Sequence[Method]
) -> list[dict[str, Any]]:
    """One row per cell; what a method raises fails its own row alone."""
    context, question = model.prompts.parts(sample)
    ids = context + question
    try:
        compressors = [method.compressor(len(context), model.shape.layers) for method in methods]
        prefilled = prefill(model, context, compressors)
        facts = [_facts(model, result) for result in prefilled]
        errors = [result.error for result in prefilled]
        going = [place for place, error in enumerate(errors) if error is None]
        newline = model.prompts.newline_ids() if sample.stop_at_newline else frozenset()
        rows = [prefilled[place] for place in going]
        decoded = decode(model, rows, sample.max_new_tokens, newline, question)
        answers = dict(zip(going, decoded, strict=True))
        return [
            _row(model, sample, ids, cell, facts[place], answers.get(place), errors[place])
            for place, cell in enumerate(cells)
        ]
    except Exception:  # out of memory, say: every row of this sample fails, the next samples go on
        error = traceback.format_exc()
        return [_row(model, sample, ids, cell, {}, None, error) for cell in cells]


def _facts(model: Model, result: Prefilled) -> dict[str, Any]:
    """What a prefill tells of itself, taken before decoding takes its cache over."""
    if result.error is not None:
        return {"prefill_s": result.seconds}
    tokens, layers = result.cache.seen, result.cache.layers
    return {
        "kept_entries": [layer.positions.numel() for layer in layers],
        "kv_bytes": result.cache.bytes(),
        "kv_bytes_full": model.shape.kv_bytes([tokens] * model.shape.layers),
        "prefill_pct": round(100 * result.prefill_share, 4),
        "prefill_s": round(result.seconds, 4),
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


def prompt_hash(ids: list[int]) -> str:
    """Hash of a prompt's token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def _jobs(groups: Sequence[Group], store: Store) -> Iterator[Job]:
    """Every sample with work left, each checked against the model and the methods."""
    inspected: dict[ModelSpec, tuple[TokenizerPrompts, ModelShape]] = {}
    for group in groups:
        if group.model not in inspected:
            inspected[group.model] = models.inspect(group.model)
        prompts, shape = inspected[group.model]
        if group.length > shape.max_positions:
            raise UserError(models.too_long(group.model, shape, group.length))
        done = {cell.key: _done(store.cell(cell)) for cell in group.cells}
        for sample in group.task.build(group.subtask, group.length, prompts):
            context, question = prompts.parts(sample)
            ids = context + question
            _check(group, sample, len(context), len(question), shape)
            left = [cell for cell in group.cells if not _has(done[cell.key], sample, ids, cell)]
            if left:
                yield Job(group, sample, len(ids), left)


def _done(cell: CellStore) -> dict[str, str]:
    """Prompt hashes of the samples that need no other run: failed ones are tried again."""
    return {id: row["prompt_sha256"] for id, row in cell.rows().items() if row["status"] == "ok"}


def _has(done: dict[str, str], sample: Sample, ids: list[int], cell: Cell) -> bool:
    if sample.id not in done:
        return False
    if done[sample.id] != prompt_hash(ids):
        raise UserError(
            f"{cell.folder}: sample {sample.id} was run with another prompt (other essays or tokenizer?); "
            "give another results_dir or move that folder away"
        )
    return True


def _check(group: Group, sample: Sample, context: int, question: int, shape: ModelShape) -> None:
    """Refuse a sample that the model or a method can't take.

    Raises:
        UserError: the prompt and its answer don't fit, or a budget is too small for the prompt.
    """
    where = f"{group.subtask} at {group.length}, sample {sample.id}"
    needed = context + question + sample.max_new_tokens
    if needed > shape.max_positions:
        raise UserError(
            f"{where}: prompt and answer room take {needed} tokens, "
            f"model {group.model.name} has {shape.max_positions} positions"
        )
    for cell in group.cells:
        try:
            cell.method.compressor(context, shape.layers)
        except UserError as error:
            raise UserError(f"{cell.method_name} on {where}: {error}") from error


def _with_models(jobs: Sequence[Job], store: Store) -> Iterator[tuple[Model, list[Method], Job]]:
    """Jobs with their model, loaded once while it is needed, and the methods calibrated to it."""
    spec: ModelSpec | None = None
    methods: dict[str, Method] = {}
    origin: dict[str, Any] = {}
    for job in jobs:
        if spec != job.group.model:
            model, spec, methods = models.load(job.group.model), job.group.model, {}
            origin = provenance(str(model.device)) | {"model_fingerprint": model.fingerprint}
        for cell in job.cells:
            if cell.key not in methods:
                methods[cell.key] = cell.method.calibrated(model)
                store.cell(cell).begin(origin)
        yield model, [methods[cell.key] for cell in job.cells], job


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
