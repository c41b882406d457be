"""Evicting a key is the same as hiding it from later queries: positions never change, nothing else does."""

from __future__ import annotations

import pytest
import torch

from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Method
from structkv_bench.engine.prefill import prefill
from structkv_bench.methods.fastkv import FastKV
from structkv_bench.methods.full import Full
from structkv_bench.methods.gemfilter import GemFilter
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.pyramidinfer import PyramidInfer
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.methods.structkv import StructKV
from tests.every_method import EVERY, SHORT, but
from tests.oracle import causal, forward
from tests.tiny import Tiny, tiny

N = 60
METHODS = {name: but(method, **SHORT) for name, method in EVERY.items()} | {
    "snapkv per query head": SnapKV(budget=20, heads="query"),
    "h2o per query head": H2O(budget=20, heads="query"),
    "snapkv over query heads": SnapKV(budget=20, heads="query", allocator="adakv"),
    "h2o over layers and heads": H2O(budget=20, allocator="pyramidkv+adakv"),
    "structkv over heads": StructKV(budget=15, struct_ratio=0.5, pivot=1, allocator="adakv"),
    "fastkv over layers and heads": FastKV(budget=15, tsp_ratio=0.5, allocator="pyramidkv+adakv"),
    "structkv at 1": StructKV(budget=15, struct_ratio=0.5, pivot=1),
    "structkv shared": StructKV(budget=15, struct_ratio=0.4, pivot=0, kv_selection="shared"),
    "fastkv at 0": FastKV(budget=15, tsp_ratio=0.4, tsp_layer=0, pooling="avg"),
    "gemfilter with its last tokens": GemFilter(budget=20, filter_layer=0, last=4),
    "pyramidinfer steep": PyramidInfer(recent_ratio=0.1, decay_ratio=0.1, min_context=4),
}
IN_PLACE = {name: method for name, method in METHODS.items() if not method.compressor(N, 4).begins_anew}
"""Methods that never renumber a token."""


@pytest.fixture(scope="module", params=["llama", "mistral"])
def family(request: pytest.FixtureRequest) -> Tiny:
    return tiny(request.param)


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def reach(model: Tiny) -> torch.Tensor:
    """What the model itself lets a query see: all earlier keys, or those in its sliding window."""
    window = getattr(model.stock.config, "sliding_window", None)
    seen = causal(N + 1)
    return seen if window is None else seen & ~seen.tril(-window)


@pytest.mark.parametrize("method", IN_PLACE.values(), ids=IN_PLACE.keys())
def test_next_logits_equal_masked_full_attention(family: Tiny, method: Method) -> None:
    """Case 1, for every one-shot method, also after a cut: query 60 at position 60 over the kept sets.

    On Mistral the sliding window of 24 tokens holds on top of it, by true positions.
    """
    llama = family
    ids = llama.prompt(N + 1)
    [row] = llama.prefill(ids[:N], method)
    masks = []
    for layer, tokens in zip(row.cache.layers, row.layer_tokens, strict=True):
        mask = reach(llama).repeat(8, 1, 1)
        stored = [head.positions[0] for head in layer.by_head()]
        for head in range(8):
            seen = torch.zeros(N + 1, dtype=torch.bool)
            seen[stored[head * len(stored) // 8]] = True
            seen[N] = True
            mask[head, N] &= seen
        masks.append(mask)
        assert tokens <= N
    processed = _processed(llama, ids[:N], method)
    for mask, tokens in zip(masks, processed, strict=True):
        mask[:, :N, :N] &= tokens  # keys that were dropped before this layer don't exist in it
        mask[:, torch.arange(N), torch.arange(N)] = True  # dropped queries: whatever they do, nobody sees
    expected, _ = forward(llama.stock, ids, masks)
    assert torch.allclose(row.logits, expected[N - 1], atol=1e-4)
    assert torch.allclose(llama.next_logits(row, ids[N]), expected[N], atol=1e-4)


def _processed(llama: Tiny, ids: list[int], method: Method) -> list[torch.Tensor]:
    """Per layer, which tokens went through it, seen by a compressor that keeps what it meets."""
    seen: list[torch.Tensor] = []
    compressor = method.compressor(len(ids), 4)
    choose = compressor.keep_kv

    def spy(layer):  # type: ignore[no-untyped-def]
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[layer.positions] = True
        seen.append(mask)
        return choose(layer)

    compressor.keep_kv = spy  # type: ignore[method-assign]
    prefill(llama.model, ids, [compressor])
    return seen


def test_the_wrong_position_would_show(llama: Tiny) -> None:
    """The bug that case 1 guards against is visible here: a renumbered query gives other logits."""
    ids = llama.prompt(41)
    [right] = llama.prefill(ids[:40], StreamingLLM(budget=20, sinks=0))
    [wrong] = llama.prefill(ids[:40], StreamingLLM(budget=20, sinks=0))
    wrong.cache.seen = 20
    assert (llama.next_logits(right, ids[40]) - llama.next_logits(wrong, ids[40])).abs().max() > 1e-2


def test_scores_see_what_the_model_sees() -> None:
    """Window scores and column sums are those of the model's own attention, sliding window and all."""
    mistral = tiny("mistral")
    ids = mistral.prompt(N)
    views: list[LayerView] = []
    compressor = Full().compressor(N, 4)
    compressor.keep_kv = views.append  # type: ignore[method-assign]
    prefill(mistral.model, ids, [compressor])
    _, attentions = forward(mistral.stock, ids, [reach(mistral)[:N, :N]] * 4)
    assert torch.allclose(views[0].column_sums().double(), attentions[0].sum(1), atol=1e-4)
    assert torch.allclose(views[0].window_attention(8).double(), attentions[0][:, -8:], atol=1e-4)
