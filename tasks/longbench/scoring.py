"""LongBench's own metrics, quirks included: a score from here is the one of the official eval.py."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from . import chinese
from .catalog import Spec
from .rouge import LONGEST_WALK, rouge_l

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DROP = str.maketrans("", "", string.punctuation)
_CHINESE_MARKS = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、"  # noqa: RUF001
    "〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_DROP_ZH = str.maketrans("", "", string.punctuation + _CHINESE_MARKS)
_PARAGRAPH = {"retrieval": re.compile(r"Paragraph (\d+)"), "retrieval_zh": re.compile(r"段落(\d+)")}


def score(spec: Spec, prediction: str, golds: Sequence[str], classes: Sequence[str]) -> float:
    """Official score of one prediction: its best against any gold, from 0 to 1.

    Args:
        spec: the task.
        prediction: as the model gave it; only the line breaks before a first line are ever stripped.
        golds: each right by itself; with none of them the score is 0.
        classes: names to choose from, where the task is a classification.
    """
    if spec.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((_metric(spec.metric, prediction, gold, classes) for gold in golds), default=0.0)


def unscorable(spec: Spec, golds: Sequence[str], classes: Sequence[str]) -> str | None:
    """What the metric of a task can't work with in a row; the official code ends in a traceback there."""
    if spec.metric == "classification" and not classes:
        return "all_classes must list the names of the classes"
    if pattern := _PARAGRAPH.get(spec.metric):
        return next(
            (f"answer {gold!r} names no paragraph" for gold in golds if not pattern.search(gold)), None
        )
    return None


def _metric(name: str, prediction: str, gold: str, classes: Sequence[str]) -> float:
    match name:
        case "qa_f1":
            return _f1(_qa_words(prediction), _qa_words(gold))
        case "qa_f1_zh":
            return _f1(_qa_words_zh(prediction), _qa_words_zh(gold))
        case "rouge_l":
            return rouge_l(prediction, gold)
        case "rouge_l_zh":
            prediction, gold = (" ".join(chinese.words(text)) for text in (prediction, gold))
            # One function more on the official scorer's stack is one step less for its recursion.
            return rouge_l(prediction, gold, LONGEST_WALK - 1)
        case "classification":
            return _classification(prediction, gold, classes)
        case "count":
            return _share_of_numbers(prediction, gold)
        case "code_sim":
            return _code_similarity(prediction, gold)
        case _:
            return _share_of_numbers(prediction, _PARAGRAPH[name].findall(gold)[0])


def _f1(prediction: list[str], gold: list[str]) -> float:
    """F1 of two bags of words."""
    shared = (Counter(prediction) & Counter(gold)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def _qa_words(text: str) -> list[str]:
    """Punctuation goes before articles do, so "the-end" is one word; only ASCII marks go."""
    return _ARTICLES.sub(" ", text.lower().translate(_DROP)).split()


def _qa_words_zh(text: str) -> list[str]:
    cleaned = ("".join(word.lower().translate(_DROP_ZH).split()) for word in chinese.words(text))
    return [word for word in cleaned if word]


def _classification(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """1 / the number of classes that the prediction names, if the right one is among them."""
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in gold and name != gold:
            named.remove(name)  # the loop then skips the next name, as the official one does
    return 1.0 / len(named) if gold in named else 0.0


def _share_of_numbers(prediction: str, gold: str) -> float:
    """Share of a prediction's numbers that are the right one, as it is written."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def _code_similarity(prediction: str, gold: str) -> float:
    """Whole percent, by difflib, of the first line that is not a comment or a fence; indentation counts.

    fuzzywuzzy's ratio without python-Levenshtein, whose numbers are some two points higher.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if line == gold:
        return 1.0
    matcher = SequenceMatcher(None, line, gold)
    # The bound costs nothing, and keeps lines that are much too long from hours of matching.
    possible = round(100 * matcher.real_quick_ratio())
    return round(100 * matcher.ratio()) / 100 if possible else 0.0
