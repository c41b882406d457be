"""The RULER suite (NVIDIA, arXiv 2404.06654): its six tasks that need no outside text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat, Sample, Task

from . import cwe, fwe, niah, vt
from .data import SUBTASKS, TASKS
from .fit import Draft, Room

_CONTROL = re.compile("[\x00-\x1f]")


@dataclass(frozen=True)
class Ruler(Task):
    """RULER with the samples of NVIDIA's own generators, byte for byte (wonderwords 2.2.0).

    Samples are drawn one after another, so the first n are the same however many are asked for. Each
    is a user turn and an answer prefix that opens the assistant's turn. Upstream counts tokens with
    the model's template around both; here the chat template of the model at hand does that part. The
    worked example of cwe is the bare task text, as upstream's "base" template gives it.
    """

    lengths: list[int]
    """Tokens of the rendered prompt plus the answer room."""
    samples: int
    """Per subtask and length."""
    subset: list[str] = field(default_factory=lambda: list(SUBTASKS))
    seed: int = 42
    fit: str = "upstream"
    """upstream: NVIDIA's samples. tight: the same generators, with samples that fill their length."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise UserError(f"task.lengths must list token counts, each once, not {list(self.lengths)}")
        if self.samples < 1:
            raise UserError(f"task.samples must be 1 or more, not {self.samples}")
        names = set(self.subset)
        if not names or names - set(SUBTASKS) or len(names) < len(self.subset):
            raise UserError(
                f"task.subset must name some of {', '.join(SUBTASKS)}, each once, not {list(self.subset)}"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"task.seed must be from 0 to 2**32 - 1, not {self.seed}")
        if self.fit not in ("upstream", "tight"):
            raise UserError(f"task.fit must be upstream or tight, not {self.fit!r}")

    def subtasks(self) -> list[str]:
        """The chosen names, in the order given."""
        return list(self.subset)

    def build(self, subtask: str, length: int, prompts: PromptFormat) -> list[Sample]:
        """Samples of one subtask; the random numbers start anew at the seed for each call.

        Raises:
            UserError: the length can't hold the smallest sample, or needs words that are not there.
        """
        max_new_tokens: int = TASKS[SUBTASKS[subtask]["task"]]["tokens_to_generate"]
        room = Room(subtask, length, max_new_tokens, prompts, tight=self.fit == "tight")
        drafts = _drafts(room, self.seed)
        return [
            Sample(
                id=f"{number:04d}",
                prompt=draft.prompt,
                references=draft.references,
                max_new_tokens=max_new_tokens,
                answer_prefix=draft.answer_prefix,
                fields=draft.fields,
            )
            for number, draft in enumerate(islice(drafts, self.samples))
        ]

    def score(self, subtask: str, sample: Sample, prediction: str) -> float:
        """RULER's string_match_all: share of references found in the prediction, case ignored.

        Control characters become newlines first, so a reference that one of them cuts is not found.
        """
        text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
        return sum(reference.lower() in text for reference in sample.references) / len(sample.references)


def _drafts(room: Room, seed: int) -> Iterator[Draft]:
    settings = SUBTASKS[room.subtask]["args"]
    match SUBTASKS[room.subtask]["task"]:
        case "niah":
            return niah.drafts(room, settings, seed)
        case "variable_tracking":
            return vt.drafts(room, settings, seed)
        case "common_words_extraction":
            return cwe.drafts(room, settings, seed)
        case _:
            return fwe.drafts(room, settings, seed)
