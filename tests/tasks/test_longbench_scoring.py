"""LongBench's scores: those of the official code, quirks included, for any prediction, in bounded time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from structkv_bench.errors import UserError
from structkv_bench.tasks.longbench import chinese
from structkv_bench.tasks.longbench.averages import averages
from structkv_bench.tasks.longbench.catalog import ENGLISH, SPECS
from structkv_bench.tasks.longbench.official import score_folder, scored
from structkv_bench.tasks.longbench.rouge import rouge_l
from structkv_bench.tasks.longbench.scoring import score
from tests.shared import shared

ONE_OF_EACH = [
    *("narrativeqa", "gov_report", "samsum", "trec", "passage_count", "passage_retrieval_en", "lcc"),
    *("multifieldqa_zh", "vcsum", "passage_retrieval_zh"),
]
"""A task of each metric, and samsum for its first line."""
GOLDS = {"passage_retrieval_en": "Paragraph 3", "passage_retrieval_zh": "段落3"}
CLASSES = ("Food", "Date", "的")


def judged(task: str, prediction: str, *golds: str, classes: tuple[str, ...] = CLASSES) -> float:
    return score(SPECS[task], prediction, golds or (GOLDS.get(task, "the cat. sat on 3 mats"),), classes)


def write(folder: Path, name: str, *rows: Any) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def row(pred: str = "cat", answers: Any = ("cat",), **fields: Any) -> dict[str, Any]:
    return {"pred": pred, "answers": answers, "all_classes": None, "length": 10, **fields}


@pytest.mark.parametrize("model", ["llama2-7b-chat-4k", "qwen3-8b"])
def test_the_official_results_come_out(model: str) -> None:
    """All 21 scores of a folder of official predictions are those of its result.json, in seconds."""
    folder = shared(f"data/longbench_pred/{model}")
    started = time.perf_counter()
    found = scored(folder)
    assert time.perf_counter() - started < 30
    assert found.scores == json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert list(found.scores) == list(SPECS)
    assert found.shortfalls == []


def test_scoring_needs_no_torch() -> None:
    """A folder can be scored where there is no torch, or no time to import it."""
    code = "import sys, structkv_bench.tasks.longbench.averages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("task", "prediction", "golds", "expected"),
    [
        ("qasper", "The cat, sat!", ("cat sat",), 1),
        ("qasper", "the-end", ("end",), 0),  # punctuation goes before articles
        ("qasper", "“cat”", ("cat",), 0),  # only ASCII punctuation goes
        ("qasper", "the", ("a",), 0),  # nothing is left of both
        ("qasper", "no", ("yes", "no"), 1),  # the best gold counts
        ("qasper", "cat cat dog", ("cat",), 0.5),  # a bag of words, not a set
        ("qasper", "\nno", ("no",), 1),
        ("triviaqa", "\n\ncat\ndog", ("cat",), 1),
        ("triviaqa", " \ncat", ("cat",), 0),  # of the first line only line breaks are stripped
        ("multifieldqa_zh", "厦门大学", ("厦门大学。",), 1),
        ("passage_count", "There are 4 or 5", ("5",), 0.5),
        ("passage_count", "five", ("5",), 0),
        ("passage_count", "05", ("5",), 0),
        ("passage_retrieval_en", "Paragraph 3 of 30", ("Paragraph 3",), 0.5),
        ("passage_retrieval_zh", "段落27", ("段落27",), 1),
        ("lcc", "\n# c\n```python\n  x = 1\ny", ("  x = 1",), 1),
        ("lcc", "x = 1", ("  x = 1",), 0.83),  # indentation is compared
        ("lcc", "\n\n   \nx = 1", ("x = 1",), 0.5),  # a line of spaces is the first line
        ("lcc", "`", ("",), 1),
        ("lcc", "", ("x",), 0),
        ("gov_report", "", ("x",), 0),
        ("gov_report", "...", ("x",), 0),
    ],
)
def test_metric(task: str, prediction: str, golds: tuple[str, ...], expected: float) -> None:
    """Each metric has the official value, to two decimals, where implementations differ."""
    assert round(judged(task, prediction, *golds), 2) == expected


def test_a_second_reference_counts() -> None:
    """The second of two references matches: 1, not 0."""
    assert judged("hotpotqa", "Paris", "London", "Paris") == 1


def test_only_the_first_line_of_a_class_counts() -> None:
    """Classes of the examples that a model goes on to invent don't divide the score."""
    classes = ("location", "foo")
    assert judged("trec", "\nlocation\nfoo", "location", classes=classes) == 1
    assert judged("trec", "location foo", "location", classes=classes) == 0.5


def test_a_class_is_removed_as_the_official_code_removes_it() -> None:
    """Removal during iteration skips a class: 0.5, where a clean version would have 1."""
    assert judged("trec", "a b", "a b", classes=("a b", "a", "b")) == 0.5


def test_code_similarity_is_that_of_difflib() -> None:
    """Not of Levenshtein, which gives 48 here."""
    assert judged("lcc", "LONGaabbcc", "aXaXbXbXcXcLONG") == 0.32


WORDS = st.text(st.sampled_from("ab. \n"), max_size=60) | st.text(max_size=20)


@given(prediction=WORDS, gold=WORDS)
@example(prediction=" . ", gold=".  .a")
@example(prediction="a b c. b c a. d", gold="c b a. a b. d c")
def test_rouge_is_that_of_the_package(prediction: str, gold: str) -> None:
    """The number is the one of PyPI rouge 1.0.1 to the last bit, its exceptions 0."""
    package = pytest.importorskip("rouge")
    try:
        expected = package.Rouge().get_scores([prediction], [gold], avg=True)["rouge-l"]["f"]
    except (ValueError, AssertionError):
        expected = 0.0
    assert rouge_l(prediction, gold) == expected


@pytest.mark.parametrize(("task", "word", "most"), [("gov_report", "x ", 990), ("vcsum", "，", 989)])  # noqa: RUF001
def test_rouge_of_too_long_a_sentence_is_0(task: str, word: str, most: int) -> None:
    """Where the package's recursion ends under eval.py (measured, CPython 3.11), so does the score.

    One more step than `most` is too long; the walk has one for each word that is equal, or that has
    nothing in common with the other side. jieba puts a space between marks, so each is a word.
    """
    assert judged(task, word * most, word * most) > 0.99
    assert judged(task, word * (most + 1), word * (most + 1)) == 0
    assert judged(task, "same. " + word * (most + 1), "same. other") == 0


@given(
    st.text(
        st.sampled_from("的了人大学厦门我来到北京清华一丁丂") | st.characters(max_codepoint=0x9FFF),
        min_size=1,
    )
)
def test_chinese_words_are_those_of_jieba(text: str) -> None:
    """Our way through its tables is the one that jieba's own function finds."""
    chinese.words("")  # ours is in place now
    from jieba import finalseg

    path = Path(finalseg.__file__)
    spec = importlib.util.spec_from_file_location(
        "jieba.pristine", path, submodule_search_locations=[str(path.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    if "jieba.pristine" not in sys.modules:
        sys.modules["jieba.pristine"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["jieba.pristine"])
    pristine = sys.modules["jieba.pristine"].viterbi
    tables = finalseg.start_P, finalseg.trans_P, finalseg.emit_P
    assert chinese.viterbi is not pristine
    assert chinese.viterbi(text, "BMES", *tables) == pristine(text, "BMES", *tables)


ANYTHING = (
    st.text()
    | st.text(st.sampled_from("\n{}`#/.01 a的。"))
    | st.text(st.characters(categories=["Cs", "Nd", "Lo"]))
)


@pytest.mark.parametrize("task", ONE_OF_EACH)
@settings(deadline=None)
@given(prediction=ANYTHING)
def test_any_prediction_has_a_score(task: str, prediction: str) -> None:
    """Any Unicode gives a number from 0 to 1, never an exception."""
    assert 0 <= judged(task, prediction) <= 1


@pytest.mark.parametrize("task", ONE_OF_EACH)
@pytest.mark.parametrize(
    "unit", ["", "x", "\n", "{}", "{input}", "a. ", "w 1 ", "的", "是的。", "\U0001f600", "`\n"]
)
def test_a_long_prediction_is_scored_in_time(task: str, unit: str) -> None:
    """100,000 characters of whatever a model repeats take seconds at most, also against a long gold."""
    prediction = unit * (100_000 // max(len(unit), 1))
    gold = GOLDS.get(task, "the cat 的 sat. on 3 mats " * 40)
    started = time.perf_counter()
    assert 0 <= judged(task, prediction, gold) <= 1
    assert time.perf_counter() - started < 10


def test_buckets_of_a_length_file(tmp_path: Path) -> None:
    """A LongBench-E file has a score for each bucket of length; an empty bucket is None, not NaN."""
    rows = [row(length=3999), row("dog", length=4000), row(length=7999)]
    write(tmp_path, "qasper_e.jsonl", *rows)
    expected = {"0-4k": 100.0, "4-8k": 50.0, "8k+": None}
    assert score_folder(tmp_path) == {"qasper_e": expected}
    (tmp_path / "qasper_e.jsonl").rename(tmp_path / "qasper.jsonl")
    assert score_folder(tmp_path, by_length=True) == {"qasper_e": expected}
    assert score_folder(tmp_path) == {"qasper": 66.67}


def test_classes_are_those_of_the_last_row(tmp_path: Path) -> None:
    """As in eval.py, which reads all_classes again at every line."""
    rows = [row("a b", ["a"], all_classes=["a", "b"]), row("a", ["a"], all_classes=["a"])]
    write(tmp_path, "trec.jsonl", *rows)
    assert score_folder(tmp_path) == {"trec": 100.0}


def test_a_file_of_too_few_rows_is_told_of(tmp_path: Path) -> None:
    """Its score is there, and so is a line that says that it is not the whole task's."""
    write(tmp_path, "qasper.jsonl", row(), row("dog"))
    assert scored(tmp_path).scores == {"qasper": 50.0}
    assert scored(tmp_path).shortfalls == ["qasper: 2 rows, the task has 200"]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("qasper.jsonl", [row(), "{"], "qasper.jsonl: line 2: not JSON"),
        ("qasper.jsonl", [row(), "", "[1]"], "qasper.jsonl: line 3: must be a JSON object, not list"),
        ("qasper.jsonl", ["[" * 100_000], "line 1: not JSON"),
        ("qasper.jsonl", [" "], "qasper.jsonl: the file is empty"),
        ("qasper.jsonl", [row(), {"answers": ["a"]}], "line 2: no field pred"),
        ("qasper.jsonl", [{"pred": "a"}], "line 1: no field answers"),
        ("qasper.jsonl", [row(answers="cat")], "line 1: answers must be a list of texts, not str"),
        ("qasper.jsonl", [row(answers=[1])], "line 1: answers must be a list of texts"),
        ("qasper.jsonl", [{**row(), "pred": None}], "line 1: pred must be text, not NoneType"),
        ("qasper.jsonl", [row(_id="x"), row(_id="x")], "line 2: id 'x' is also that of"),
        ("qasper_e.jsonl", [row(length="9")], "line 1: length must be a whole number, not str"),
        ("trec.jsonl", [row()], "line 1: all_classes must be a list of texts, not NoneType"),
        ("trec.jsonl", [row(all_classes=[])], "line 1: all_classes must list"),
        ("passage_retrieval_en.jsonl", [row()], "line 1: answer 'cat' names no paragraph"),
        ("qsper.jsonl", [row()], "no task of that name"),
        ("readme.md", ["x"], "no <task>.jsonl in it"),
    ],
)
def test_bad_prediction_files(name: str, rows: list[Any], message: str, tmp_path: Path) -> None:
    """One unsound file of a folder is an error that names file and line, and nothing is scored."""
    write(tmp_path, name, *rows)
    with pytest.raises(UserError) as error:
        score_folder(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_predictions_that_are_not_there_or_not_utf8(tmp_path: Path) -> None:
    """No such folder, and a file in another encoding, are one line each."""
    with pytest.raises(UserError, match="give the folder of prediction files"):
        score_folder(tmp_path / "none")
    (tmp_path / "qasper.jsonl").write_bytes(json.dumps(row()).encode() + b'\n{"pred": "caf\xe9"}\n')
    with pytest.raises(UserError, match=r"qasper\.jsonl: line 2: not UTF-8"):
        score_folder(tmp_path)


def test_both_averages_are_labelled() -> None:
    """The plain mean of 16 tasks, and the mean of six category means, which weighs a code task more."""
    scores = dict.fromkeys(ENGLISH, 0.0) | {"lcc": 60.0, "narrativeqa": 60.0}
    assert averages(scores) == {
        "avg16 (plain mean of the 16 English tasks)": 7.5,
        "official (mean of category means)": 8.33,
    }
    assert averages({}) == {}


def test_an_average_over_some_tasks_says_so() -> None:
    """No partial average carries the name of the whole one; buckets of LongBench-E are in none."""
    found = averages({"qasper": 20.0, "hotpotqa": 40.0, "lsht": 10.0, "qasper_e": {"0-4k": 1.0}})
    assert found == {
        "avg16 (plain mean of the 16 English tasks), 2 of 16 tasks": 30.0,
        "official (mean of category means), 2 of 16 tasks": 30.0,
        "official zh (mean of category means), 1 of 7 tasks": 10.0,
    }
