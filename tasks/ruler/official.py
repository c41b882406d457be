"""RULER's data files: samples in the layout that NVIDIA's generators write, made without any model."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structkv_bench.paths import expanded, write_whole
from structkv_bench.task import PromptFormat, Sample

from .data import SUBTASKS
from .suite import Ruler


class _Untemplated(ABC):
    """A PromptFormat without chat template and special tokens: upstream's model template "base"."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""

    def render(self, prompt: str | Sequence[int], answer_prefix: str, chat: bool = True) -> list[int]:
        """Token ids of prompt and prefix, whatever `chat` says."""
        if isinstance(prompt, str):
            return self.encode(prompt + answer_prefix)
        return [*prompt, *self.encode(answer_prefix)]


@dataclass
class WordsFormat(_Untemplated):
    """A PromptFormat that needs no model: a token is a word or a punctuation mark.

    Ids count up in the order in which words were first met.
    """

    _ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        """One id per match of \\w+|[^\\w\\s]."""
        return [self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\w+|[^\w\s]", text)]

    def decode(self, ids: list[int]) -> str:
        """The words with a space between each two."""
        words = list(self._ids)
        return " ".join(words[place] for place in ids)


@dataclass(frozen=True)
class _Bare(_Untemplated):
    """Another format's tokens."""

    prompts: PromptFormat

    def encode(self, text: str) -> list[int]:
        return self.prompts.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.prompts.decode(ids)


def write_official(ruler: Ruler, subtask: str, length: int, prompts: PromptFormat, out: Path) -> None:
    """Write the samples of one subtask as NVIDIA's generators do with their template "base".

    Args:
        ruler: how many samples, from which seed and sources, and how fitted.
        subtask: one of RULER's 13 names.
        length: tokens of prompt, prefix and answer room.
        prompts: counts the tokens; its chat template is left aside.
        out: the jsonl file; it appears whole or not at all, and its folder is made.

    Raises:
        UserError: as for Ruler.build, or the file can't be written.
    """
    bare = _Bare(prompts)
    rows = _rows(subtask, ruler.build(subtask, length, bare), bare)
    write_whole(expanded(out), "".join(json.dumps(row) + "\n" for row in rows))


def _rows(subtask: str, samples: list[Sample], prompts: _Bare) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(samples):
        text = str(sample.prompt)
        used = len(prompts.render(text, sample.answer_prefix)) + sample.max_new_tokens
        row: dict[str, Any] = {
            "index": number,
            "input": text,
            "outputs": list(sample.references),
            "length": used,
            "length_w_model_temp": used,
            "answer_prefix": sample.answer_prefix,
        }
        if SUBTASKS[subtask]["task"] == "niah":
            # Upstream reuses the name of the sample's number for this place, in characters.
            row["index"] = text.find(sample.references[0])
            row["token_position_answer"] = len(prompts.encode(text[: row["index"]]))
        yield row
