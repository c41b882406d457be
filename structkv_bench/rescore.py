"""Stored predictions scored anew: no model, no torch, no texts."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.plan import EXTENT
from structkv_bench.report.naming import kv_ratio, method_label, task_label
from structkv_bench.report.stored import Stored, load
from structkv_bench.store import Row
from structkv_bench.task import Sample, Task


def rescored_lines(results_dir: str | Path) -> list[dict[str, Any]]:
    """A line per cell that has predictions: its score as stored and as its task scores it now, in percent.

    Raises:
        UserError: there are no results, a cell's task can't be made, or can't score a prediction.
    """
    return [_line(cell) for cell in load([results_dir]).cells if cell.ok]


def _line(cell: Stored) -> dict[str, Any]:
    task = _task(cell)
    scores = {sample: _score(task, cell.subtask, row) for sample, row in cell.ok.items()}
    return {
        "model": cell.model,
        "method": method_label(cell.about),
        "kv_ratio": kv_ratio(cell.about),
        "task": task_label(cell.about),
        "length": cell.length,
        "n": len(scores),
        "stored": round(100 * fmean(cell.scores.values()), 2),
        "score": round(100 * fmean(scores.values()), 2),
        "changed": sum(scores[sample] != stored for sample, stored in cell.scores.items()),
    }


def _task(cell: Stored) -> Task:
    """The cell's task; what only says how much runs is no matter here."""
    settings: dict[str, Any] = dict(cell.about["config"]["task"])
    module, _, name = str(settings.pop("_target_")).rpartition(".")
    extent = {"lengths": [cell.length], "samples": 1, "subset": [cell.subtask]}
    try:
        cls = getattr(importlib.import_module(module), name)
        wanted = {f.name for f in fields(cls)} & EXTENT
        return cast(Task, cls(**settings, **{key: extent[key] for key in extent.keys() & wanted}))
    except Exception as error:  # whatever a class of the user's raises
        raise UserError(f"{cell.subtask}: its task can't be made again ({kind_and_line(error)})") from error


def _score(task: Task, subtask: str, row: Row) -> float:
    sample = Sample(row["sample"], "", tuple(row["references"]), max_new_tokens=0, fields=row["fields"])
    try:
        return task.score(subtask, sample, row["prediction"])
    except Exception as error:
        raise UserError(f"{subtask}, sample {sample.id}: can't be scored ({kind_and_line(error)})") from error
