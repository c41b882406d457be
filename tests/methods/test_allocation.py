"""How budgets are dealt out over layers and heads: totals hold, and nobody gets more than there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structkv_bench.engine.method import Method
from structkv_bench.errors import UserError
from structkv_bench.methods.adakv import head_budgets
from structkv_bench.methods.fastkv import FastKV
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.pyramidkv import READINGS, layer_budgets
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.structkv import StructKV
from tests.every_method import WHOLE, but
from tests.shared import shared
from tests.tiny import Tiny, tiny

SCORERS = [SnapKV, H2O, StructKV, FastKV]


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def pyramid_budgets(name: str) -> list[list[float]]:
    return np.load(shared("golden/methods/pyramid_budgets.npz"))[name].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("layers", [4, 32])
@pytest.mark.parametrize(("reading", "name"), [("pyramidkv", "kvcf"), ("pyramidkv_adakv", "adakv_fix_pyram")])
def test_pyramids_are_the_official_ones(reading: str, name: str, layers: int) -> None:
    cases = pyramid_budgets("kvcf.cases")
    for (tokens, entries), expected in zip(cases, pyramid_budgets(f"{name}.L{layers}"), strict=True):
        assert layer_budgets(reading, entries, 8, int(tokens), layers) == expected


@pytest.mark.parametrize("layers", [4, 32])
def test_pyramids_are_kvpress_s_in_its_reading(layers: int) -> None:
    """Budgets as a share of the prompt, not rounded before the slope is."""
    cases = pyramid_budgets("kvpress.cases")
    for (tokens, dropped), expected in zip(cases, pyramid_budgets(f"kvpress.L{layers}"), strict=True):
        method = SnapKV(kv_ratio=1 - dropped, allocator="pyramidkv_kvpress")
        assert method.layer_budgets(int(tokens), layers) == expected


@given(
    tokens=st.integers(20, 5000),
    ratio=st.floats(0.05, 1),
    layers=st.integers(1, 40),
    reading=st.sampled_from(READINGS),
)
@settings(max_examples=300, deadline=None)
def test_a_pyramid_keeps_the_mean_and_fits_the_prompt(
    tokens: int, ratio: float, layers: int, reading: str
) -> None:
    """Layers hold C on average: never less than what rounding takes, above it by less than a layer's step."""
    method = SnapKV(kv_ratio=ratio, allocator=reading)
    if int(tokens * ratio) <= 8:
        return
    budgets = method.layer_budgets(tokens, layers)
    assert budgets == sorted(budgets, reverse=True)
    assert 8 <= budgets[-1] <= budgets[0] <= tokens
    if layers > 1:
        assert -1 <= sum(budgets) / layers - int(tokens * ratio) <= layers / 2


@given(
    scores=st.lists(st.lists(st.floats(0, 1), min_size=20, max_size=20), min_size=1, max_size=8),
    entries=st.integers(1, 20),
    alpha=st.floats(0, 1),
    normalize=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_heads_share_a_layer_s_budget(
    scores: list[list[float]], entries: int, alpha: float, normalize: bool
) -> None:
    """In all H b but for rounding, a floor for each head, and none gets more than there are tokens."""
    heads = len(scores)
    budgets = head_budgets(torch.tensor(scores) + 1e-3, entries, alpha, normalize)
    assert abs(sum(budgets) - heads * entries) <= heads * 1.5
    assert min(budgets) >= int(alpha * entries)
    assert max(budgets) <= 20


@pytest.mark.parametrize("reading", READINGS)
def test_a_prompt_below_the_window_is_kept_whole(llama: Tiny, reading: str) -> None:
    """Where the budget is all of so short a prompt there is no room for a slope, and none is needed."""
    [row] = llama.prefill(llama.prompt(3), SnapKV(kv_ratio=1.0, allocator=reading))
    assert row.cache.entries() == [2 * 3] * 4


def test_a_head_without_any_score_takes_nothing_by_normalising() -> None:
    """0 of 0 is no share."""
    scores = torch.rand(3, 20, generator=torch.Generator().manual_seed(0)) + 0.1
    scores[1] = 0
    budgets = head_budgets(scores, 5, alpha=0.2, normalize=True)
    assert budgets[1] == 1
    assert sum(budgets) == pytest.approx(15, abs=2)


def test_the_head_with_the_better_scores_gets_more() -> None:
    """Two heads, four entries: the first has all of the best ones, the second its floor."""
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6], [0.1, 0.1, 0.1, 0.1]])
    assert head_budgets(scores, 2, alpha=0.0, normalize=False) == [4, 0]
    assert head_budgets(scores, 2, alpha=0.5, normalize=False) == [3, 1]
    assert head_budgets(scores, 2, alpha=1.0, normalize=False) == [2, 2]


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("allocator", ["adakv", "pyramidkv", "pyramidkv+adakv"])
def test_every_scorer_takes_every_allocator(llama: Tiny, scorer: type[Method], allocator: str) -> None:
    """Held bytes are the nominal share within 1 %, allocated to the last byte, uneven where it says so."""
    tokens = 2000
    method = but(scorer(), kv_ratio=0.25, allocator=allocator, **WHOLE)
    [row] = llama.prefill(llama.prompt(tokens), method)
    nominal = 0.25 * llama.model.shape.kv_bytes([tokens] * 4)
    assert row.cache.bytes() == pytest.approx(nominal, rel=0.01)
    heads = [head for layer in row.cache.layers for head in layer.by_head()]
    allocated = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
                 for head in heads for part in (head.keys, head.values)}  # fmt: skip
    assert sum(allocated.values()) == row.cache.bytes()
    by_head = [[head.entries for head in layer.by_head()] for layer in row.cache.layers]
    assert any(len(set(counts)) > 1 for counts in by_head) == ("adakv" in allocator)
    by_layer = [sum(counts) for counts in by_head]
    assert (max(by_layer) > 2 * min(by_layer)) == ("pyramidkv" in allocator)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"allocator": "ada"}, "allocator=ada: choose one of uniform, pyramidkv, .*adakv"),
        ({"allocator": "adakv+adakv"}, r"allocator=adakv\+adakv: join one of pyramidkv, .* with adakv"),
        ({"allocator": "pyramidkv+pyramidkv_kvpress"}, "join one of"),
        ({"allocator": "uniform+adakv"}, "join one of"),
        ({"allocator": "adakv", "alpha": 1.5}, "alpha=1.5: give a share from 0 to 1"),
        ({"allocator": "pyramidkv", "beta": 0}, "beta=0: give at least 1"),
        ({"allocator": "adakv", "running": True}, "allocator=adakv: running=true holds one budget"),
    ],
)
def test_an_allocator_that_can_not_be_is_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        H2O(**settings)  # type: ignore[arg-type]


def test_settings_of_an_allocator_that_is_not_used_have_no_say() -> None:
    """A grid over them is one cell for a method without it."""
    assert SnapKV(alpha=0.5, beta=10, normalize=True) == SnapKV()
    assert SnapKV(allocator="adakv", alpha=0.5, beta=10) == SnapKV(allocator="adakv", alpha=0.5)
