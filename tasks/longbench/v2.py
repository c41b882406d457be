"""LongBench v2 (arXiv 2412.15204): four choices about texts of 8,000 to two million words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from typing import Any, ClassVar

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat, Sample, Scores, labelled

from ..corpus import HubFile
from . import truncate
from .base import LongTexts
from .source import File, Record, parse, record, unique

PINNED = HubFile("THUDM/LongBench-v2", "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9", "data.json")
CHOICES = "ABCD"

_DATA: dict[str, Any] = json.loads((files(__package__) / "template_v2.json").read_text(encoding="utf-8"))
TEMPLATE: str = _DATA["template"]
ANSWER_TOKENS: int = _DATA["max_new_tokens"]
QUESTIONS: dict[str, int] = _DATA["questions"]
"""How many there are in all, and of each difficulty and length."""

_PLACES = {"$DOC$": "context", "$Q$": "question"} | {f"$C_{x}$": f"choice_{x}" for x in CHOICES}
_ANSWERS = (re.compile(r"The correct answer is \(([A-D])\)"), re.compile(r"The correct answer is ([A-D])"))


@dataclass(frozen=True)
class LongBenchV2(LongTexts):
    """LongBench v2, zero-shot, as its authors run it but for one thing: greedy, not at temperature 0.1.

    `lengths` are their maximum prompt lengths: 120000 for a model of 128k positions. A local `source`
    is data.json or a folder with it.
    """

    revision: str = PINNED.revision

    task: ClassVar[str] = "longbench_v2"
    pinned: ClassVar[HubFile] = PINNED

    def subtasks(self) -> list[str]:
        """One name for all."""
        return [self.task]

    def member(self, subtask: str) -> str:
        """One for all."""
        return PINNED.file

    def build(self, subtask: str, length: int, prompts: PromptFormat) -> list[Sample]:
        """The first questions of the file as samples.

        Raises:
            UserError: the file is not there or not sound, or `length` holds nothing of a prompt.
        """
        found = questions(self.read(subtask))
        return [self._sample(question, length, prompts) for question in islice(found, self.samples)]

    def _sample(self, question: Record, length: int, prompts: PromptFormat) -> Sample:
        fitted = self.fit(*fill(question), length, ANSWER_TOKENS, True, prompts)
        return Sample(
            id=question.text("_id"),
            prompt=fitted.prompt,
            references=(question.text("answer"),),
            max_new_tokens=ANSWER_TOKENS,
            question_at=fitted.question_at,
            truncated_tokens=fitted.cut,
            fields={name: question.text(name) for name in ("difficulty", "length", "domain")},
        )

    def shorten(self, prompt: str, limit: int, prompts: PromptFormat) -> truncate.Cut:
        """As pred.py: both halves joined, then decoded."""
        return truncate.joined_ids(prompt, limit, prompts)

    def score(self, subtask: str, sample: Sample, prediction: str) -> float:
        """1 if the letter that the prediction calls correct is the right one, else 0."""
        return float(answer(prediction) == sample.references[0])

    @staticmethod
    def averages(scores: Scores) -> dict[str, float]:
        """The official ones: see `averages`."""
        return averages(sample for some in scores.values() for sample in some)


def questions(file: File) -> list[Record]:
    """Every question of a file.

    Raises:
        UserError: it is no list of JSON objects, a field is missing or not text, or an id comes twice.
    """
    values = parse(file.text(), file.name)
    if not isinstance(values, list) or not values:
        raise UserError(f"{file.name}: must be a JSON list of questions")
    found = [record(value, f"{file.name}: item {number}") for number, value in enumerate(values, 1)]
    for question in found:
        for name in ("difficulty", "length", "domain", *_PLACES.values()):
            question.prose(name)
        if question.text("answer") not in CHOICES or len(question.text("answer")) != 1:
            raise UserError(f"{question.where}: answer must be one of A, B, C and D")
        if question.text("difficulty") not in QUESTIONS or question.text("length") not in QUESTIONS:
            raise UserError(f"{question.where}: difficulty or length is none of {', '.join(QUESTIONS)}")
    unique((question.text("_id"), question.where) for question in found)
    return found


def fill(question: Record) -> tuple[str, int]:
    """The prompt, and the place in it where the text ends; the texts go in as they are, but stripped."""
    before, after = TEMPLATE.split("$DOC$")
    until = before + question.text("context").strip()
    names = re.compile("|".join(map(re.escape, _PLACES)))
    return until + names.sub(lambda place: question.text(_PLACES[place[0]]).strip(), after), len(until)


def answer(prediction: str) -> str | None:
    """The letter that a prediction calls correct; None: it doesn't say so in the words asked for."""
    text = prediction.replace("*", "")
    return next((match[1] for pattern in _ANSWERS if (match := pattern.search(text))), None)


def averages(rows: Iterable[tuple[Mapping[str, Any], float]]) -> dict[str, float]:
    """Percent of right answers, to one decimal: overall, and by difficulty and length.

    Args:
        rows: fields and score of each sample.

    Returns:
        By name, in the official order; where some questions are missing, the name says how many of how
        many there are, and a group without any is left out.
    """
    scores: dict[str, list[float]] = {name: [] for name in QUESTIONS}
    for fields, score in rows:
        for name in ("overall", fields["difficulty"], fields["length"]):
            scores[name].append(score)
    return {
        labelled(name, len(some), QUESTIONS[name], "questions"): round(100 * sum(some) / len(some), 1)
        for name, some in scores.items()
        if some
    }
