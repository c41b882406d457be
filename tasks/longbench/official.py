"""Scores of prediction files in the layout of LongBench's pred.py, as its eval.py gives them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from structkv_bench.errors import UserError, kind_and_line

from .catalog import BUCKETS, BY_LENGTH, SPECS, Spec, bucket, spec, whole
from .data import read_classes
from .scoring import score, unscorable
from .source import File, Record, unique

Score = float | dict[str, float | None]
"""Percent to two decimals; of a LongBench-E file by bucket, None where a bucket has no row."""

_ORDER = [*SPECS, *BY_LENGTH]


@dataclass(frozen=True)
class Scored:
    """A folder's scores."""

    scores: dict[str, Score]
    """By task, in the order of the papers' tables."""
    shortfalls: list[str]
    """Which files have another number of rows than their task, so that their score is not the task's."""


def score_folder(path: str | Path, by_length: bool = False) -> dict[str, Score]:
    """Scores of every <task>.jsonl in a folder: see `scored`."""
    return scored(path, by_length).scores


def scored(path: str | Path, by_length: bool = False) -> Scored:
    """Scores of every <task>.jsonl in a folder, whose rows hold pred, answers, all_classes and length.

    Args:
        path: the folder.
        by_length: all files are of LongBench-E, though their names don't end in _e: pred.py writes
            them so to pred_e/.

    Raises:
        UserError: a file is not a task's or not sound. Nothing is scored then.
    """
    scores: dict[str, Score] = {}
    shortfalls = []
    for task, file in _files(Path(path), by_length).items():
        records = list(file.json_lines())
        unique((record.text("_id"), record.where) for record in records if "_id" in record.values)
        scores[task] = _task_score(task, records)
        if len(records) != whole(task):
            shortfalls.append(f"{task}: {len(records)} rows, the task has {whole(task)}")
    return Scored(scores, shortfalls)


def _files(folder: Path, by_length: bool) -> dict[str, File]:
    """Each task's file, in the order of the papers' tables."""
    files: dict[str, File] = {}
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix != ".jsonl":
                continue
            task = f"{path.stem.removesuffix('_e')}_e" if by_length else path.stem
            if task not in _ORDER or task in files:
                why = "a second file of that task" if task in files else "no task of that name"
                raise UserError(f"{path}: {why}; name it <task>.jsonl after {', '.join(SPECS)}")
            files[task] = File(str(path), path.read_bytes())
    except OSError as error:
        raise UserError(f"{folder}: give the folder of prediction files ({kind_and_line(error)})") from error
    if not files:
        raise UserError(f"{folder}: no <task>.jsonl in it")
    return dict(sorted(files.items(), key=lambda item: _ORDER.index(item[0])))


def _task_score(task: str, records: list[Record]) -> Score:
    """A file's score; every row is scored with the classes of the last one, as the official code does."""
    one = spec(task)
    classes = read_classes(records[-1], one)
    values = [_row_score(one, record, classes) for record in records]
    if not task.endswith("_e"):
        total = 0.0
        for value in values:  # not sum(), which is more exact since Python 3.12: the official code is not
            total += value
        return round(100 * total / len(values), 2)
    buckets: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for value, record in zip(values, records, strict=True):
        buckets[bucket(record.number("length"))].append(value)
    # numpy's mean and rounding, as the official code has them here and not above
    return {name: float(np.round(100 * np.mean(some), 2)) if some else None for name, some in buckets.items()}


def _row_score(one: Spec, record: Record, classes: tuple[str, ...]) -> float:
    golds = record.texts("answers")
    if wrong := unscorable(one, golds, classes):
        raise UserError(f"{record.where}: {wrong}")
    return score(one, record.text("pred"), golds, classes)
