"""FastKV's cut: where it lies, what goes on, and its tie to StructKV."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from structkv_bench.errors import UserError
from structkv_bench.methods.fastkv import FastKV
from structkv_bench.methods.full import Full
from structkv_bench.methods.structkv import StructKV
from tests.oracle import causal, forward
from tests.tiny import Tiny, tiny

N, W = 80, 8


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


@pytest.mark.parametrize(("layers", "cut"), [(1, 0), (2, 0), (4, 1), (30, 14), (32, 15), (36, 17), (40, 19)])
def test_the_default_layer_is_that_of_the_official_code(layers: int, cut: int) -> None:
    """15 in Llama-3.1-8B, 17 in Ministral-8B, 19 in Mistral-Nemo; its rule on any other depth."""
    assert FastKV().compressor(1000, layers).facts() == {"pivot": cut}
    assert FastKV().layer_tokens(1000, layers) == [1000] * (cut + 1) + [200] * (layers - cut - 1)


def test_tokens_and_entries_equal_their_definition(llama: Tiny) -> None:
    """From the full attention matrices: sums over the window, pooled per head, summed over the group."""
    ids = llama.prompt(N)
    [row] = llama.prefill(ids, FastKV(kv_ratio=0.25, tsp_ratio=0.4, tsp_layer=1))
    _, attentions = forward(llama.stock, ids, [causal(N)] * 4)
    per_head = attentions[1][:, -W:, :-W].sum(1)
    pooled = torch.stack([per_head[:, max(0, j - 3) : j + 4].amax(1) for j in range(N - W)], dim=1)
    groups = pooled.reshape(2, 4, -1).sum(1)
    for kept, scores in zip(row.cache.layers[1].positions.tolist(), groups, strict=True):
        assert_best(kept, scores, int(N * 0.25))
    chosen = row.cache.layers[2]  # of these, its own best; with a budget above them, all
    assert row.layer_tokens == [N, N, int(N * 0.4), int(N * 0.4)]
    [row] = llama.prefill(ids, FastKV(kv_ratio=0.5, tsp_ratio=0.4, tsp_layer=1))
    assert [layer.entries for layer in row.cache.layers] == [40, 40, 32, 32]
    kept = row.cache.layers[2].positions[0].tolist()
    assert_best(kept, groups.sum(0), int(N * 0.4))
    assert set(chosen.positions.flatten().tolist()) <= set(kept)


def assert_best(kept: list[int], scores: torch.Tensor, entries: int) -> None:
    """The last W tokens and the best before them; pooling makes equals, of which any may be there."""
    assert kept[-W:] == list(range(N - W, N))
    assert len(set(kept)) == entries
    lowest = float(scores.sort(descending=True).values[entries - W - 1])
    assert all(float(scores[j]) >= lowest - 1e-6 for j in kept[:-W])


def test_it_is_structkv_without_memory(llama: Tiny) -> None:
    """A whole pass: StructKV with decay 0, its pivot fixed and FastKV's pooling."""
    ids = llama.prompt(N)
    ours, structkv = llama.prefill(
        ids,
        FastKV(budget=20, tsp_ratio=0.5, tsp_layer=1, pooling="avg"),
        StructKV(budget=20, struct_ratio=0.5, pivot=1, decay=0.0, kv_pooling="avg", centrality_pooling="avg"),
    )
    assert torch.equal(ours.logits, structkv.logits)
    for mine, other in zip(ours.cache.layers, structkv.cache.layers, strict=True):
        assert torch.equal(mine.positions, other.positions)


def test_ratios_of_one_are_the_full_cache_bit_for_bit(llama: Tiny) -> None:
    """Nothing is dropped, on prompts shorter than the window too."""
    for tokens in (5, N):
        ids = llama.prompt(tokens)
        ours, full = llama.prefill(ids, FastKV(kv_ratio=1.0, tsp_ratio=1.0), Full())
        assert torch.equal(ours.logits, full.logits)
        assert [layer.entries for layer in ours.cache.layers] == [tokens] * 4


def test_distances_equal_their_definition(llama: Tiny) -> None:
    """For each cut, by the naive forward with the dropped tokens hidden from every deeper layer."""
    ids, method = llama.prompt(N), FastKV(tsp_ratio=0.4)
    stock = copy.deepcopy(llama.stock)
    stock.model.norm = stock.lm_head = torch.nn.Identity()
    whole, _ = forward(stock, ids, [causal(N)] * 4)
    expected = []
    for cut in range(4):
        [row] = llama.prefill(ids, FastKV(kv_ratio=1.0, tsp_ratio=0.4, tsp_layer=cut))
        going_on = row.cache.layers[3].positions[0] if cut < 3 else torch.arange(N)
        seen = causal(N)
        seen[:, [j for j in range(N) if j not in going_on.tolist()]] = False
        seen[torch.arange(N), torch.arange(N)] = True
        states, _ = forward(stock, ids, [causal(N)] * (cut + 1) + [seen] * (3 - cut))
        units = [torch.nn.functional.normalize(x[going_on], dim=-1) for x in (whole, states)]
        expected.append(float((units[0] - units[1]).square().sum(-1).mean().sqrt()))
    assert expected[3] == 0 < expected[0]
    assert method.distances(llama.model, ids) == pytest.approx(expected, abs=2e-3)
    assert FastKV(tsp_ratio=1.0).distances(llama.model, ids) == [0, 0, 0, 0]


def test_the_calibrated_layer_is_the_first_that_is_near_enough_and_is_stored(
    llama: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the mean over prompts; a later layer may be further off again. Nothing is measured twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    of_prompts = [[0.9, 0.2, 0.4, 0.0], [0.9, 0.4, 0.4, 0.0], [0.9, 0.3, 0.4, 0.0]]
    left = list(of_prompts)
    monkeypatch.setattr(FastKV, "distances", lambda *_: left.pop())
    method = FastKV(kv_ratio=0.2, tsp_layer="calibrated", tsp_distance=0.31)
    assert method.calibrated(llama.model) == FastKV(kv_ratio=0.2, tsp_layer=1)
    assert left == []
    assert method.calibrated(llama.model) == FastKV(kv_ratio=0.2, tsp_layer=1)
    left.extend(of_prompts)
    exact = FastKV(tsp_layer="calibrated", tsp_distance=0)
    assert exact.calibrated(llama.model) == FastKV(tsp_layer=3)


def test_what_has_no_say_makes_no_difference(llama: Tiny) -> None:
    """Cells with a fixed layer are one, whatever distance a calibration would allow."""
    assert FastKV(tsp_distance=0.5) == FastKV()
    assert FastKV(tsp_layer="calibrated", tsp_distance=0.5) != FastKV(tsp_layer="calibrated")
    assert FastKV(tsp_layer=2).calibrated(llama.model) == FastKV(tsp_layer=2)
    assert FastKV(tsp_layer="calibrated").layer_tokens(100, 4) == FastKV().layer_tokens(100, 4)


def test_tokens_that_go_on_are_more_than_the_window(llama: Tiny) -> None:
    """Also where a calibration would be the first to notice."""
    with pytest.raises(UserError, match=r"tsp_ratio=0\.1 keeps 8 of 80"):
        FastKV(tsp_ratio=0.1, tsp_layer="calibrated").distances(llama.model, llama.prompt(N))


@pytest.mark.parametrize("layer", [-1, 30])
def test_a_layer_outside_the_model_is_refused(layer: int) -> None:
    """Naming the layers there are."""
    with pytest.raises(UserError, match=f"tsp_layer={layer}: the model has layers 0 to 29"):
        FastKV(tsp_layer=layer).compressor(1000, 30)


def test_settings_out_of_range_are_refused() -> None:
    """Each names the setting and what would be right."""
    for wrong in (
        {"tsp_ratio": 0}, {"tsp_ratio": 1.1}, {"pooling": "sum"}, {"kernel": 4}, {"window": 0},
        {"tsp_layer": "online"}, {"tsp_distance": -0.1}, {"tsp_distance": 2.1},
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            FastKV(**wrong)
