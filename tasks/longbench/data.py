"""Rows of LongBench's files."""

from __future__ import annotations

from dataclasses import dataclass

from structkv_bench.errors import UserError

from .catalog import Spec
from .scoring import unscorable
from .source import File, Record, unique


@dataclass(frozen=True)
class Row:
    """One question about one long text."""

    id: str
    context: str
    input: str
    answers: tuple[str, ...]
    length: int
    """Words, or characters of a Chinese text: not tokens."""
    classes: tuple[str, ...]
    """What to choose from in a classification, else empty."""


def rows(file: File, spec: Spec) -> list[Row]:
    """All rows of a file, in its order, which is the order of evaluation.

    All rows get the classes of the last one, as in the official scorer.

    Raises:
        UserError: the file is empty or not UTF-8, a line is not JSON, lacks a field or has one of the
            wrong type, an id comes twice, or the metric can't work with a row.
    """
    records = list(file.json_lines())
    classes = read_classes(records[-1], spec)
    found = [_row(number, record, classes) for number, record in enumerate(records)]
    unique((row.id, record.where) for row, record in zip(found, records, strict=True))
    for row, record in zip(found, records, strict=True):
        if not row.answers:
            raise UserError(f"{record.where}: answers is empty")
        if wrong := unscorable(spec, row.answers, row.classes):
            raise UserError(f"{record.where}: {wrong}")
    return found


def read_classes(record: Record, spec: Spec) -> tuple[str, ...]:
    """The classes that a record lists; none where the task is no classification."""
    return tuple(record.texts("all_classes")) if spec.metric == "classification" else ()


def _row(number: int, record: Record, classes: tuple[str, ...]) -> Row:
    """One row; without an `_id` its number in the file stands for one."""
    return Row(
        id=record.text("_id") if "_id" in record.values else f"{number:04d}",
        context=record.prose("context"),
        input=record.prose("input"),
        answers=tuple(record.texts("answers")),
        length=record.number("length"),
        classes=classes,
    )
