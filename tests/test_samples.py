"""Samples out of the cache are those that the task makes, and no setting, text or code change is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import samples
from structkv_bench.config import compose
from structkv_bench.plan import Group, plan
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.samples import prompts_of
from structkv_bench.task import Sample
from structkv_bench.tasks.niah import Niah
from tests.tiny import tokenizer

PROMPTS = TokenizerPrompts(tokenizer())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples were made, call by call."""
    made: list[int] = []
    build = Niah.build

    def counting(self: Niah, *arguments: Any) -> list[Sample]:
        made.append(self.samples)
        return build(self, *arguments)

    monkeypatch.setattr(Niah, "build", counting)
    return made


def group(*overrides: str) -> Group:
    common = ["method=full", "task=niah", "task.haystack=noise", "task.lengths=700", "task.samples=4"]
    keys = {override.split("=")[0] for override in overrides}
    return plan(compose([*(o for o in common if o.split("=")[0] not in keys), *overrides]))[0]


def test_cached_samples_are_the_made_ones(builds: list[int]) -> None:
    """Field by field; fewer are the first of them, more are made anew."""
    made = prompts_of(group(), PROMPTS)
    assert prompts_of(group(), PROMPTS) == made
    assert prompts_of(group("task.samples=2"), PROMPTS) == made[:2]
    assert builds == [4]
    assert prompts_of(group("task.samples=6"), PROMPTS)[:4] == made
    assert builds == [4, 6]
    for prompt in made:
        assert prompt.tokens == len(PROMPTS.render(prompt.sample.prompt, prompt.sample.answer_prefix))


def test_ids_and_parts_survive_the_cache() -> None:
    """Tuples stay tuples, of a prompt of ids as well."""
    sample = Sample("0", (5, 6, 7), ("a", "b"), 3, question_at=2, fields={"depth": 4})
    assert samples._sample(asdict(sample)) == sample


@pytest.mark.parametrize("change", ["task.seed=7", "task.lengths=800", "task.query_aware=false"])
def test_another_setting_has_samples_of_its_own(builds: list[int], change: str) -> None:
    """What the cell's key hashes, the cache's key hashes too."""
    prompts_of(group(), PROMPTS)
    prompts_of(group(change), PROMPTS)
    assert builds == [4, 4]


def test_another_tokenizer_or_code_has_samples_of_its_own(
    builds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A changed chat template, or a generator that was mended, never gets old prompts."""
    prompts_of(group(), PROMPTS)
    prompts_of(group(), TokenizerPrompts(tokenizer("<turn>{{ messages[0].content }}")))
    monkeypatch.setattr(samples, "_code_hash", lambda task: "mended")
    prompts_of(group(), PROMPTS)
    assert builds == [4, 4, 4]


@pytest.mark.parametrize("damage", [lambda text: "", lambda text: text[:-9], lambda text: "5\n6\n",
                                    lambda text: text.replace("grass", "glass")])  # fmt: skip
def test_a_damaged_file_is_made_anew(cache: Path, builds: list[int], damage: Callable[[str], str]) -> None:
    """The head has the checksum of what follows: nothing that was altered is ever run."""
    made = prompts_of(group(), PROMPTS)
    [file] = cache.rglob("*.jsonl")
    file.write_text(damage(file.read_text()))
    assert prompts_of(group(), PROMPTS) == made
    assert builds == [4, 4]


def test_a_cache_that_can_not_be_written_stops_nothing(
    tmp_path: Path, builds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a convenience."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert prompts_of(group(), PROMPTS) == prompts_of(group(), PROMPTS)
    assert builds == [4, 4]
