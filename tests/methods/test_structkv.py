"""StructKV against its definition done naively, and its ties to its neighbours."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structkv_bench.calibration import calibration_prompts
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError
from structkv_bench.methods.full import Full
from structkv_bench.methods.pivot import PivotDetector, PivotRule, majority
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.structkv import StructKV, StructKVCompressor
from tests.oracle import causal, forward
from tests.tiny import Tiny, tiny

N, W = 80, 8
RULE = PivotRule(weights=(0.2, 0.3, 0.5), first=3, last=8, top_share=0.1, floor=0.35)


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def naive_saliency(attention: torch.Tensor) -> list[float]:
    """S_j as the paper writes it: [heads, tokens, tokens] -> per token."""
    heads, tokens, _ = attention.shape
    saliency = []
    for j in range(tokens):
        total = 0.0
        for group in range(2):
            group_sum = 0.0
            for t in range(tokens - W, tokens):
                for head in range(group * heads // 2, (group + 1) * heads // 2):
                    group_sum += float(attention[head, t, j])
            total += group_sum / W
        saliency.append(total)
    return saliency


def naive_signals(saliency: list[float]) -> tuple[float, float, float]:
    share = [s / sum(saliency) for s in saliency]
    entropy = -sum(p * math.log(p) for p in share if p > 0)
    top = sum(sorted(share, reverse=True)[: int(len(share) * 0.1)])
    mean = 1.0
    variance = sum((len(share) * p - mean) ** 2 for p in share) / len(share)
    return entropy, top, variance


def test_centrality_signals_and_kept_sets_equal_their_definition(llama: Tiny) -> None:
    """S, C, H, rho, V, I_struct and I_KV by brute force from the full attention matrices."""
    ids = llama.prompt(N)
    method = StructKV(kv_ratio=0.25, struct_ratio=0.4, pivot=2, kv_selection="shared", kv_pooling="none")
    compressor = method.compressor(N, 4)
    [row] = prefill(llama.model, ids, [compressor])
    _, attentions = forward(llama.stock, ids, [causal(N)] * 4)
    centrality = [0.0] * N
    for layer in range(3):
        saliency = naive_saliency(attentions[layer])
        centrality = [0.9 * c + s for c, s in zip(centrality, saliency, strict=True)]
        entropy, sparsity, variance = naive_signals(saliency[:-W])
        expected = torch.tensor([-entropy, sparsity, variance], dtype=torch.float64)
        assert torch.allclose(compressor.detector.signals[layer], expected, rtol=1e-4)
        kept = _top(saliency[:-W], int(N * 0.25) - W) | set(range(N - W, N))
        assert set(row.cache.layers[layer].positions[0].tolist()) == kept
    assert torch.allclose(compressor.centrality, torch.tensor(centrality)[:-W], atol=1e-4)
    skeleton = _top(centrality[:-W], int(N * 0.4) - W) | set(range(N - W, N))
    seen = causal(N)
    seen[:, [j for j in range(N) if j not in skeleton]] = False
    seen[torch.arange(N), torch.arange(N)] = True
    _, attentions = forward(llama.stock, ids, [causal(N)] * 3 + [seen])
    saliency = [s if j in skeleton else -1.0 for j, s in enumerate(naive_saliency(attentions[3]))]
    kept = _top(saliency[:-W], int(N * 0.25) - W) | set(range(N - W, N))
    assert set(row.cache.layers[3].positions[0].tolist()) == kept
    assert row.layer_tokens == [N, N, N, int(N * 0.4)]


def _top(scores: list[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda j: -scores[j])[:count])


def test_ratios_of_one_are_the_full_cache_bit_for_bit(llama: Tiny) -> None:
    """R_struct = R_KV = 1."""
    ids = llama.prompt(N)
    ours, full = llama.prefill(ids, StructKV(kv_ratio=1.0, struct_ratio=1.0), Full())
    assert torch.equal(ours.logits, full.logits)
    for mine, other in zip(ours.cache.layers, full.cache.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


def test_without_a_cut_it_is_snapkv_with_group_sums(llama: Tiny) -> None:
    """R_struct = 1 is decoding-only: SnapKV's selection (average pooling, where the order is one)."""
    ids = llama.prompt(N)
    ours, snapkv = llama.prefill(
        ids,
        StructKV(budget=20, struct_ratio=1.0, kv_pooling="avg"),
        SnapKV(budget=20, pooling="avg", group="sum"),
    )
    assert torch.equal(ours.logits, snapkv.logits)
    for mine, other in zip(ours.cache.layers, snapkv.cache.layers, strict=True):
        assert torch.equal(mine.positions, other.positions)


def _layer(index: int, looked_at: int) -> LayerView:
    """40 tokens in which every query looks at one of them."""
    torch.manual_seed(index)
    key = torch.randn(2, 40, 8) * 0.1
    key[:, looked_at] = 3.0
    return LayerView(index, torch.ones(8, 40, 8), key, key, torch.arange(40), 40, 1.0)


@pytest.mark.parametrize(("decay", "kept"), [(0.9, True), (0.0, False)])
def test_a_token_that_early_layers_saw_is_remembered(decay: float, kept: bool) -> None:
    """The paper's point: dropped by FastKV (decay 0), which asks layer L* alone; kept by StructKV."""
    method = StructKV(kv_ratio=0.3, struct_ratio=0.25, decay=decay, pivot=3)  # 10 tokens: 2 beside the window
    compressor = method.compressor(40, 5)
    for index, looked_at in enumerate([7, 7, 7, 21]):
        layer = _layer(index, looked_at)
        compressor.keep_kv(layer)
        tokens = compressor.keep_tokens(layer)
        assert (tokens is not None) == (index == 3)
    assert 21 in tokens.tolist()
    assert (7 in tokens.tolist()) == kept


def test_deep_layers_keep_a_share_of_the_prompt_not_of_what_is_left(llama: Tiny) -> None:
    """Two ratios compose as stated: N R_KV entries in every layer, whatever the cut before (case 17)."""
    [row] = llama.prefill(llama.prompt(N), StructKV(kv_ratio=0.25, struct_ratio=0.5, pivot=1))
    assert [layer.entries for layer in row.cache.layers] == [20, 20, 20, 20]
    [row] = llama.prefill(llama.prompt(N), StructKV(kv_ratio=0.5, struct_ratio=0.25, pivot=1))
    assert [layer.entries for layer in row.cache.layers] == [40, 40, 20, 20]  # no more than there are


@pytest.mark.parametrize("pivot", [0, 1, 2, "online"])
def test_prefill_share_equals_its_formula(llama: Tiny, pivot: int | str) -> None:
    """(L* + 1 + (L - L* - 1) R_struct) / L, with the tokens that were really processed."""
    [row] = llama.prefill(llama.prompt(N), StructKV(kv_ratio=0.2, struct_ratio=0.4, pivot=pivot))
    found = row.compressor.facts()["pivot"]
    assert row.prefill_share == pytest.approx((found + 1 + (4 - found - 1) * 0.4) / 4)


def naive_transition(signals: list[tuple[float, float, float]], first: int, last: int) -> list[float]:
    steps = [[b - a for a, b in zip(signals[i - 1], signals[i], strict=True)] for i in range(first, last + 1)]
    largest = [max(abs(step[s]) for step in steps) or 1.0 for s in range(3)]
    return [0.2 * h / largest[0] + 0.3 * r / largest[1] + 0.5 * v / largest[2] for h, r, v in steps]


def _detector(signals: list[tuple[float, float, float]]) -> PivotDetector:
    return PivotDetector(RULE, [torch.tensor(s, dtype=torch.float64) for s in signals])


numbers = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
curves = st.lists(st.tuples(numbers, numbers, numbers), min_size=9, max_size=12)


@given(curves)
@settings(max_examples=200, deadline=None)
def test_transition_scores_equal_their_definition(signals: list[tuple[float, float, float]]) -> None:
    """T_l and L* = argmax T_l + 1 over the range, and never outside it."""
    expected = naive_transition(signals, RULE.first, RULE.last)
    detector = _detector(signals)
    assert detector.scores(RULE.first) == pytest.approx(expected)
    assert RULE.first < detector.argmax() <= RULE.last + 1


@given(curves)
@settings(max_examples=200, deadline=None)
def test_online_pivot_decides_once_and_inside_the_range(signals: list[tuple[float, float, float]]) -> None:
    """From the layers so far alone; the range's end decides in any case."""
    decided = [n - 1 for n in range(1, len(signals) + 1) if _detector(signals[:n]).decides_online()]
    assert RULE.first < decided[0] <= RULE.last


def test_online_pivot_is_not_taken_in_by_small_first_steps() -> None:
    """Layers that settle with large steps before the range keep its first small steps below the floor."""
    settling = [(-9.0, 0.1, 1.0), (-2.0, 0.7, 30.0), (-5.0, 0.3, 9.0)]
    small = [(-4.99, 0.301, 9.1), (-4.995, 0.3005, 9.05)]  # layers 3 and 4: up, then down
    clear = [(-4.99, 0.3, 9.0), (-3.0, 0.6, 25.0), (-3.0, 0.6, 25.0), (-3.0, 0.6, 25.0)]
    signals = settling + small + clear
    decided = [n - 1 for n in range(1, len(signals) + 1) if _detector(signals[:n]).decides_online()]
    assert decided[0] == _detector(signals).argmax() == 7


def test_majority_takes_the_lower_of_equals() -> None:
    """The calibrated pivot is the same in any order of prompts."""
    assert majority([13, 12, 13]) == 13
    assert majority([14, 12, 12, 14]) == majority([12, 14, 14, 12]) == 12


def test_calibrated_pivot_is_measured_once_and_stored(
    llama: Tiny, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    """Majority over own prompts; the second time it comes out of the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    method = StructKV(pivot="calibrated", kv_ratio=0.2)
    first = method.calibrated(llama.model)
    assert isinstance(first.pivot, int)  # type: ignore[attr-defined]
    monkeypatch.setattr(StructKV, "compressor", lambda *_: pytest.fail("measured again"))
    assert method.calibrated(llama.model) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for file in tmp_path.rglob("*.json"):
        file.write_text("{")  # a damaged file is no value: measured again
    assert method.calibrated(llama.model) == first


def test_calibrated_pivot_is_the_majority_of_the_arg_max_over_the_whole_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers after the one at which an online search would have stopped count too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    deep = tiny("llama", layers=16).model
    seen = []
    for ids in calibration_prompts(deep):
        compressor = StructKV(kv_ratio=1.0, struct_ratio=1.0, pivot=15).compressor(len(ids), 16)
        prefill(deep, ids, [compressor])
        signals = [tuple(map(float, s)) for s in compressor.detector.signals]
        rule = compressor.detector.rule
        assert (rule.first, rule.last, len(signals)) == (4, 10, 16)
        scores = naive_transition(signals, rule.first, rule.last)
        seen.append(rule.first + scores.index(max(scores)) + 1)
    expected = max(sorted(set(seen)), key=seen.count)
    assert StructKV(pivot="calibrated").calibrated(deep).pivot == expected  # type: ignore[attr-defined]


def test_a_pivot_outside_the_model_is_refused() -> None:
    """Naming the layers there are."""
    with pytest.raises(UserError, match="pivot=30: the model has layers 0 to 29"):
        StructKV(pivot=30).compressor(1000, 30)


def test_settings_out_of_range_are_refused() -> None:
    """Each names the setting and what would be right."""
    for wrong in ({"decay": 1.5}, {"struct_ratio": 0}, {"pivot": "never"}, {"search_from": 0.7},
                  {"kv_pooling": "sum"}, {"kernel": 4}):  # fmt: skip
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            StructKV(**wrong)


def test_the_compressor_is_typed_for_readers(llama: Tiny) -> None:
    """Online on a prompt no longer than the window keeps all and finds no pivot."""
    [row] = llama.prefill(llama.prompt(6), StructKV(kv_ratio=1.0, struct_ratio=1.0))
    assert isinstance(row.compressor, StructKVCompressor)
    assert row.compressor.facts()["pivot"] is None


def test_signals_of_every_layer_that_saw_the_whole_prompt(llama: Tiny) -> None:
    """Figure 4's values: H of the attention received, in nats, up to the cut; all where none is made."""
    ids = llama.prompt(120)
    cut = StructKV(kv_ratio=0.3, struct_ratio=0.4, pivot=1)
    [row, whole] = llama.prefill(ids, cut, replace(cut, struct_ratio=1.0))
    signals, all_signals = (each.compressor.facts()["signals"] for each in (row, whole))
    assert {len(values) for values in signals.values()} == {2}
    assert {len(values) for values in all_signals.values()} == {4}
    assert signals["entropy"] == all_signals["entropy"][:2]
    _, attention = forward(llama.stock, ids, [causal(120)] * 4)
    received = attention[0][:, -8:, :-8].mean(1).sum(0)
    share = received / received.sum()
    assert signals["entropy"][0] == pytest.approx(float(-(share * share.log()).sum()), abs=1e-4)
    assert signals["sparsity"][0] == pytest.approx(float(share.topk(11).values.sum()), abs=1e-4)
    assert signals["variance"][0] == pytest.approx(float((share * 112).var(correction=0)), abs=1e-4)
