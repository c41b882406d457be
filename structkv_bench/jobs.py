"""What is left to do, and whether it can be done at all: checked before anything runs or is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from structkv_bench import models
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.model_spec import ModelSpec
from structkv_bench.models import Inspected
from structkv_bench.plan import Cell, Group
from structkv_bench.samples import Prompt, prompts_of
from structkv_bench.store import Store


@dataclass
class Job:
    """One sample, and the cells of its group that have no row of it yet."""

    group: Group
    model: Inspected
    prompt: Prompt
    cells: list[Cell]


def available(groups: Sequence[Group]) -> list[Group]:
    """The groups whose texts are here; stderr is told why each other subtask is left out.

    Raises:
        UserError: something is missing and its task says `missing: error`, or nothing is left.
    """
    reasons: dict[str, str] = {}
    for task in {id(group.task): group.task for group in groups}.values():
        missing = task.unavailable()
        if missing and task.missing == "error":
            raise UserError("; ".join(f"{name}: {why}" for name, why in missing.items()))
        reasons |= missing
    left = [group for group in groups if group.subtask not in reasons]
    if not left:
        raise UserError("; ".join(dict.fromkeys(reasons.values())))
    for subtask, reason in reasons.items():
        print(f"left out: {subtask}: {reason}", file=sys.stderr)
    return left


def prepare(groups: Sequence[Group], store: Store) -> list[Job]:
    """Every sample with work left, each checked against the model, the methods and the rows there are.

    Raises:
        UserError: a prompt that doesn't fit, a budget that can't work, no model, or rows of another one.
    """
    inspected: dict[ModelSpec, Inspected] = {}
    jobs: list[Job] = []
    for group in groups:
        if group.model not in inspected:
            inspected[group.model] = models.inspect(group.model)
        jobs += _of_group(group, inspected[group.model], store)
    return jobs


def _of_group(group: Group, model: Inspected, store: Store) -> Iterator[Job]:
    if group.length > model.shape.max_positions:
        raise UserError(models.too_long(group.model, model.shape, group.length))
    done: dict[str, dict[str, str]] = {}
    for cell in group.cells:
        store.cell(cell).check(model.identity)
        # failed samples are tried again
        rows = store.cell(cell).rows().items()
        done[cell.key] = {id: row["prompt_sha256"] for id, row in rows if row["status"] == "ok"}
    for prompt in prompts_of(group, model.prompts):
        _check(group, prompt, model)
        left = [cell for cell in group.cells if not _has(done[cell.key], prompt, cell)]
        if left:
            yield Job(group, model, prompt, left)


def _has(done: dict[str, str], prompt: Prompt, cell: Cell) -> bool:
    if prompt.sample.id not in done:
        return False
    if done[prompt.sample.id] != prompt.digest:
        raise UserError(
            f"{cell.folder}: sample {prompt.sample.id} was run with another prompt (other texts?); "
            "give another results_dir or move that folder away"
        )
    return True


def _check(group: Group, prompt: Prompt, model: Inspected) -> None:
    """Refuse a sample that the model or a method can't take."""
    where = f"{group.subtask} at {group.length}, sample {prompt.sample.id}"
    needed = prompt.tokens + prompt.sample.max_new_tokens
    if needed > model.shape.max_positions:
        raise UserError(
            f"{where}: prompt and answer room take {needed} tokens, "
            f"model {group.model.name} has {model.shape.max_positions} positions"
        )
    for cell in group.cells:
        try:
            cell.method.compressor(prompt.context_tokens, model.shape.layers)
        except UserError as error:
            raise UserError(f"{cell.method_name} on {where}: {error}") from error
        except Exception as error:  # a plug-in's own fault
            raise UserError(f"{cell.method_name} on {where}: {kind_and_line(error)}") from error
