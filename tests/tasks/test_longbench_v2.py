"""LongBench v2: official prompt, extraction and averages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.tasks.longbench import LongBenchV2
from structkv_bench.tasks.longbench.source import Record
from structkv_bench.tasks.longbench.v2 import QUESTIONS, TEMPLATE, answer, averages, fill
from tests.shared import shared

SAMPLE = "data/longbench_v2/sample/longbench_v2_sample8.json"


class Characters:
    """A tokenizer of characters, without BOS or template."""

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))

    def render(self, prompt: Any, answer_prefix: str, chat: bool = True) -> list[int]:
        return self.encode(prompt + answer_prefix) if isinstance(prompt, str) else list(prompt)


def question(**fields: Any) -> dict[str, Any]:
    texts = {f"choice_{x}": f" {x}! " for x in "ABCD"} | {"question": "Why?\n", "context": " Text "}
    return texts | {"_id": "x", "answer": "C", "difficulty": "easy", "length": "long", "domain": "d"} | fields


def build(path: Path, *questions: Any, length: int = 9000, **settings: Any) -> Any:
    (path / "data.json").write_text(json.dumps(questions), encoding="utf-8")
    task = LongBenchV2(lengths=[length], samples=503, source=str(path), **settings)
    return task.build("longbench_v2", length, Characters())


def test_the_template_is_the_official_one() -> None:
    """Byte for byte."""
    assert shared("data/longbench_v2/prompts/0shot.txt").read_text(encoding="utf-8") == TEMPLATE


def test_a_sample(tmp_path: Path) -> None:
    """Texts are stripped; the reference is a letter; rows can be grouped by difficulty, length and domain."""
    [sample] = build(tmp_path, question())
    assert "<text>\nText\n</text>\n\nWhat is the correct answer to this question: Why?\n" in sample.prompt
    assert "(C) C!\n(D) D!\n\nFormat" in sample.prompt
    assert (sample.id, sample.references, sample.max_new_tokens) == ("x", ("C",), 128)
    assert sample.fields == {"difficulty": "easy", "length": "long", "domain": "d"}


@given(text=st.text(st.sampled_from("$QDOC_A {}\\g<0>1")))
def test_texts_are_inserted_verbatim(text: str) -> None:
    """A context or a choice that looks like a place of the template is not one."""
    text = f"|$Q${text}$C_A$|"
    whole, context_end = fill(Record("", question(context=text, choice_B=text)))
    assert whole[:context_end].endswith(f"<text>\n{text}")
    assert f"(B) {text}\n(C) C!" in whole[context_end:]


@pytest.mark.parametrize("length", [300, 301])
def test_the_middle_is_cut_out(length: int, tmp_path: Path) -> None:
    """First and last half of the ids, the longer half last; template and answer are not counted."""
    [whole] = build(tmp_path, question(context="0123456789" * 90))
    [cut] = build(tmp_path, question(context="0123456789" * 90), length=length)
    assert cut.prompt == whole.prompt[: length // 2] + whole.prompt[-(length - length // 2) :]
    assert cut.truncated_tokens == len(whole.prompt) - length
    [exact] = build(tmp_path, question(context="0123456789" * 90), length=length, truncation="ids")
    assert len(exact.prompt) == length - 128
    [split] = build(tmp_path, question(context="0" * 900), length=700, query_aware=False)
    assert split.prompt[split.question_at :].startswith("\n</text>\n\nWhat is the correct answer")


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (B)**", "B"),
        ("The correct answer is B, not (C)", "B"),
        ("The correct answer is A. The correct answer is (B)", "B"),
        ("The correct answer is (E)", None),
        ("the correct answer is (A)", None),
        ("A", None),
        ("", None),
    ],
)
def test_the_letter_of_an_answer(prediction: str, letter: str | None) -> None:
    """In brackets or else bare, asterisks ignored; anything but the words asked for is wrong."""
    assert answer(prediction) == letter


@given(st.text() | st.text(st.sampled_from("The correct answer is (A)*\n")))
def test_any_prediction_has_a_score(prediction: str) -> None:
    """0 or 1, never an exception."""
    assert answer(prediction) in (None, "A")


def test_a_score_is_0_or_1(tmp_path: Path) -> None:
    """Of the gold letter alone."""
    [sample] = build(tmp_path, question())
    task = LongBenchV2(lengths=[9], samples=1)
    assert task.score("longbench_v2", sample, "The correct answer is (C)") == 1
    assert task.score("longbench_v2", sample, "The correct answer is (A), not C") == 0


def test_averages_have_one_decimal_and_say_what_is_missing() -> None:
    """Overall and by group; over some of the questions the name says so, a group without any is left out."""
    easy = {"difficulty": "easy", "length": "short"}
    rows = [(easy, float(i == 0)) for i in range(192)]
    rows += [({"difficulty": "hard", "length": "short"}, 0.0) for _ in range(311)]
    found = averages(rows)
    assert found["overall"] == 0.2
    assert (found["easy"], found["hard"]) == (0.5, 0.0)
    assert list(averages([(easy, 1.0)])) == [
        "overall, 1 of 503 questions",
        "easy, 1 of 192 questions",
        "short, 1 of 180 questions",
    ]
    assert QUESTIONS["easy"] + QUESTIONS["hard"] == QUESTIONS["overall"] == 503
    assert QUESTIONS["short"] + QUESTIONS["medium"] + QUESTIONS["long"] == 503


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "must be a JSON list of questions"),
        ([question(), 3], "item 2: must be a JSON object"),
        ([{"_id": "x"}], "item 1: no field difficulty"),
        ([question(choice_B=1)], "item 1: choice_B must be text, not int"),
        ([question(answer="AB")], "item 1: answer must be one of A, B, C and D"),
        ([question(length="tiny")], "item 1: difficulty or length is none of"),
        ([question(context="\ud800")], "half a surrogate pair"),
        ([question(), question()], "item 2: id 'x' is also that of"),
    ],
)
def test_bad_questions(questions: list[Any], message: str, tmp_path: Path) -> None:
    """A file that is not sound is one line that names file and item."""
    with pytest.raises(UserError, match=message) as error:
        build(tmp_path, *questions)
    assert str(tmp_path / "data.json") in str(error.value)


def test_without_network_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names data set, revision and the command that fetches it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    task = LongBenchV2(lengths=[9], samples=1)
    with pytest.raises(UserError, match=f"THUDM/LongBench-v2 .*{task.revision}.*fetch task=longbench_v2"):
        task.build("longbench_v2", 9, Characters())


def test_real_questions_build_samples() -> None:
    """Eight real ones, from the file itself."""
    path = shared(SAMPLE)
    task = LongBenchV2(lengths=[4000], samples=503, source=str(path))
    samples = task.build("longbench_v2", 4000, Characters())
    assert len(samples) == 8
    assert all(len(sample.prompt) <= 4000 for sample in samples)
    assert list(task.sources("longbench_v2")) == [str(path)]


def test_the_config_is_the_whole_set() -> None:
    """task=longbench_v2 is all 503 questions."""
    [setup] = compose(["task=longbench_v2", "method=full"])
    assert setup.task == LongBenchV2(lengths=[7500], samples=503)
