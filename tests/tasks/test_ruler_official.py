"""RULER's data files: those of NVIDIA's generators byte for byte, and whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from structkv_bench.errors import UserError
from structkv_bench.tasks.ruler import Ruler
from structkv_bench.tasks.ruler.official import WordsFormat, write_official
from tests.shared import SHARED, shared
from tests.tasks.ruler_corpora import write_corpora

DATA = SHARED / "data"


@pytest.mark.parametrize(
    "subtask",
    [
        "niah_single_1",
        "niah_single_2",
        "niah_multikey_1",
        "niah_multikey_3",
        "vt",
        "cwe",
        "fwe",
        "qa_1",
    ],
)
def test_files_are_byte_equal_to_nvidias(subtask: str, tmp_path: Path) -> None:
    """Samples are those of NVIDIA's generators, so that scores compare to published ones."""
    golden = shared(f"data/ruler/upstream_golden/4096/{subtask}/validation.jsonl")
    ruler = Ruler(
        lengths=[4096],
        samples=5,
        essays=str(DATA / "essays" / "PaulGrahamEssays.json"),
        squad=str(DATA / "qa" / "xquad.en.json"),
        hotpot=str(DATA / "qa" / "hotpot_distractor_sample100.json"),
    )
    write_official(ruler, subtask, 4096, WordsFormat(), tmp_path / "new" / "validation.jsonl")
    assert (tmp_path / "new" / "validation.jsonl").read_bytes() == golden.read_bytes()


class Templated(WordsFormat):
    """A model's format: the official files leave its template and its BOS aside."""

    def render(self, prompt: object, answer_prefix: str, chat: bool = True) -> list[int]:
        raise AssertionError("the chat template was asked for")


def test_a_models_template_is_left_out(tmp_path: Path) -> None:
    """The official model template "base" is the bare task text, whatever counts the tokens."""
    for prompts, name in ((WordsFormat(), "words"), (Templated(), "model")):
        write_official(Ruler(lengths=[1024], samples=2), "vt", 1024, prompts, tmp_path / name)
    assert (tmp_path / "words").read_bytes() == (tmp_path / "model").read_bytes()


def test_non_ascii_text_is_escaped_as_nvidia_does(tmp_path: Path) -> None:
    """One row a line, whatever the documents hold."""
    corpora = write_corpora(tmp_path)
    squad = json.loads(Path(corpora["squad"]).read_text())
    squad["data"][0]["paragraphs"][0]["context"] = "Ktenó κτείς\u2028{braces} comb."
    Path(corpora["squad"]).write_text(json.dumps(squad))
    ruler = Ruler(lengths=[4096], samples=3, **corpora)
    write_official(ruler, "qa_1", 4096, WordsFormat(), tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out").read_bytes().split(b"\n")[:-1]]
    assert (tmp_path / "out").read_bytes().isascii()
    assert [row["index"] for row in rows] == [0, 1, 2]
    assert "κτείς\u2028{braces}" in rows[0]["input"]


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    """An error half-way can't leave a short file that reads as a whole one."""
    (tmp_path / "out").write_text("old")
    with pytest.raises(UserError):
        write_official(Ruler(lengths=[64], samples=1), "vt", 64, WordsFormat(), tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "old"


def test_words_are_words_and_marks() -> None:
    """The count that the golden files are made with; ids can be read back."""
    words = WordsFormat()
    assert words.decode(words.encode("It's 7_up - ok?")) == "It ' s 7_up - ok ?"
    assert len(words.encode("  \n")) == 0
    assert words.render("a b", " c") == words.render(tuple(words.encode("a b")), " c")
