"""Evicting a key is the same as hiding it from later queries: positions never change, nothing else does."""

from __future__ import annotations

import pytest
import torch

from structkv_bench.engine.method import Method
from structkv_bench.methods.full import Full
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.methods.structkv import StructKV
from tests.oracle import causal, forward
from tests.tiny import Tiny, tiny

N = 60
METHODS = {
    "full": Full(),
    "streaming_llm": StreamingLLM(budget=20),
    "snapkv": SnapKV(budget=20),
    "snapkv per query head": SnapKV(budget=20, heads="query"),
    "h2o": H2O(budget=20),
    "h2o per query head": H2O(budget=20, heads="query"),
    "structkv": StructKV(budget=15, struct_ratio=0.5, pivot=1),
    "structkv shared": StructKV(budget=15, struct_ratio=0.4, pivot=0, kv_selection="shared"),
    "structkv online": StructKV(kv_ratio=0.3, struct_ratio=0.5),
}


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_next_logits_equal_masked_full_attention(llama: Tiny, method: Method) -> None:
    """Case 1, for every one-shot method, also after a cut: query 60 at position 60 over the kept sets."""
    ids = llama.prompt(N + 1)
    [row] = llama.prefill(ids[:N], method)
    masks = []
    for layer, tokens in zip(row.cache.layers, row.layer_tokens, strict=True):
        mask = causal(N + 1).repeat(8, 1, 1)
        copies = 8 // layer.positions.shape[0]
        for head, kept in enumerate(layer.positions.repeat_interleave(copies, 0)):
            seen = torch.zeros(N + 1, dtype=torch.bool)
            seen[kept] = True
            seen[N] = True
            mask[head, N] = seen
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
    from structkv_bench.engine.prefill import prefill

    prefill(llama.model, ids, [compressor])
    return seen


def test_the_wrong_position_would_show(llama: Tiny) -> None:
    """The bug that case 1 guards against is visible here: a renumbered query gives other logits."""
    ids = llama.prompt(41)
    [right] = llama.prefill(ids[:40], StreamingLLM(budget=20, sinks=0))
    [wrong] = llama.prefill(ids[:40], StreamingLLM(budget=20, sinks=0))
    wrong.cache.seen = 20
    assert (llama.next_logits(right, ids[40]) - llama.next_logits(wrong, ids[40])).abs().max() > 1e-2
