"""Setups -> cells, and the groups of cells that one prefill serves."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from structkv_bench.model_spec import ModelSpec

if TYPE_CHECKING:
    from structkv_bench.config import Setup
    from structkv_bench.engine.method import Method
    from structkv_bench.task import Task

PROTOCOL = "1"
"""Raised when the harness itself comes to predict differently from the same settings."""
EXTENT = {"samples", "lengths", "subset", "missing"}
"""Task settings that say how much runs: a sample is the same whatever runs beside it."""


@dataclass(frozen=True)
class Cell:
    """One model, method, subtask and length: the rows of one result line."""

    model: ModelSpec
    method_name: str
    method: Method
    task_name: str
    task: Task
    subtask: str
    length: int
    protocol: str = "official"
    """What the settings of task and method follow, by name; they themselves stand in the config."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """All that changes a prediction, as plain JSON; names and the extent of the run don't."""
        task = {key: value for key, value in _settings(self.task).items() if key not in EXTENT}
        model = {key: value for key, value in _fields(self.model).items() if key != "name"}
        config = {
            "protocol": PROTOCOL,
            "model": model,
            "method": _settings(self.method),
            "task": task,
            "subtask": self.subtask,
            "length": self.length,
        }
        plain: dict[str, Any] = json.loads(_canonical(config))
        return plain

    @cached_property
    def key(self) -> str:
        """Identity of the cell: another config never reuses its rows."""
        return hashlib.sha256(_canonical(self.config).encode()).hexdigest()[:16]

    @property
    def names(self) -> dict[str, str]:
        """What its choices are called; a name changes no prediction."""
        return {
            "model": self.model.name,
            "method": self.method_name,
            "task": self.task_name,
            "protocol": self.protocol,
        }

    @cached_property
    def folder(self) -> str:
        """Name of its folder among the results."""
        settings = self.config["method"]
        size = f"-b{settings['budget']}" if settings.get("budget") else ""
        if not size and "kv_ratio" in settings:
            size = f"-kv{settings['kv_ratio']}"
        name = f"{self.model.name}.{self.method_name}{size}.{self.subtask}.{self.length}"
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', name)[:200]}.{self.key}"

    @property
    def prompts_key(self) -> str:
        """Equal for cells that see the same prompts on the same model."""
        return _canonical({key: value for key, value in self.config.items() if key != "method"})


@dataclass(frozen=True)
class Group:
    """Cells that share model, task, subtask and length: the same samples, one prefill."""

    cells: tuple[Cell, ...]

    @property
    def model(self) -> ModelSpec:
        """The model of every cell."""
        return self.cells[0].model

    @property
    def task(self) -> Task:
        """The task of every cell."""
        return self.cells[0].task

    @property
    def subtask(self) -> str:
        """The subtask of every cell."""
        return self.cells[0].subtask

    @property
    def length(self) -> int:
        """The length of every cell."""
        return self.cells[0].length


def plan(setups: Iterable[Setup]) -> list[Group]:
    """Groups of the setups' cells, as typed; of a cell asked for twice, the run with more samples."""
    cells: dict[str, Cell] = {}
    for cell in (cell for setup in setups for cell in cells_of(setup)):
        known = cells.get(cell.folder)
        if known is None or known.task.samples < cell.task.samples:
            cells[cell.folder] = cell
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells.values():
        groups.setdefault((cell.prompts_key, cell.task.samples), []).append(cell)
    return [Group(tuple(group)) for group in groups.values()]


def cells_of(setup: Setup) -> list[Cell]:
    """A cell for each of its subtasks and lengths."""
    return [
        Cell(
            setup.model,
            setup.method_name,
            setup.method,
            setup.task_name,
            setup.task,
            subtask,
            length,
            setup.protocol,
        )
        for subtask in setup.task.subtasks()
        for length in setup.task.lengths
    ]


def _settings(settings: Any) -> dict[str, Any]:
    """A dataclass as its class and fields."""
    cls = type(settings)
    return {"_target_": f"{cls.__module__}.{cls.__qualname__}", **_fields(settings)}


def _fields(settings: Any) -> dict[str, Any]:
    """As asdict, but nothing is copied: a plan has thousands of cells, and JSON is made of them at once."""
    return {field.name: getattr(settings, field.name) for field in fields(settings)}


def _canonical(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """What JSON has no form for."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
