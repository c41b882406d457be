"""LongBench's tasks as its authors set them (templates.json), and the names that stand for several."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from structkv_bench.errors import UserError


@dataclass(frozen=True)
class Spec:
    """Official settings of one task."""

    category: str
    """One of six, which the official average weighs equally."""
    language: str
    """en, zh or code."""
    metric: str
    """What scoring.score calls it."""
    rows: int
    """Of the whole file."""
    rows_e: int
    """Of the LongBench-E file; 0: there is none."""
    max_new_tokens: int
    chat: bool
    """Whether the prompt goes into the model's chat template."""
    stop_at_newline: bool
    template: str
    """Around {context} and {input}."""

    @property
    def first_line(self) -> bool:
        """Whether only the first line of a prediction counts: models go on with examples of their own."""
        return self.category == "few-shot"

    def fill(self, context: str, question: str) -> tuple[str, int]:
        """The prompt, and the place in it where the context ends; braces in the texts stay as they are."""
        before, after = self.template.split("{context}")
        until = before.format(input=question) + context
        return until + after.format(input=question), len(until)


_DATA = json.loads((files(__package__) / "templates.json").read_text(encoding="utf-8"))

SPECS: dict[str, Spec] = {name: Spec(**settings) for name, settings in _DATA.items()}
"""Every task, the 16 English ones first (code counts as English), in the order of the papers' tables."""
ENGLISH = [name for name, spec in SPECS.items() if spec.language != "zh"]
CHINESE = [name for name, spec in SPECS.items() if spec.language == "zh"]
BY_LENGTH = [f"{name}_e" for name, spec in SPECS.items() if spec.rows_e]
"""LongBench-E: the same tasks on rows that are spread evenly over three buckets of length."""
WORDS = {"en": ENGLISH, "zh": CHINESE, "e": BY_LENGTH, "all": [*SPECS]}
"""What may stand for several tasks."""
BUCKETS = ("0-4k", "4-8k", "8k+")


def spec(name: str) -> Spec:
    """Settings of a task; one of LongBench-E has those of its plain namesake."""
    return SPECS[name.removesuffix("_e")]


def whole(name: str) -> int:
    """Rows of a task's file."""
    return spec(name).rows_e if name.endswith("_e") else spec(name).rows


def bucket(length: int) -> str:
    """LongBench-E's bucket of a row's `length`, which counts words (of Chinese texts, characters)."""
    return BUCKETS[(length >= 4000) + (length >= 8000)]


def expand(names: Iterable[str]) -> list[str]:
    """Task names, with the words that stand for several spelled out.

    Raises:
        UserError: a name is unknown or comes twice, or there is none.
    """
    expanded = [task for name in names for task in WORDS.get(name, [name])]
    unknown = [name for name in expanded if name not in SPECS and name not in BY_LENGTH]
    if not expanded or unknown or len(set(expanded)) < len(expanded):
        raise UserError(
            f"task.subset must name some of {', '.join(WORDS)} or {', '.join([*SPECS, *BY_LENGTH])}, "
            f"each task once, not {list(names)}"
        )
    return expanded
