"""RULER: the samples are NVIDIA's, a length is kept, and the official score keeps its quirks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from structkv_bench.errors import UserError
from structkv_bench.task import Sample
from structkv_bench.tasks.ruler import Ruler
from structkv_bench.tasks.ruler.data import SUBTASKS, WordPairs

GOLDEN = Path(__file__).parents[3] / "shared" / "data" / "ruler" / "upstream_golden" / "4096"
CONFIG = Path(__file__).parents[2] / "conf" / "task" / "ruler.yaml"
NIAH = ("niah_single_1", "niah_multikey_2", "niah_multikey_3")

# Of the first three samples at 2048 tokens, counted by Words.
DIGESTS = {
    "niah_single_1": "0ad1a1c9bba8f77b",
    "niah_multikey_2": "ffff47096dbd6906",
    "niah_multikey_3": "9352a5abd59312a2",
    "vt": "54eccbc2fe6c30a4",
    "cwe": "bb339ab611854931",
    "fwe": "0af5fc71282d8629",
}


class Words:
    """The golden files' way to count: words and punctuation marks, no chat template."""

    def encode(self, text: str) -> list[int]:
        return [hash(word) for word in re.findall(r"\w+|[^\w\s]", text)]

    def decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def render(self, prompt: str, answer_prefix: str) -> list[int]:
        return self.encode(prompt + answer_prefix)


def used(sample: Sample) -> int:
    return len(Words().render(sample.prompt, sample.answer_prefix)) + sample.max_new_tokens


def digests() -> dict[str, str]:
    ruler = Ruler(lengths=[2048], samples=3)
    return {name: digest(ruler.build(name, 2048, Words())) for name in ruler.subtasks()}


def digest(samples: list[Sample]) -> str:
    text = [(sample.id, sample.prompt, sample.answer_prefix, sample.references) for sample in samples]
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]


@pytest.mark.skipif(not GOLDEN.exists(), reason="NVIDIA's samples are not at hand (../shared/data/ruler)")
@pytest.mark.parametrize("subtask", ["niah_single_1", "niah_multikey_3", "vt", "cwe", "fwe"])
def test_samples_are_byte_equal_to_nvidias(subtask: str) -> None:
    """Prompt, prefix and references are those of NVIDIA's generator, so scores compare to published ones."""
    rows = [json.loads(line) for line in (GOLDEN / subtask / "validation.jsonl").read_text().splitlines()]
    samples = Ruler(lengths=[4096], samples=len(rows)).build(subtask, 4096, Words())
    for row, sample in zip(rows, samples, strict=True):
        assert sample.prompt == row["input"]
        assert sample.answer_prefix == row["answer_prefix"]
        assert list(sample.references) == row["outputs"]
        assert used(sample) == row["length"]


def test_samples_never_change() -> None:
    """The generators' output is pinned here too, for checkouts without NVIDIA's samples."""
    assert digests() == DIGESTS


def test_samples_are_the_same_in_any_process(tmp_path: Path) -> None:
    """No sample depends on hash order or the working directory."""
    script = f"import runpy; print(runpy.run_path({__file__!r})['digests']())"
    for hash_seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path if hash_seed == "1" else None,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str(DIGESTS)


@pytest.mark.parametrize("fit", ["upstream", "tight"])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_more_samples_start_with_the_fewer(subtask: str, fit: str) -> None:
    """Asking for more samples adds samples and changes none, and each has its own id."""
    few = Ruler(lengths=[2048], samples=2, fit=fit).build(subtask, 2048, Words())
    many = Ruler(lengths=[2048], samples=6, fit=fit).build(subtask, 2048, Words())
    assert many[:2] == few
    assert [sample.id for sample in many] == ["0000", "0001", "0002", "0003", "0004", "0005"]
    assert len({sample.prompt for sample in many}) == 6


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_another_seed_gives_other_samples(subtask: str) -> None:
    """The seed reaches every generator."""
    one, other = (Ruler(lengths=[2048], samples=1, seed=seed) for seed in (42, 43))
    assert one.build(subtask, 2048, Words()) != other.build(subtask, 2048, Words())


@pytest.mark.parametrize(("length", "subtask"), list(product((1024, 2048, 4096), SUBTASKS)))
def test_no_sample_is_too_long(length: int, subtask: str) -> None:
    """Prompt and answer room together never pass the length."""
    assert all(
        used(sample) <= length
        for fit in ("upstream", "tight")
        for sample in Ruler(lengths=[length], samples=20, fit=fit).build(subtask, length, Words())
    )


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_tight_samples_fill_their_length(subtask: str) -> None:
    """A tight fit has over 95 % of the tokens that its column says; upstream's can lose a fifth."""
    samples = Ruler(lengths=[4096], samples=20, fit="tight").build(subtask, 4096, Words())
    assert min(map(used, samples)) > 0.95 * 4096


@pytest.mark.parametrize("fit", ["upstream", "tight"])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_short_length_ends_at_once_and_the_error_names_one_that_works(subtask: str, fit: str) -> None:
    """Where upstream would loop for ever there is an error, and following its advice helps."""
    started = time.monotonic()
    try:
        Ruler(lengths=[256], samples=2, fit=fit).build(subtask, 256, Words())
    except UserError as error:
        found = re.fullmatch(
            rf"RULER's {subtask} can't be made at length 256: .* of (\d+) or more .*", str(error)
        )
        assert found
        least = int(found[1])
        assert len(Ruler(lengths=[least], samples=2, fit=fit).build(subtask, least, Words())) == 2
    assert time.monotonic() - started < 1


def test_fwe_needs_four_words_in_its_vocabulary() -> None:
    """Shorter texts have less than three words to ask for."""
    with pytest.raises(UserError, match=r"fwe can't be made at length 249: .* 250 or more"):
        Ruler(lengths=[249], samples=1).build("fwe", 249, Words())
    assert Ruler(lengths=[250], samples=1).build("fwe", 250, Words())


def test_cwe_says_when_its_words_run_out() -> None:
    """The list that upstream takes for lengths near 128k is not here: an error, not an underfilled sample."""
    with pytest.raises(UserError, match="cwe at length 262144 needs more than the 8169 words"):
        Ruler(lengths=[262144], samples=1).build("cwe", 262144, Words())


@pytest.mark.parametrize("subtask", NIAH)
def test_depth_is_where_the_needle_is(subtask: str) -> None:
    """The depth that a heat map groups by is the needle's place in the text, in percent."""
    for sample in Ruler(lengths=[4096], samples=5).build(subtask, 4096, Words()):
        lines = sample.prompt.splitlines()[1:-1]
        (place,) = (i for i, line in enumerate(lines) if line.endswith(f"is: {sample.references[0]}."))
        assert sample.fields["depth"] == round(100 * place / (len(lines) - 1))


@given(
    st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1),
    st.lists(st.text("ab-", max_size=3), min_size=1),
)
def test_word_pairs_are_the_sorted_set_of_all_pairs(firsts: list[str], seconds: list[str]) -> None:
    """The lazy list holds what sorting millions of pairs would, also where hyphens make two pairs equal."""
    pairs = WordPairs(firsts, seconds)
    assert list(pairs) == sorted({f"{first}-{second}" for first in firsts for second in seconds})
    assert pairs[-1] == list(pairs)[-1]


def sample(*references: str) -> Sample:
    return Sample(id="0000", prompt="", references=references, max_new_tokens=1)


@pytest.mark.parametrize(
    ("references", "prediction", "score"),
    [
        (("12345",), "12\n345", 0.0),
        (("12345",), "12\x00345", 0.0),
        (("12345",), "\n the number is 12345.\n", 1.0),
        (("12345",), "9123456", 1.0),
        (("ABC", "xyz"), "abc", 0.5),
        (("be", "art"), "the best party", 1.0),
        (("be",), "", 0.0),
    ],
)
def test_score_has_the_official_quirks(references: tuple[str, ...], prediction: str, score: float) -> None:
    """Case-insensitive substrings count, inside words and numbers too; control characters part one."""
    assert Ruler(lengths=[4096], samples=1).score("vt", sample(*references), prediction) == score


@given(st.text())
def test_any_prediction_has_a_score(prediction: str) -> None:
    """No Unicode text breaks the scorer or leaves the range from 0 to 1."""
    assert 0 <= Ruler(lengths=[4096], samples=1).score("cwe", sample("be", "İ", "12"), prediction) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": []}, "task.lengths must list"),
        ({"lengths": [0]}, "task.lengths must list"),
        ({"lengths": [4096, 4096]}, "task.lengths must list"),
        ({"samples": 0}, "task.samples must be 1 or more, not 0"),
        ({"subset": ["vt", "qa_9"]}, "task.subset must name some of niah_single_1, .*, fwe, each once"),
        ({"subset": []}, "task.subset must name some of"),
        ({"subset": ["vt", "vt"]}, "task.subset must name some of"),
        ({"seed": -1}, "task.seed must be from 0"),
        ({"fit": "loose"}, "task.fit must be upstream or tight, not 'loose'"),
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
