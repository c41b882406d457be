"""What a run would do, before anything runs: settings, one real prompt, budgets and estimated work."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import yaml

from structkv_bench import models
from structkv_bench.config import Setup
from structkv_bench.errors import UserError
from structkv_bench.jobs import available
from structkv_bench.plan import Cell, plan
from structkv_bench.samples import prompts_of
from structkv_bench.shape import ModelShape
from structkv_bench.task import Sample

HEAD, TAIL = 500, 400
"""Characters of the prompt that are shown."""


def show(setups: Sequence[Setup], number: int = 0, answer: str | None = None) -> str:
    """A page for each group of cells: one sample, and every method's budget and work.

    Args:
        setups: what would run.
        number: which sample, from 0.
        answer: text to score as if the model had said it.

    Raises:
        UserError: as for a run, or there is no such sample.
    """
    pages = []
    for group in available(plan(setups))[0]:
        model = models.inspect(group.model)
        if group.length > model.shape.max_positions:
            raise UserError(models.too_long(group.model, model.shape, group.length))
        prompts = prompts_of(group, model.prompts)
        if not 0 <= number < len(prompts):
            raise UserError(f"sample {number}: {group.subtask} has samples 0 to {len(prompts) - 1} here")
        sample = prompts[number].sample
        context, question = model.prompts.parts(sample)
        text = model.prompts.tokenizer.decode(context + question)
        pages.append(_prompt_page(group.cells[0], sample, text, len(context) + len(question)))
        if answer is not None:
            pages.append(_score_page(group.cells[0], sample, answer))
        pages += [_cell_page(cell, len(context), model.shape) for cell in group.cells]
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


def _cell_page(cell: Cell, tokens: int, shape: ModelShape) -> str:
    """Settings of a cell, its budget per layer and its estimated work."""
    cell.method.compressor(tokens, shape.layers)  # refuses here what a run would refuse
    processed = cell.method.layer_tokens(tokens, shape.layers)
    kept = cell.method.layer_entries(tokens, shape.layers)
    everything = [tokens] * shape.layers
    flops, full_flops = shape.prefill_flops(processed), shape.prefill_flops(everything)
    copies = cell.method.stored_heads(shape.heads, shape.kv_heads) / shape.kv_heads
    held, full_held = shape.kv_bytes(kept) * copies, shape.kv_bytes(everything)
    lines = [
        f"--- method {cell.method_name}, cell {cell.key}",
        yaml.safe_dump(cell.config, sort_keys=False, allow_unicode=True).rstrip(),
        f"entries kept per stored head, at most: {_by_layer(kept)}",
        f"tokens processed, at most:             {_by_layer(processed)}",
        f"estimated prefill: {flops / 1e12:.2f} TFLOP, {100 * flops / full_flops:.1f} % of full",
        f"estimated decode:  {shape.decode_flops(kept) / 1e9:.2f} GFLOP a token",
        f"estimated cache:   {held / 2**20:.1f} MiB, {100 * held / full_held:.1f} % of full",
    ]
    return "\n".join(lines)


def _by_layer(numbers: list[int]) -> str:
    """Runs of equal layers: '4096 in layers 0-13, 819 in layers 14-29'."""
    parts = []
    for number, run in groupby(enumerate(numbers), key=lambda pair: pair[1]):
        layers = [layer for layer, _ in run]
        where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        parts.append(f"{number} in {where}")
    return ", ".join(parts)
