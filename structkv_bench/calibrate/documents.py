"""Prompts of several documents whose keywords are asked for: where each stands, and where it is said."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from structkv_bench.calibrate.corpus import TOPICS, Document, document
from structkv_bench.calibrate.prompts import ANSWERS, OWN, answered, fitting, found, laid, text_of
from structkv_bench.engine.method import check_choice
from structkv_bench.errors import UserError
from structkv_bench.prompts import TokenizerPrompts

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

QUERIES = ("before", "at")
QUESTION = (
    "How many documents are there above, and which are the keywords of each? Write in this form:\n"
    "There are N documents.\nDocument 1: keyword, keyword, keyword"
)


@dataclass(frozen=True)
class Said:
    """A token of a keyword in the answer."""

    step: int
    """Its number in the answer."""
    places: list[int]
    """Where the same token of the same keyword stands in its document, by place in the prompt."""


@dataclass(frozen=True)
class DocumentsRun:
    """One prompt with its answer."""

    ids: list[int]
    answer: list[int]
    chunks: list[list[Said]]
    """K_m: of each document, the tokens of its keywords that the answer says."""

    @property
    def valid(self) -> bool:
        """Whether the answer says a keyword of every document."""
        return all(self.chunks)


@dataclass(frozen=True)
class Documents:
    """Settings of the prompts."""

    source: str = OWN
    """Our own documents, or a JSON file with a list of {"text": ..., "keywords": [...]}."""
    lengths: list[int] = field(default_factory=lambda: [1024, 2048])
    """Tokens of prompt and answer at most, in turn; a user's documents are as long as they are."""
    chunks: int = 4
    """Documents in a prompt."""
    samples: int = 8
    answers: str = "forced"
    """forced: the right lists, whatever the model would say; generated: its own greedy answer."""
    new_tokens: int = 160
    """What a generated answer has at most; a forced one is as long as it is."""
    query: str = "before"
    """The query that says a token: the one `before` it, whose logits bring it forth, or the one `at` it."""

    def __post_init__(self) -> None:
        """Check what can be checked without a model."""
        check_choice("answers", self.answers, ANSWERS)
        check_choice("query", self.query, QUERIES)
        if self.samples < 1 or self.new_tokens < 1:
            raise UserError("samples and new_tokens: give 1 or more")
        if not 1 <= self.chunks <= TOPICS:
            raise UserError(f"chunks={self.chunks}: give 1 to {TOPICS}")

    def runs(self, model: Model) -> Iterator[DocumentsRun]:
        """Every run, one after the other.

        Raises:
            UserError: lengths that the model or the question has no room for, or a file that is no such list.
        """
        lengths = fitting(self.lengths, model)
        for number in range(self.samples):
            documents = self._documents(lengths[number % len(lengths)], model.prompts, number)
            yield self._run(model, documents)

    def _run(self, model: Model, documents: Sequence[Document]) -> DocumentsRun:
        pieces = [piece for i, each in enumerate(documents) for piece in _pieces(i, each)]
        prompt = laid(model.prompts, [*pieces, (QUESTION, "")])
        lists = (f"Document {i}: {', '.join(each.keywords)}" for i, each in enumerate(documents, 1))
        right = "\n".join([f"There are {len(documents)} documents.", *lists])
        answer = answered(model, prompt.ids, right, self.answers, self.new_tokens)
        if len(prompt.ids) + len(answer) > model.shape.max_positions:
            raise UserError(
                f"calibration={self.source}: {len(documents)} documents make {len(prompt.ids)} tokens, "
                f"the model has {model.shape.max_positions} positions"
            )
        chunks = [
            [
                said
                for word in each.keywords
                for said in _said(
                    model.prompts.encode(f" {word}"), answer, prompt.spans.get(f"{i} {word}", [])
                )
            ]
            for i, each in enumerate(documents)
        ]
        return DocumentsRun(prompt.ids, answer, chunks)

    def _documents(self, length: int, prompts: TokenizerPrompts, seed: int) -> list[Document]:
        rng = random.Random(f"chunks {seed}")
        if self.source != OWN:
            known = _from_file(self.source)
            if len(known) < self.chunks:
                raise UserError(f"calibration={self.source}: {len(known)} documents, chunks={self.chunks}")
            return rng.sample(known, self.chunks)
        taken = len(laid(prompts, [(QUESTION, "")]).ids) + self.new_tokens
        each = (length - taken) // self.chunks
        topics = rng.sample(range(TOPICS), self.chunks)
        documents = [_grown(topic, seed, each, prompts) for topic in topics]
        if not all(its.keywords for its in documents):
            raise UserError(
                f"calibration.lengths={length}: {taken} tokens of it are for question and answer, and "
                f"{self.chunks} documents have no room in the others"
            )
        return documents


def _grown(topic: int, seed: int, tokens: int, prompts: TokenizerPrompts) -> Document:
    """A document of up to so many tokens; an empty one where not a sentence fits."""
    longest = Document("", ())
    for grown in document(topic, seed):
        if len(prompts.encode(f"Document 1: {grown.text}\n\n")) > tokens:
            break
        longest = grown
    return longest


def _pieces(number: int, its: Document) -> Iterator[tuple[str, str]]:
    """A document, cut at its keywords; those after a space are marked."""
    yield f"Document {number + 1}:", ""
    words = "|".join(re.escape(word) for word in its.keywords)
    for part in re.split(rf"( (?:{words})\b)", f" {its.text}\n\n"):
        yield part, f"{number} {part[1:]}" if part[1:] in its.keywords else ""


def _said(word: list[int], answer: list[int], occurrences: Sequence[range]) -> list[Said]:
    """The tokens of a keyword where the answer first says it; none if it does not."""
    starts = found(word, answer)
    if not starts or not occurrences:
        return []
    return [
        Said(starts[0] + token, [occurrence[token] for occurrence in occurrences])
        for token in range(len(word))
    ]


def _from_file(source: str) -> list[Document]:
    try:
        return [_document(said) for said in json.loads(text_of(source))]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f'calibration={source}: not a JSON list of {{"text": ..., "keywords": [...]}} ({error})'
        ) from error


def _document(said: Any) -> Document:
    text, keywords = said["text"], said["keywords"]
    if not isinstance(text, str) or not isinstance(keywords, list) or not keywords:
        raise TypeError(f"text {text!r:.40}, keywords {keywords!r:.40}")
    if not all(isinstance(word, str) and word.strip() for word in keywords):
        raise TypeError(f"keywords {keywords!r:.40} are not words")
    return Document(text, tuple(keywords))
