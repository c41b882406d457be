"""Efficiency, measured: every cell alone, on real text, in turn with the others, beside its FLOP model.

Repeat r takes the r-th sample of the task for every cell: A B C, A B C ... Other text each time, and the same
for all that are compared. The first sample warms up, and shows the peak memory on a CPU.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from structkv_bench import models
from structkv_bench.bench.timing import Timed, timed
from structkv_bench.cost.work import Cost, cost
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.jobs import available
from structkv_bench.model_spec import ModelSpec
from structkv_bench.plan import Cell, Group
from structkv_bench.samples import prompts_of
from structkv_bench.shape import ModelShape

LENGTH = re.compile(r"length=\[?([\d ,]+)\]?")
ANSWER_ROOM = {"niah": "task.max_new_tokens", "ruler": "task.answer_room"}
"""The setting of a task that says how much room in `length` is for the answer."""


@dataclass(frozen=True)
class Wish:
    """How to measure."""

    repeats: int = 5
    new_tokens: int = 32
    grouped: bool = False
    """Whether the cells are also timed as one group."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.repeats < 1 or self.new_tokens < 1:
            raise UserError("--repeats and --new-tokens: give 1 or more")


@dataclass
class Measured:
    """One cell at one length, or all of them as a group."""

    cells: tuple[Cell, ...]
    prompt_tokens: list[int] = field(default_factory=list)
    """Per repeat."""
    times: list[Timed] = field(default_factory=list)
    """Per repeat."""
    costs: list[Cost] = field(default_factory=list)
    """Per repeat, of one cell: its FLOP model, at the tokens that its layers did process."""
    peak_bytes: int | None = None
    error: str | None = None


@dataclass
class Length:
    """All that was measured on the same prompts."""

    alone: list[Measured]
    group: Measured | None
    distinct_prompts: int
    shape: ModelShape
    device: str
    """As torch names it: cuda:0, cpu."""


def overrides(typed: Sequence[str], wish: Wish) -> list[str]:
    """What is typed, under defaults that make a sample for each repeat, each of other text.

    `length=2048,4096` stands for task.lengths=[2048,4096].

    Raises:
        UserError: a length is no number, or the number of samples is given, which is that of the repeats.
    """
    own = [_lengths(text) if text.partition("=")[0] == "length" else text for text in typed]
    keys = {text.partition("=")[0]: text.partition("=")[2] for text in own}
    if "task.samples" in keys:
        raise UserError("task.samples: a bench takes one sample for each of --repeats, and one to warm up")
    task = keys.get("task", "niah")
    unsaid = {"task.samples": str(wish.repeats + 1)}
    if "task" not in keys and "experiment" not in keys:
        unsaid["task"] = task
    if task == "niah":
        unsaid["task.depths"] = "1"  # each sample then starts at another place of the essays
    if task in ANSWER_ROOM:
        unsaid[ANSWER_ROOM[task]] = str(wish.new_tokens)
    return [f"{key}={value}" for key, value in unsaid.items() if key not in keys] + own


def _lengths(text: str) -> str:
    found = LENGTH.fullmatch(text)
    if not found:
        raise UserError(f"{text}: list token counts, as in length=2048,4096")
    return f"task.lengths=[{found[1]}]"


def bench(groups: Sequence[Group], wish: Wish) -> Iterator[Length]:
    """Measure groups of cells that see the same prompts, one after the other.

    Raises:
        UserError: as for a run; or a task has fewer samples than it takes.
    """
    spec: ModelSpec | None = None
    model: Model | None = None
    for group in available(groups)[0]:
        if model is None or group.model != spec:
            model, spec = models.load(group.model), group.model
        yield _measured(model, group, wish)


def _measured(model: Model, group: Group, wish: Wish) -> Length:
    prompts = _prompts(model, group, wish)
    methods = {cell.key: cell.method.calibrated(model) for cell in group.cells}
    alone = [Measured((cell,)) for cell in group.cells]
    whole = Measured(group.cells) if wish.grouped else None
    everything = [*alone, *([whole] if whole else [])]
    for method in methods.values():
        method.compressor(min(map(len, prompts)), model.shape.layers)  # refuses what can't work
    for number, ids in enumerate(prompts):
        print(f"{group.length} tokens: {_stage(number, wish)}", file=sys.stderr)
        for measured in everything:
            chosen = [methods[cell.key] for cell in measured.cells]
            _take(measured, model, chosen, ids, wish.new_tokens, warm_up=number == 0)
    return Length(alone, whole, len({tuple(ids) for ids in prompts[1:]}), model.shape, str(model.device))


def _prompts(model: Model, group: Group, wish: Wish) -> list[list[int]]:
    """Token ids of a prompt to warm up on, and of one for each repeat."""
    samples = [prompt.sample for prompt in prompts_of(group, model.prompts)]
    prompts = [[id for part in model.prompts.parts(sample) for id in part] for sample in samples]
    if len(prompts) <= wish.repeats:
        raise UserError(f"{group.subtask}: {len(prompts)} samples, for --repeats at most {len(prompts) - 1}")
    longest = max(map(len, prompts)) + wish.new_tokens
    if longest > model.shape.max_positions:
        raise UserError(models.too_long(group.model, model.shape, longest))
    return prompts


def _stage(number: int, wish: Wish) -> str:
    return f"repeat {number} of {wish.repeats}" if number else "warming up"


def _take(
    measured: Measured, model: Model, methods: Sequence[Method], ids: list[int], new: int, warm_up: bool
) -> None:
    """Time one more prompt; what fails once is not tried again."""
    if measured.error is not None:
        return
    try:
        found = timed(model, methods, ids, new, look=warm_up)
    except Exception as error:  # a method's fault, or out of memory: the others go on
        measured.error = f"{len(ids)} prompt tokens: {kind_and_line(error)}"
        return
    if found.peak_bytes is not None:
        measured.peak_bytes = max(measured.peak_bytes or 0, found.peak_bytes)
    if not warm_up:
        measured.times.append(found)
        measured.prompt_tokens.append(len(ids))
        if len(methods) == 1:
            measured.costs.append(cost(model.shape, methods[0], len(ids), new, found.layer_tokens))
