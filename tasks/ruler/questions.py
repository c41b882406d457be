"""SQuAD and HotpotQA as RULER sees them: questions, and paragraphs that are documents to choose from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError, kind_and_line

from ..corpus import HubFile

SQUAD = HubFile(
    "rajpurkar/squad_v2",
    "3ffb306f725f7d2ce8394bc1873b24868140c412",
    "squad_v2/validation-00000-of-00001.parquet",
)
"""The content of dev-v2.0.json, one row per question."""
HOTPOT = HubFile(
    "hotpotqa/hotpot_qa",
    "1908d6afbbead072334abe2965f91bd2709910ab",
    "distractor/validation-00000-of-00001.parquet",
)
"""The content of hotpot_dev_distractor_v1.json."""


@dataclass(frozen=True)
class Question:
    """A question; documents are indices into those of the whole file."""

    text: str
    answers: tuple[str, ...]
    documents: list[int]
    """Those that its file gives it: one paragraph in SQuAD, ten in HotpotQA."""
    related: list[int]
    """The other paragraphs of the same article; none in HotpotQA."""


@dataclass(frozen=True)
class Questions:
    """The answerable questions of a file in file order, and its distinct documents in sorted order."""

    questions: list[Question]
    documents: list[str]


def read_squad(file: Path) -> Questions:
    """SQuAD v2 (or v1.1) JSON, or the hub's Parquet file.

    Raises:
        UserError: the file is not in either layout.
    """
    return _read(file, "SQuAD", _squad)


def read_hotpot(file: Path) -> Questions:
    """HotpotQA's JSON of the distractor setting, or the hub's Parquet file.

    Raises:
        UserError: the file is not in either layout.
    """
    return _read(file, "HotpotQA", _hotpot)


def _read(file: Path, layout: str, parse: Any) -> Questions:
    try:
        if file.suffix == ".parquet":
            import pandas  # here, as it takes a fifth of a second

            content: Any = pandas.read_parquet(file).to_dict("records")
        else:
            content = json.loads(file.read_text(encoding="utf-8"))
        questions: Questions = parse(content)
        if not questions.questions:
            raise ValueError("no question")
    except Exception as error:  # whatever a parser of damaged files raises
        raise UserError(f"{file} is not in the layout of {layout}: {kind_and_line(error)}") from error
    return questions


def _squad(content: Any) -> Questions:
    """From {"data": [article]}, or from one row per question."""
    articles = [
        [(_text(p["context"]), [_squad_question(row) for row in p["qas"]]) for p in article["paragraphs"]]
        for article in (content["data"] if isinstance(content, dict) else _articles(content))
    ]
    documents = sorted({context for article in articles for context, _ in article})
    place = {document: index for index, document in enumerate(documents)}
    questions = [
        Question(text, answers, [place[context]], [place[c] for c, _ in article if c != context])
        for article in articles
        for context, asked in article
        for text, answers in filter(None, asked)
    ]
    return Questions(questions, documents)


def _squad_question(row: dict[str, Any]) -> tuple[str, tuple[str, ...]] | None:
    """Question and answers (annotators often agree: repeats stay); None where it has no answer."""
    if row.get("is_impossible", False):
        return None
    return _text(row["question"]), _answers([answer["text"] for answer in row["answers"]])


def _articles(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hub's rows in the JSON's layout; there an empty list of answers marks the unanswerable."""

    def question(row: dict[str, Any]) -> dict[str, Any]:
        answers = [{"text": answer} for answer in row["answers"]["text"]]
        return {"question": row["question"], "answers": answers, "is_impossible": not answers}

    return [
        {
            "paragraphs": [
                {"context": context, "qas": [question(row) for row in same]}
                for context, same in groupby(article, key=lambda row: row["context"])
            ]
        }
        for _, article in groupby(rows, key=lambda row: row["title"])
    ]


def _hotpot(rows: Any) -> Questions:
    """From the JSON's pairs (title, sentences), or from the hub's two lists of them."""
    contexts = [
        [f"{_text(title)}\n{''.join(sentences)}" for title, sentences in _pairs(row["context"])]
        for row in rows
    ]
    documents = sorted({document for context in contexts for document in context})
    place = {document: index for index, document in enumerate(documents)}
    questions = [
        Question(_text(row["question"]), _answers([row["answer"]]), [place[d] for d in context], [])
        for row, context in zip(rows, contexts, strict=True)
    ]
    return Questions(questions, documents)


def _pairs(context: Any) -> list[Any]:
    if isinstance(context, dict):
        return list(zip(context["title"], context["sentences"], strict=True))
    return list(context)


def _answers(answers: Sequence[Any]) -> tuple[str, ...]:
    if not answers:
        raise ValueError("a question without an answer")
    return tuple(map(_text, answers))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is not text")
    return value
