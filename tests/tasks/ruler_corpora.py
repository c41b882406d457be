"""Small made-up essays and question files in the official layouts, so that RULER's tests need no download."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

from structkv_bench.task import Sample
from structkv_bench.tasks.ruler import Ruler
from structkv_bench.tasks.ruler.data import wonderwords
from structkv_bench.tasks.ruler.official import WordsFormat

NEED_TEXTS = {
    "niah_single_2": "essays",
    "niah_single_3": "essays",
    "niah_multikey_1": "essays",
    "niah_multivalue": "essays",
    "niah_multiquery": "essays",
    "qa_1": "squad",
    "qa_2": "hotpot",
}


def write_corpora(folder: Path) -> dict[str, str]:
    """The settings of Ruler that name them."""
    rng = random.Random(0)
    sentences = partial(_sentences, rng)
    (folder / "essays.json").write_text(json.dumps({"text": "\n\n".join(sentences(20) for _ in range(40))}))
    articles = [
        {"title": f"Article {a}", "paragraphs": [_paragraph(f"{a}{p}", sentences(4)) for p in range(5)]}
        for a in range(6)
    ]
    (folder / "squad.json").write_text(json.dumps({"version": "made up", "data": articles}))
    rows = [
        {
            "question": f"What is hot {q}?",
            "answer": f"pot {q}",
            "context": [[f"Title {q} {d}", [f"{sentences(1)} ", sentences(2)]] for d in range(10)],
        }
        for q in range(12)
    ]
    (folder / "hotpot.json").write_text(json.dumps(rows))
    return {name: str(folder / f"{name}.json") for name in ("essays", "squad", "hotpot")}


def _sentences(rng: random.Random, count: int) -> str:
    nouns = wonderwords("noun")
    return " ".join(" ".join(rng.choices(nouns, k=12)).capitalize() + "." for _ in range(count))


def _paragraph(name: str, text: str) -> dict[str, Any]:
    """A paragraph with a question that has answers (two the same) and one that has none."""
    answers = [{"text": text.split()[0], "answer_start": 0}] * 2
    asked = {"question": f"What begins {name}?", "answers": answers, "is_impossible": False}
    idle = {"question": f"What ends {name}?", "answers": [], "is_impossible": True}
    return {"context": text, "qas": [asked, idle]}


def build(subtask: str, length: int, corpora: dict[str, str], **settings: Any) -> list[Sample]:
    """Samples of one subtask, two unless `samples` says otherwise."""
    ruler = Ruler(lengths=[length], **{"samples": 2, **corpora, **settings})
    return ruler.build(subtask, length, WordsFormat())


def used(sample: Sample) -> int:
    """Tokens of prompt, prefix and answer room, as WordsFormat counts them."""
    return len(WordsFormat().render(sample.prompt, sample.answer_prefix)) + sample.max_new_tokens
