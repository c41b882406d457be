"""SGD-KV: heads that look keywords up, budgets by water-filling, and each head's own choice."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structkv_bench.calibrate.documents import Documents, DocumentsRun, Said
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor
from structkv_bench.errors import UserError
from structkv_bench.methods import sgdkv
from structkv_bench.methods.sgdkv import SGDKV, water_filled
from tests.every_method import LEARNED, calibrated
from tests.tiny import Tiny, tiny


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def filled_by_rounds(scores: list[float], total: int, most: int) -> list[Fraction]:
    """Water-filling by hand: cap whoever is above, deal the surplus out, again and again."""
    shares = [Fraction(0)] * len(scores)
    left, open_ = Fraction(total), [place for place, score in enumerate(scores) if score > 0]
    while left > 0 and open_:
        weight = sum(Fraction(scores[place]) for place in open_)
        wanted = {place: left * Fraction(scores[place]) / weight for place in open_}
        over = [place for place in open_ if shares[place] + wanted[place] >= most]
        if not over:
            for place in open_:
                shares[place] += wanted[place]
            return shares
        for place in over:
            left -= most - shares[place]
            shares[place] = Fraction(most)
        open_ = [place for place in open_ if place not in over]
    for place, score in enumerate(scores):  # what heads without a score share
        if score == 0 and left > 0:
            shares[place] = left / scores.count(0)
    return shares


@given(
    scores=st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1)), min_size=1, max_size=30),
    most=st.integers(1, 500),
    share=st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_water_filling_conserves_the_total(scores: list[float], most: int, share: float) -> None:
    """The sum is met exactly, no head is above M, and each is within a rounding of the exact share."""
    total = int(share * most * len(scores))
    dealt = water_filled(scores, total, most)
    assert sum(dealt) == total
    assert all(0 <= one <= most for one in dealt)
    exact = filled_by_rounds(scores, total, most)
    assert all(abs(one - by_hand) <= 2 for one, by_hand in zip(dealt, exact, strict=True))


def test_water_filling_by_example() -> None:
    """In proportion to the scores; what the cap takes off the first goes to the others."""
    assert water_filled([0.4, 0.3, 0.2, 0.1], 100, 100) == [40, 30, 20, 10]
    assert water_filled([0.7, 0.1, 0.1, 0.1], 100, 40) == [40, 20, 20, 20]
    assert water_filled([0.0, 0.6, 0.4], 90, 40) == [10, 40, 40]


@pytest.mark.parametrize(("tokens", "ratio"), [(60, 0.3), (301, 0.1), (2048, 0.25), (2048, 0.9), (512, 1.0)])
def test_all_heads_together_hold_the_budget(tokens: int, ratio: float) -> None:
    """sum b_g = L H_kv int(N R): sinks and window are inside the budget, as for every method here."""
    method = calibrated(SGDKV(kv_ratio=ratio))
    budgets = method.head_budgets(tokens, 4)
    flat = [budget for layer in budgets for budget in layer]
    assert sum(flat) == 8 * int(tokens * ratio)
    assert max(flat) <= tokens
    assert min(flat) >= sum(method.edges(tokens))
    scores = [score for layer in LEARNED["sgdkv"]["scores"] for score in layer]
    assert flat[scores.index(max(scores))] == max(flat)


def test_edges_and_queries_shrink_with_the_prompt() -> None:
    """1,024 sinks and window and 128 queries of a long prompt; of others a fiftieth and a sixteenth."""
    method = SGDKV()
    assert (method.edges(65536), method.observes(65536)) == ((1024, 1024), 128)
    assert (method.edges(1000), method.observes(1000)) == ((20, 20), 62)
    assert (method.edges(30), method.observes(30)) == ((1, 1), 8)
    assert SGDKV(sinks=0).edges(30) == (0, 1)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("heads", [(8, 2), (6, 3)])
def test_each_head_keeps_its_own_best(seed: int, heads: tuple[int, int]) -> None:
    """By brute force: sinks, window, and the best by pooled mean of the group's window sums between them."""
    generator = torch.Generator().manual_seed(seed)
    tokens, (query_heads, kv_heads) = 90, heads
    q = 2 * torch.randn(query_heads, tokens, 8, generator=generator)
    k = torch.randn(kv_heads, tokens, 8, generator=generator)
    layer = LayerView(1, q, k, k, torch.arange(tokens), tokens, 8**-0.5)
    method = SGDKV(edge_share=0.05, observed=8, kernel=3)
    budgets = [[90] * kv_heads, [17, 40, 9][:kv_heads]]
    kept = sgdkv._SGDKVCompressor(method, budgets, method.edges(tokens)).keep_kv(layer)
    sums = layer.window_attention(8).sum(1)
    for head, (index, budget) in enumerate(zip(kept, budgets[1], strict=True)):
        group = range(head * query_heads // kv_heads, (head + 1) * query_heads // kv_heads)
        mean = [sum(float(sums[h, j]) for h in group) / len(group) for j in range(4, 86)]
        pooled = [max(mean[max(0, j - 1) : j + 2]) for j in range(len(mean))]
        best = sorted(range(len(pooled)), key=lambda j: (-pooled[j], j))[: budget - 8]
        assert index.tolist() == [0, 1, 2, 3, *(4 + j for j in sorted(best)), 86, 87, 88, 89]


def planted(layer: int, tokens: int, said: dict[int, int], finder: int) -> LayerView:
    """A layer of 6 heads and 3 KV heads: `finder` alone looks from places of `said` to those it names."""
    key, query = torch.zeros(3, tokens, 16), torch.zeros(6, tokens, 16)
    for number, (at, place) in enumerate(said.items(), 1):
        key[:, place, number] = 1
        query[finder, at, number] = 90
    return LayerView(layer, query, key, key, torch.arange(tokens), tokens, 16**-0.5)


@pytest.mark.parametrize("query", ["before", "at"])
def test_the_head_on_the_keywords_ranks_first(monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    """Planted: another head in each layer; its group has all of the score. Invalid samples don't count.

    The last occurrence of a keyword is the one looked at: a mean over occurrences would halve the score.
    """
    finders, shift = [4, 1], 1 if query == "before" else 0
    chunks = [[Said(2, [5, 9]), Said(3, [6, 10])], [Said(5, [20])]]
    looks = {40 + 2 - shift: 9, 40 + 3 - shift: 10, 40 + 5 - shift: 20}
    valid = DocumentsRun([*range(40)], [*range(10)], chunks)
    silent = DocumentsRun([*range(40)], [*range(10)], [chunks[0], []])

    def watch(_model: Any, ids: list[int], watcher: Compressor) -> None:
        for layer, finder in enumerate(finders):
            watcher.keep_kv(planted(layer, len(ids), looks, finder))

    monkeypatch.setattr(sgdkv, "watch", watch)
    shape = type("Shape", (), {"kv_heads": 3})
    model: Any = type("Model", (), {"shape": shape})
    texts: Any = type("Texts", (), {"runs": lambda _, model: iter([valid, silent]), "query": query})()
    found = SGDKV().measure(model, texts)
    scores = torch.tensor(found.values["scores"])
    assert [int(layer.argmax()) for layer in scores] == [2, 0]  # KV heads of query heads 4 and 1
    assert scores.sum() == pytest.approx(1, abs=1e-4)
    assert scores.max() > 10 * scores.median()
    assert (found.counted, len(found.prompts)) == (1, 2)
    lookup = sgdkv._Lookup(valid, query)
    lookup.keep_kv(planted(0, 50, looks, 4))
    assert lookup.scores[0][4] == pytest.approx(1, abs=1e-3)
    texts = type("Texts", (), {"runs": lambda _, model: iter([silent]), "query": query})()
    with pytest.raises(UserError, match=r"in none of 1 samples .*answers=forced"):
        SGDKV().measure(model, texts)


def test_a_calibration_of_the_tiny_model_is_whole(llama: Tiny) -> None:
    """A score for each KV head of each layer, from answers put into its mouth."""
    found = SGDKV().measure(llama.model, Documents(lengths=[1500], chunks=2, samples=2))
    assert [len(layer) for layer in found.values["scores"]] == [2] * 4
    assert sum(score for layer in found.values["scores"] for score in layer) == pytest.approx(1, abs=1e-4)
    assert (found.counted, len(found.prompts)) == (2, 2)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (SGDKV(kv_ratio=0.001), "kv_ratio=0.001 keeps 0 of 100 .* at least 5 entries"),
        (SGDKV(budget=4), "budget=4 keeps 4 of 100 .* not more than the 4"),
    ],
)
def test_a_budget_that_no_head_can_meet_is_refused(method: SGDKV, says: str) -> None:
    with pytest.raises(UserError, match=says):
        calibrated(method).compressor(100, 4)


@pytest.mark.parametrize(
    "wrong", [{"sinks": -1}, {"window": 0}, {"edge_share": 0.0}, {"observed_share": 2.0}, {"group": "any"}]
)
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        SGDKV(**wrong)
