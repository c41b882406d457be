"""The LongBench suite (Tsinghua, arXiv 2308.14508), with the prompts and scores of its own code."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, ClassVar

from structkv_bench.task import PromptFormat, Sample, Scores

from ..corpus import HubFile
from . import truncate
from .averages import averages
from .base import LongTexts
from .catalog import BUCKETS, bucket, expand, spec
from .data import Row, rows
from .scoring import score

PINNED = HubFile("THUDM/LongBench", "5e628be450b7e67fb7ae6e201bd6d8f7056f7672", "data.zip")


@dataclass(frozen=True)
class LongBench(LongTexts):
    """LongBench as its authors run it: greedy, their prompts, generation lengths and metrics.

    `lengths` are the `max_length` of their pred.py, which leaves room for the chat template and the
    answer by convention: 3500 for a model of 4k positions, 7500 for 8k, 15500, 31500 and, in later
    papers, 127500. A local `source` is a folder or a zip with a .jsonl file for each task.
    """

    revision: str = PINNED.revision
    subset: list[str] = field(default_factory=lambda: ["en"])
    """Names of tasks, or for several: en (16, code included), zh (5), e (the 13 of LongBench-E), all (21)."""

    task: ClassVar[str] = "longbench"
    pinned: ClassVar[HubFile] = PINNED

    def __post_init__(self) -> None:
        super().__post_init__()
        expand(self.subset)

    def subtasks(self) -> list[str]:
        """Names of the tasks, those of LongBench-E with _e at the end."""
        return expand(self.subset)

    def member(self, subtask: str) -> str:
        """Each task has its own."""
        return f"{subtask}.jsonl"

    def build(self, subtask: str, length: int, prompts: PromptFormat) -> list[Sample]:
        """The first rows of a task's file as samples.

        Raises:
            UserError: the file is not there or not sound, or `length` holds nothing of a prompt.
        """
        found = rows(self.read(subtask), spec(subtask))
        return [self._sample(subtask, row, length, prompts) for row in islice(found, self.samples)]

    def _sample(self, subtask: str, row: Row, length: int, prompts: PromptFormat) -> Sample:
        task = spec(subtask)
        fitted = self.fit(*task.fill(row.context, row.input), length, task.max_new_tokens, task.chat, prompts)
        fields: dict[str, Any] = {"length": row.length}
        if subtask.endswith("_e"):
            fields["bucket"] = bucket(row.length)
        if row.classes:
            fields["all_classes"] = list(row.classes)
        return Sample(
            id=row.id,
            prompt=fitted.prompt,
            references=row.answers,
            max_new_tokens=task.max_new_tokens,
            question_at=fitted.question_at,
            chat=task.chat,
            stop_at_newline=task.stop_at_newline,
            min_new_tokens=int(task.stop_at_newline),
            truncated_tokens=fitted.cut,
            fields=fields,
        )

    def shorten(self, prompt: str, limit: int, prompts: PromptFormat) -> truncate.Cut:
        """As pred.py: both halves decoded, then joined."""
        return truncate.joined_text(prompt, limit, prompts)

    def score(self, subtask: str, sample: Sample, prediction: str) -> float:
        """The official metric of the task, at its best over all references."""
        return score(spec(subtask), prediction, sample.references, sample.fields.get("all_classes", ()))

    @staticmethod
    def averages(scores: Scores) -> dict[str, float]:
        """Both averages of whole tasks, and each bucket of those of LongBench-E."""
        plain = {name: 100 * fmean(score for _, score in some) for name, some in scores.items()}
        buckets = {
            f"{name} {part}": round(100 * fmean(found), 2)
            for name, some in scores.items()
            for part in BUCKETS
            if (found := [score for fields, score in some if fields.get("bucket") == part])
        }
        return (averages(plain) if len(plain) > 1 else {}) | buckets
