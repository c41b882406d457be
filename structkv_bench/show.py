"""What a run would do, before anything runs: settings, one real prompt, budgets and estimated work."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from structkv_bench import models
from structkv_bench.config import Setup
from structkv_bench.cost import speed
from structkv_bench.cost.estimate import cell_lines, table
from structkv_bench.cost.published import published
from structkv_bench.cost.sharing import by_layer, group_line
from structkv_bench.cost.speed import HERE, Device
from structkv_bench.errors import UserError
from structkv_bench.model_spec import ModelSpec
from structkv_bench.models import Inspected
from structkv_bench.plan import Cell, Group, plan
from structkv_bench.samples import prompts_of
from structkv_bench.shape import ModelShape
from structkv_bench.task import Sample

HEAD, TAIL = 500, 400
"""Characters of the prompt that are shown."""


def show(setups: Sequence[Setup], number: int = 0, answer: str | None = None, device: str = HERE) -> str:
    """A page for each group of cells: one sample, and every method's budget and work.

    Where the model or the texts are not to be had there is no sample: a page then has the estimates alone,
    for a prompt of the length asked for, and says so.

    Args:
        setups: what would run.
        number: which sample, from 0.
        answer: text to score as if the model had said it.
        device: whose speed the times are for (speed.device).

    Raises:
        UserError: as for a run, but for what is not to be had; or there is no such sample.
    """
    groups = plan(setups)
    known = {spec: _known(spec) for spec in dict.fromkeys(group.model for group in groups)}
    missing = {id(task): task.unavailable() for task in (group.task for group in groups)}
    pages, unseen = [], dict[str, list[Group]]()
    for group in groups:
        shape, model = known[group.model]
        if group.length > shape.max_positions:
            raise UserError(models.too_long(group.model, shape, group.length))
        why = model if isinstance(model, str) else missing[id(group.task)].get(group.subtask)
        if why is None and isinstance(model, Inspected):
            pages.append(_group_page(group, model, number, answer, device))
        else:
            unseen.setdefault(str(why), []).append(group)
    for why, groups in unseen.items():
        for alike in _by_cells(groups):
            spec = alike[0].model
            pages.append(table(alike, known[spec][0], speed.device(device, spec.dtype), why))
    return "\n\n".join(pages)


def _by_cells(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups that have one estimate: the same methods on the same model at the same length."""
    alike: dict[str, list[Group]] = {}
    for group in groups:
        methods = [cell.config["method"] for cell in group.cells]
        alike.setdefault(repr((group.model, group.length, methods)), []).append(group)
    return list(alike.values())


def _known(spec: ModelSpec) -> tuple[ModelShape, Inspected | str]:
    """A model's shape, and the model; or, where only the shape is known, why."""
    try:
        model = models.inspect(spec)
    except UserError as error:
        shape = published(spec)
        if shape is None:
            raise
        return shape, f"sizes as published for {spec.path}; no prompt is shown: {error}"
    return model.shape, model


def _group_page(group: Group, model: Inspected, number: int, answer: str | None, device: str) -> str:
    prompts = prompts_of(group, model.prompts)
    if not 0 <= number < len(prompts):
        raise UserError(f"sample {number}: {group.subtask} has samples 0 to {len(prompts) - 1} here")
    sample = prompts[number].sample
    context, question = model.prompts.parts(sample)
    text = model.prompts.tokenizer.decode(context + question)
    pages = [_prompt_page(group.cells[0], sample, text, len(context) + len(question))]
    if answer is not None:
        pages.append(_score_page(group.cells[0], sample, answer))
    fast = speed.device(device, group.model.dtype)
    if len(group.cells) > 1:
        methods = [cell.method for cell in group.cells]
        new = sample.max_new_tokens
        pages.append(f"=== estimated: {group_line(model.shape, methods, len(context), new)}")
    pages += [_cell_page(cell, len(context), model.shape, fast) for cell in group.cells]
    return "\n\n".join(pages)


def _prompt_page(cell: Cell, sample: Sample, text: str, tokens: int) -> str:
    shown = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]}\n[...]\n{text[-TAIL:]}"
    return (
        f"=== {cell.subtask} at {cell.length}, sample {sample.id}: {tokens} prompt tokens, "
        f"{sample.truncated_tokens} cut out, up to {sample.max_new_tokens} generated, "
        f"{cell.task.samples} samples ===\n{shown}\n"
        f"=== references: {', '.join(sample.references)}"
    )


def _score_page(cell: Cell, sample: Sample, answer: str) -> str:
    scores = {"score": cell.task.score(cell.subtask, sample, answer)}
    scores |= cell.task.extra_scores(cell.subtask, sample, answer)
    return f"=== {answer!r}: " + ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


def _cell_page(cell: Cell, tokens: int, shape: ModelShape, device: Device) -> str:
    """Settings of a cell, its budget per layer and its estimated work."""
    cell.method.compressor(tokens, shape.layers)  # refuses here what a run would refuse
    kept = cell.method.layer_entries(tokens, shape.layers)
    processed = cell.method.layer_tokens(tokens, shape.layers)
    lines = [
        f"--- method {cell.method_name}, cell {cell.key}",
        yaml.safe_dump(cell.config, sort_keys=False, allow_unicode=True).rstrip(),
        f"entries kept per stored head, mean:    {by_layer(kept)}",
        f"tokens processed, at most:            {by_layer(processed)}",
        *cell_lines(cell, tokens, shape, device),
    ]
    return "\n".join(lines)
