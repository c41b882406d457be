"""A needle test on texts of our own: where in the prompt the answer stands, and how well it was given."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from structkv_bench.calibrate.corpus import NEEDLES, Needle, sentences
from structkv_bench.calibrate.prompts import ANSWERS, OWN, Laid, answered, filled, fitting, laid, text_of
from structkv_bench.engine.method import check_choice
from structkv_bench.errors import UserError

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model


@dataclass(frozen=True)
class NeedleRun:
    """One prompt with its answer."""

    ids: list[int]
    """Of the prompt."""
    needle: range
    """Where in it the needle stands."""
    answer: list[int]
    recall: float
    """ROUGE-1 recall of the right answer's words, from 0 to 1."""

    @property
    def steps(self) -> list[int]:
        """The tokens of the answer that are the needle's too, by number."""
        its = {self.ids[place] for place in self.needle}
        return [step for step, token in enumerate(self.answer) if token in its]


@dataclass(frozen=True)
class Needles:
    """Settings of the test: every length with every depth, the needles in turn."""

    source: str = OWN
    """Of the text around the needles: our own, or a text file."""
    lengths: list[int] = field(default_factory=lambda: [512, 1024, 2048])
    """Tokens of prompt and answer."""
    depths: int = 5
    """From the beginning to the end of the text."""
    needles: int = 3
    """How many different ones."""
    answers: str = "generated"
    """generated: what the model says greedily; forced: the right answer, whatever it would say."""
    above_recall: float = 0.5
    """A run counts if its recall is above this."""
    new_tokens: int = 24
    """Of a generated answer, at most."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        check_choice("answers", self.answers, ANSWERS)
        if self.depths < 1 or self.new_tokens < 1:
            raise UserError("depths and new_tokens: give 1 or more")
        if not 0 <= self.above_recall < 1:
            raise UserError(f"above_recall={self.above_recall}: give a share from 0 to below 1")
        if not 1 <= self.needles <= len(NEEDLES):
            raise UserError(f"needles={self.needles}: give 1 to {len(NEEDLES)}")

    def runs(self, model: Model) -> Iterator[NeedleRun]:
        """Every run, one after the other.

        Raises:
            UserError: lengths that the model, the text or the question has no room for.
        """
        number = 0
        for length in fitting(self.lengths, model):
            for depth in range(self.depths):
                needle = NEEDLES[number % self.needles]
                prompt = self._prompt(model, needle, length, depth / max(1, self.depths - 1), number)
                right = f" {needle.answer}"
                answer = answered(model, prompt.ids, right, self.answers, self.new_tokens)
                recall = rouge1_recall(needle.answer, model.prompts.decode(answer))
                yield NeedleRun(prompt.ids, prompt.spans["needle"][0], answer, recall)
                number += 1

    def _prompt(self, model: Model, needle: Needle, length: int, depth: float, seed: int) -> Laid:
        encoded = len(model.prompts.encode(needle.answer))
        taken = len(_laid(model, needle, "", "").ids) + max(self.new_tokens, encoded)
        if length <= taken:
            raise UserError(f"calibration.lengths={length}: {taken} tokens of it are for question and answer")
        source = sentences(seed) if self.source == OWN else _from_file(self.source, seed)
        text = filled(source, length - taken, model.prompts, self.source)
        place = round(depth * len(text))
        return _laid(model, needle, "".join(text[:place]), "".join(text[place:]))


def _laid(model: Model, needle: Needle, before: str, after: str) -> Laid:
    """A prompt with the needle between two texts, whose answer opens as the needle does."""
    pieces = [
        ("Here is a text. A question about it follows.\n\n", ""),
        (before, ""),
        (f" {needle.opening} {needle.answer}", "needle"),
        (after, ""),
        (f"\n\nQuestion: {needle.question} Answer with what the text says.", ""),
    ]
    return laid(model.prompts, pieces, needle.opening)


def rouge1_recall(right: str, said: str) -> float:
    """Share of the right answer's words that were said."""
    from rouge_score.rouge_scorer import RougeScorer

    score = RougeScorer(["rouge1"]).score(right, said)["rouge1"]
    return float(score.recall)


def _from_file(source: str, seed: int) -> Iterator[str]:
    """The sentences of a user's text, from another place for each seed."""
    every = re.split(r"(?<=[.!?])\s+", text_of(source).strip())
    start = random.Random(seed).randrange(len(every))
    yield from every[start:] + every[:start]
