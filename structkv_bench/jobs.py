"""What is left to do, and whether it can be done at all: checked before anything runs or is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from structkv_bench import models
from structkv_bench.config import Setup
from structkv_bench.cost.work import check_sizes, group_need
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.manifest import UNNAMED, Manifest, read_manifest, write_manifest
from structkv_bench.model_spec import ModelSpec
from structkv_bench.models import Inspected
from structkv_bench.plan import Cell, Group, cells_of
from structkv_bench.samples import Prompt, prompts_of
from structkv_bench.store import Store


@dataclass
class Job:
    """One sample, and the cells of its group that run on it: those that have no row of it yet."""

    group: Group
    model: Inspected
    prompt: Prompt
    cells: list[Cell]
    there: frozenset[str] = frozenset()
    """Keys of cells that have their row and run again for the others' sake; see `_is_torn`."""


@dataclass
class Work:
    """All that a run was asked for."""

    asked: list[Job]
    """Every sample; one that is done has no cells left."""
    samples: dict[str, int]
    """How many, of each cell, by its folder."""

    @property
    def jobs(self) -> list[Job]:
        """What is left to do."""
        return [job for job in self.asked if job.cells]


def available(groups: Sequence[Group]) -> tuple[list[Group], dict[str, str]]:
    """The groups whose texts are here; why each other subtask is left out, which stderr is told too.

    Raises:
        UserError: something is missing and its task says `missing: error`, or nothing is left.
    """
    reasons: dict[str, str] = {}
    for task in {id(group.task): group.task for group in groups}.values():
        missing = task.unavailable()
        if missing and task.missing == "error":
            raise UserError("; ".join(_told(missing)))
        reasons |= missing
    left = [group for group in groups if group.subtask not in reasons]
    if not left:
        raise UserError("; ".join(dict.fromkeys(reasons.values())))
    for line in _told(reasons):
        print(f"left out: {line}", file=sys.stderr)
    return left, reasons


def _told(reasons: dict[str, str]) -> list[str]:
    """Each reason once, with the subtasks that it holds for."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return [f"{', '.join(its)}: {reason}" for reason, its in names.items()]


def prepare(groups: Sequence[Group], store: Store) -> Work:
    """Every sample, each checked against the model, the methods and the rows there are.

    Raises:
        UserError: a prompt that doesn't fit, a budget that can't work, no model, or rows of another one.
    """
    inspected: dict[ModelSpec, Inspected] = {}
    work = Work([], {})
    for group in groups:
        if group.model not in inspected:
            inspected[group.model] = models.inspect(group.model)
        model = inspected[group.model]
        if group.length > model.shape.max_positions:
            raise UserError(models.too_long(group.model, model.shape, group.length))
        prompts = prompts_of(group, model.prompts)
        work.asked += _of_group(group, model, prompts, store)
        work.samples |= {cell.folder: len(prompts) for cell in group.cells}
    return work


def note_in_manifests(setups: Sequence[Setup], work: Work, left_out: dict[str, str], store: Store) -> None:
    """Tell the results folder what each experiment asked for.

    Raises:
        UserError: a manifest is damaged, or can't be written.
    """
    by_experiment: dict[str, list[Setup]] = {}
    for setup in setups:
        by_experiment.setdefault(setup.experiment or UNNAMED, []).append(setup)
    for experiment, its in by_experiment.items():
        cells = {
            cell.folder: {
                "samples": min(cell.task.samples, work.samples[cell.folder]),
                "names": cell.names,
                "config": cell.config,
            }
            for setup in its
            for cell in cells_of(setup)
            if cell.folder in work.samples
        }
        asked = {subtask for setup in its for subtask in setup.task.subtasks()}
        manifest = read_manifest(store.path, experiment) or Manifest(experiment)
        manifest.add(cells, {name: why for name, why in left_out.items() if name in asked}, asked)
        write_manifest(store.path, manifest)


def _of_group(group: Group, model: Inspected, prompts: Sequence[Prompt], store: Store) -> Iterator[Job]:
    done: dict[str, dict[str, str]] = {}
    for cell in group.cells:
        store.cell(cell).check(model.identity)
        # failed samples are tried again
        rows = store.cell(cell).rows().items()
        done[cell.key] = {id: row["prompt_sha256"] for id, row in rows if row["status"] == "ok"}
    lefts = []
    for prompt in prompts:
        _check(group, prompt, model, is_first=prompt is prompts[0])
        lefts.append([cell for cell in group.cells if not _has(done[cell.key], prompt, cell)])
    for place, prompt in enumerate(prompts):
        left = lefts[place]
        if _is_torn(lefts, place, len(group.cells)):
            there = {cell.key for cell in group.cells} - {cell.key for cell in left}
            yield Job(group, model, prompt, list(group.cells), frozenset(there))
        else:
            yield Job(group, model, prompt, left)


def _is_torn(lefts: Sequence[list[Cell]], place: int, whole: int) -> bool:
    """Whether a fault came between two cells' rows of one sample.

    What is left of it then runs beside the cells that it ran beside: its rows tell how far they are from the
    full cache's, and a batch of another size rounds otherwise. Several such samples one after another are no
    fault: their cells were asked for later, and run alone.
    """
    around = lefts[max(0, place - 1) : place + 2]
    return 0 < len(lefts[place]) < whole and sum(0 < len(left) < whole for left in around) == 1


def _has(done: dict[str, str], prompt: Prompt, cell: Cell) -> bool:
    if prompt.sample.id not in done:
        return False
    if done[prompt.sample.id] != prompt.digest:
        raise UserError(
            f"{cell.folder}: sample {prompt.sample.id} was run with another prompt (other texts?); "
            "give another results_dir or move that folder away"
        )
    return True


def _check(group: Group, prompt: Prompt, model: Inspected, is_first: bool) -> None:
    """Refuse a sample that the model or a method can't take, or a method that can't tell its sizes."""
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
            if is_first:
                check_sizes(cell.method, prompt.context_tokens, model.shape.layers)
                group_need(model.shape, [cell.method], prompt.context_tokens)
        except UserError as error:
            raise UserError(f"{cell.method_name} on {where}: {error}") from error
        except Exception as error:  # a plug-in's own fault
            raise UserError(f"{cell.method_name} on {where}: {kind_and_line(error)}") from error
