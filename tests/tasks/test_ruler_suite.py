"""RULER's scores and settings: the official quirks stay, and what is wrong is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from structkv_bench.errors import UserError
from structkv_bench.task import Sample
from structkv_bench.tasks.ruler import Ruler
from structkv_bench.tasks.ruler.official import WordsFormat

CONFIG = Path(__file__).parents[2] / "conf" / "task" / "ruler.yaml"


def sample(*references: str) -> Sample:
    return Sample(id="0000", prompt="", references=references, max_new_tokens=1)


@pytest.mark.parametrize(
    ("subtask", "references", "prediction", "score"),
    [
        ("vt", ("12345",), "12\n345", 0.0),
        ("vt", ("12345",), "12\x00345", 0.0),
        ("vt", ("12345",), "\n the number is 12345.\n", 1.0),
        ("vt", ("12345",), "9123456", 1.0),
        ("vt", ("ABC", "xyz"), "abc", 0.5),
        ("cwe", ("be", "art"), "the best party", 1.0),
        ("cwe", ("be",), "", 0.0),
        ("qa_1", ("ABC", "xyz"), "abc", 1.0),
        ("qa_2", ("no",), "I do not know", 1.0),
        ("qa_2", ("yes",), "no", 0.0),
    ],
)
def test_score_has_the_official_quirks(
    subtask: str, references: tuple[str, ...], prediction: str, score: float
) -> None:
    """Case-insensitive substrings count, inside words too; control characters part one; qa needs one."""
    assert Ruler(lengths=[4096], samples=1).score(subtask, sample(*references), prediction) == score


@given(st.text(), st.sampled_from(["cwe", "qa_1"]))
def test_any_prediction_has_a_score(prediction: str, subtask: str) -> None:
    """No Unicode text breaks the scorer or leaves the range from 0 to 1."""
    assert 0 <= Ruler(lengths=[4096], samples=1).score(subtask, sample("be", "İ", "12"), prediction) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "task.lengths must list"),
        ({"lengths": [0]}, "task.lengths must list"),
        ({"lengths": [4096, 4096]}, "task.lengths must list"),
        ({"samples": 0}, "task.samples must be 1 or more, not 0"),
        ({"subset": ["vt", "qa_9"]}, "task.subset must name some of niah_single_1, .*, qa_2, each once"),
        ({"subset": []}, "task.subset must name some of"),
        ({"subset": ["vt", "vt"]}, "task.subset must name some of"),
        ({"seed": -1}, "task.seed must be from 0"),
        ({"fit": "loose"}, "task.fit must be upstream or tight, not 'loose'"),
        ({"missing": "ask"}, "task.missing must be skip or error, not 'ask'"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], message: str) -> None:
    """Every bad setting gives one line that says what would be right."""
    with pytest.raises(UserError, match=message):
        Ruler(**{"lengths": [4096], "samples": 1, **settings})


def test_config_lists_every_field_with_its_default() -> None:
    """The file under conf/ shows all settings, and agrees with the class."""
    config = OmegaConf.load(CONFIG)
    assert isinstance(config, DictConfig)
    assert CONFIG.read_text().startswith("# ")
    assert config.pop("_target_") == "structkv_bench.tasks.ruler.Ruler"
    assert config == {**OmegaConf.structured(Ruler(lengths=[4096], samples=20))}


@pytest.mark.parametrize("subtask", ["niah_single_1", "niah_multikey_2", "vt", "cwe", "fwe"])
def test_a_context_compressed_first_ends_before_the_question(subtask: str) -> None:
    """query_aware=false changes no text: the prompt is cut where the template's question begins."""
    aware = Ruler(lengths=[2048], samples=2, subset=[subtask])
    blind = replace(aware, query_aware=False)
    for one, other in zip(
        *(task.build(subtask, 2048, WordsFormat()) for task in (aware, blind)), strict=True
    ):
        assert one.prompt == other.prompt
        assert one.question_at is None
        question = str(other.prompt)[other.question_at :]
        assert question.startswith(("\nWhat is the special magic", "\nQuestion: "))
        assert len(question) < 250


def test_a_prefix_in_the_user_turn_and_another_answer_room() -> None:
    """What some harnesses do to RULER: the same samples, fed and continued in another way."""
    official = Ruler(lengths=[2048], samples=1, subset=["vt"])
    [ours] = official.build("vt", 2048, WordsFormat())
    [theirs] = replace(official, prefix_in="user", answer_room=64).build("vt", 2048, WordsFormat())
    assert theirs.prompt == f"{ours.prompt}{ours.answer_prefix}"
    assert (theirs.answer_prefix, theirs.max_new_tokens) == ("", 64)
