"""Made-up rows of LongBench, and a tokenizer for the samples that are built of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from structkv_bench.task import Sample
from structkv_bench.tasks.longbench import LongBench


class Words:
    """A tokenizer of words, marks and spaces, with a BOS and a chat template."""

    vocabulary: ClassVar[dict[str, int]] = {"": 0}
    """Of all instances; the BOS has no text."""

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(r"\w+|[^\w\s]|\s", text)
        return [self.vocabulary.setdefault(piece, len(self.vocabulary)) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = list(self.vocabulary)
        return "".join(pieces[i] for i in ids)

    def render(self, prompt: str | Sequence[int], answer_prefix: str, chat: bool = True) -> list[int]:
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        before, after = (self.encode("<user>"), self.encode("<assistant>")) if chat else ([], [])
        return [0, *before, *ids, *after, *self.encode(answer_prefix)]


def row(**fields: Any) -> dict[str, Any]:
    known = {"input": "Who?", "context": "One. Two.", "answers": ["me"], "length": 2, "all_classes": None}
    return known | {"dataset": "qasper", "language": "en"} | fields


def lay(folder: Path, name: str, *rows: Any) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in rows]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def build(folder: Path, name: str, length: int = 7500, samples: int = 500, **settings: Any) -> list[Sample]:
    task = LongBench(lengths=[length], samples=samples, subset=[name], source=str(folder), **settings)
    return task.build(name, length, Words())
