"""What a task suite is: samples with their prompts, and the official score of a prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """One prompt with its references."""

    id: str
    """Unique within its (subtask, length), and the same for any number of samples asked for."""
    prompt: str | tuple[int, ...]
    """Text of the user turn, or its token ids where they must not go through text again."""
    references: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    """Text that opens the assistant turn; the model continues it."""
    question_at: int | None = None
    """Where `prompt` is cut if its context is compressed before the question is known; None: never."""
    chat: bool = True
    """Whether the prompt goes into the model's chat template."""
    stop_at_newline: bool = False
    """Whether the answer also ends at the token of a newline."""
    min_new_tokens: int = 0
    """For so many tokens no id that ends an answer may be chosen."""
    truncated_tokens: int = 0
    """How many tokens of the prompt were cut out to fit."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What a table or figure groups by (depth, ...): copied into the result row."""


Scores = Mapping[str, Sequence[tuple[Mapping[str, Any], float]]]
"""Of each subtask: `Sample.fields` and score, from 0 to 1, of each sample."""


class PromptFormat(Protocol):
    """How the model at hand tokenises text and wraps a user turn (see models.py)."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with no special tokens added."""

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens left out."""

    def render(self, prompt: str | Sequence[int], answer_prefix: str, chat: bool = True) -> list[int]:
        """Token ids of the whole prompt: chat template around the user turn, then the prefix; one BOS."""


class Task(ABC):
    """A suite's settings. Subclasses are frozen dataclasses; all that changes a sample is a field.

    `samples` (how many per subtask and length) must not change the samples themselves: the first n of
    a larger run are the samples of a run with n.
    """

    samples: int
    lengths: list[int]
    missing: str = "error"
    """What becomes of subtasks that are `unavailable`: skip (the others run, and it is said), or error."""

    @abstractmethod
    def subtasks(self) -> list[str]:
        """Names of the tasks in this suite that a table shows one by one."""

    @abstractmethod
    def build(self, subtask: str, length: int, prompts: PromptFormat) -> list[Sample]:
        """Samples whose rendered prompt plus answer room fill `length` tokens.

        Raises:
            UserError: the length can't hold one sample, or a source text is missing.
        """

    @abstractmethod
    def score(self, subtask: str, sample: Sample, prediction: str) -> float:
        """Official score of one prediction, from 0 to 1."""

    def extra_scores(self, subtask: str, sample: Sample, prediction: str) -> dict[str, float]:
        """Further official scores, which the row keeps beside the first."""
        return {}

    @staticmethod
    def averages(scores: Scores) -> dict[str, float]:
        """What the suite's papers report beside each subtask's mean, in percent.

        Every subtask of `scores` has samples. A name says so where the average is not over all.
        """
        if len(scores) < 2:
            return {}
        return {f"mean of {len(scores)} tasks": 100 * mean_of_means(scores)}

    def unavailable(self) -> dict[str, str]:
        """The chosen subtasks whose texts are not here, each with the reason in one line.

        Only looks where files lie: no network, and done within a second.
        """
        return {}

    def sources(self, subtask: str) -> dict[str, str]:
        """sha256 of each text that a subtask's samples are made of, by its name.

        Raises:
            UserError: a text is not there.
        """
        return {}

    def fetch(self) -> list[Path]:
        """Download what the chosen subtasks need and have no file for; where it lies.

        Raises:
            UserError: it is not to be had.
        """
        return []


def mean_of_means(scores: Scores) -> float:
    """The plain mean of the subtasks' means, from 0 to 1."""
    return fmean(fmean(score for _, score in some) for some in scores.values())


def labelled(name: str, found: int, of: int, what: str) -> str:
    """The name of an average, which says so where it is not over all."""
    return name if found == of else f"{name}, {found} of {of} {what}"
