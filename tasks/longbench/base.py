"""What LongBench and LongBench v2 share: long texts from the hub, cut in the middle to fit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structkv_bench.errors import UserError
from structkv_bench.paths import expanded
from structkv_bench.task import PromptFormat, Task

from ..corpus import HubFile
from . import truncate
from .source import File, absent, read


@dataclass(frozen=True)
class Fitted:
    """A user turn that fits."""

    prompt: str | tuple[int, ...]
    cut: int
    """How many of its tokens were taken out."""
    question_at: int | None
    """Where what follows the context begins, if the context is to be compressed without it."""


@dataclass(frozen=True)
class LongTexts(Task):
    """Prompts around texts of one file of the hub, or of a copy of it."""

    lengths: list[int]
    """Longest prompt, in tokens; what that counts depends on `truncation`."""
    samples: int
    """Per subtask at most: the first of its file."""
    revision: str
    """Of the data set on the hub."""
    source: str | None = None
    """A local copy; None: the hub's, once it was fetched."""
    truncation: str = "official"
    """official: as the authors' code does it. ids: `lengths` are prompt, template and answer, exactly."""
    query_aware: bool = True
    """False: the context is compressed before what follows it is known."""
    missing: str = "skip"
    """What to do about subtasks whose file is not there: skip them, or end with an error."""

    task: ClassVar[str]
    """Name of the config."""
    pinned: ClassVar[HubFile]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 2 or len(set(self.lengths)) < len(self.lengths):
            raise UserError(
                f"task.lengths must list token counts from 2, each once, not {list(self.lengths)}"
            )
        if self.samples < 1:
            raise UserError(f"task.samples must be 1 or more, not {self.samples}")
        if self.truncation not in ("official", "ids"):
            raise UserError(f"task.truncation must be official or ids, not {self.truncation!r}")
        if self.missing not in ("skip", "error"):
            raise UserError(f"task.missing must be skip or error, not {self.missing!r}")

    @abstractmethod
    def member(self, subtask: str) -> str:
        """Name of a subtask's file in the data set."""

    @abstractmethod
    def shorten(self, prompt: str, limit: int, prompts: PromptFormat) -> truncate.Cut:
        """The authors' way to cut a prompt."""

    def unavailable(self) -> dict[str, str]:
        """The chosen subtasks whose file is not there."""
        subtasks = {self.member(subtask): subtask for subtask in self.subtasks()}
        missing = absent(self.source, self._hub(), self._how, subtasks)
        return {subtasks[member]: reason for member, reason in missing.items()}

    def sources(self, subtask: str) -> dict[str, str]:
        """sha256 of the file that a subtask's samples come from, by its path, or its place on the hub.

        Raises:
            UserError: it is not there.
        """
        file = self.read(subtask)
        return {file.name: file.sha256}

    def fetch(self) -> list[Path]:
        """Bring the hub's file into the cache, unless a local copy is used; where it lies.

        Raises:
            UserError: it can't be had.
        """
        return [self._hub().fetch() if self.source is None else expanded(self.source)]

    def read(self, subtask: str) -> File:
        """The file of a subtask.

        Raises:
            UserError: it is not there.
        """
        return read(self.source, self._hub(), self._how, self.member(subtask))

    @property
    def _how(self) -> str:
        """The command that brings the hub's file into the cache."""
        other = "" if self.revision == self.pinned.revision else f" task.revision={self.revision}"
        return f"structkv-bench fetch task={self.task}{other}"

    def fit(
        self, whole: str, context_end: int, length: int, answer_room: int, chat: bool, prompts: PromptFormat
    ) -> Fitted:
        """A filled template, without its middle if it is too long.

        Raises:
            UserError: nothing of it would be left.
        """
        if self.truncation == "official":
            prompt, cut = self.shorten(whole, length, prompts)
        else:
            prompt, cut = truncate.exact(whole, length, answer_room, chat, prompts)
        if self.query_aware:
            return Fitted(prompt, cut, None)
        rest = whole[context_end:] if isinstance(prompt, str) else prompts.encode(whole[context_end:])
        return Fitted(prompt, cut, max(len(prompt) - len(rest), 0))

    def _hub(self) -> HubFile:
        return HubFile(self.pinned.repository, self.revision, self.pinned.file)
