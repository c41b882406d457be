"""GemFilter: the pass over the prompt ends at the filter layer, and the chosen tokens are a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from structkv_bench.engine.decode import decode
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError
from structkv_bench.methods.full import Full
from structkv_bench.methods.gemfilter import GemFilter
from structkv_bench.methods.snapkv import SnapKV
from tests.tiny import Tiny, tiny

N, K = 90, 27
METHOD = GemFilter(kv_ratio=0.3, filter_layer=1)


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def chosen_tokens(model: Tiny, ids: list[int], method: GemFilter) -> list[int]:
    """What the method's own `keep_tokens` answers on the way."""
    seen: list[torch.Tensor] = []
    compressor = method.compressor(len(ids), 4)
    choose = compressor.keep_tokens

    def spy(layer: Any) -> torch.Tensor | None:
        index = choose(layer)
        if index is not None:
            seen.append(index)
        return index

    compressor.keep_tokens = spy  # type: ignore[method-assign]
    prefill(model.model, ids, [compressor])
    [index] = seen  # it chooses once
    return index.tolist()


def passes_of(model: Tiny, ids: list[int], *methods: Any) -> list[int]:
    """Tokens of each layer that was run, in order."""
    passes: list[int] = []
    run_layer = model.model.run_layer

    def counting(*args: Any) -> torch.Tensor:
        passes.append(args[1].shape[1])
        return run_layer(*args)

    model.model.run_layer = counting  # type: ignore[method-assign]
    try:
        model.prefill(ids, *methods)
    finally:
        del model.model.run_layer  # type: ignore[misc]
    return passes


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("layer", [0, 1, 3])
def test_it_equals_a_plain_forward_over_the_chosen_ids(family: str, layer: int) -> None:
    """Logits, positions, keys, and decode that goes on at position k, in each family."""
    model, method = tiny(family), GemFilter(kv_ratio=0.3, filter_layer=layer)
    ids = model.prompt(N + 1)
    index = chosen_tokens(model, ids[:N], method)
    assert index == sorted(set(index))
    assert len(index) == K
    chosen = [ids[j] for j in index]
    [row] = model.prefill(ids[:N], method)
    with torch.no_grad():
        expected = model.stock(torch.tensor([[*chosen, ids[N]]])).logits[0]
    assert torch.allclose(row.logits, expected[-2], atol=1e-4)
    assert row.cache.seen == K
    [plain] = model.prefill(chosen, Full())
    for mine, other in zip(row.cache.layers, plain.cache.layers, strict=True):
        assert mine.positions.tolist() == [list(range(K))] * 2
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
    assert torch.allclose(model.next_logits(row, ids[N]), expected[-1], atol=1e-4)
    assert model.generate(ids[:N], method, new=12) == model.generate(chosen, Full(), new=12)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_the_pass_over_the_prompt_ends_at_the_filter_layer(llama: Tiny, layer: int) -> None:
    """The early exit: layers after it never see the prompt."""
    passes = passes_of(llama, llama.prompt(N), GemFilter(kv_ratio=0.3, filter_layer=layer))
    assert passes == [N] * (layer + 1) + [K] * 4


def test_in_a_group_only_the_others_go_on_with_the_prompt(llama: Tiny) -> None:
    """One shared pass up to the filter layer, then both ways side by side."""
    passes = passes_of(llama, llama.prompt(N), METHOD, SnapKV(budget=K))
    assert sorted(passes) == [K] * 4 + [N] * 4


def test_bytes_and_prefill_share(llama: Tiny) -> None:
    """k entries per layer and KV head; up to the filter layer the chosen tokens count beside the prompt."""
    [row] = llama.prefill(llama.prompt(N), METHOD)
    assert row.cache.bytes() == 2 * 4 * 2 * K * 8 * 4  # K and V, layers, KV heads, entries, dim, fp32
    assert row.layer_tokens == METHOD.layer_tokens(N, 4) == [N + K, N + K, K, K]
    assert row.prefill_share == pytest.approx((2 * N + 4 * K) / (4 * N))
    assert METHOD.layer_entries(N, 4) == [K] * 4
    assert row.compressor.facts() == {"pivot": 1}


def test_the_pass_that_filters_holds_no_cache(llama: Tiny) -> None:
    """Its entries would be thrown away: at no layer are there any."""
    compressor, held = METHOD.compressor(N, 4), []
    keep_kv = compressor.keep_kv

    def spy(layer: Any) -> torch.Tensor | None:
        index = keep_kv(layer)
        held.append((layer.tokens, layer.tokens if index is None else index.shape[1]))
        return index

    compressor.keep_kv = spy  # type: ignore[method-assign]
    prefill(llama.model, llama.prompt(N), [compressor])
    assert held == [(N, 0)] * 2 + [(K, K)] * 4


def test_a_budget_not_below_the_prompt_is_the_full_cache_in_one_pass(llama: Tiny) -> None:
    """Nothing begins anew where nothing is dropped."""
    for budget in (N, 1000):
        method = GemFilter(budget=budget, filter_layer=1)
        assert passes_of(llama, llama.prompt(N), method) == [N] * 4
        assert method.layer_tokens(N, 4) == [N] * 4
        ours, full = llama.prefill(llama.prompt(N), method, Full())
        assert torch.equal(ours.logits, full.logits)


def test_last_tokens_can_be_held(llama: Tiny) -> None:
    """`last`: so many are chosen whatever their scores; a question fed later stands after the chosen."""
    ids = llama.prompt(N)
    index = chosen_tokens(llama, ids, GemFilter(kv_ratio=0.3, filter_layer=1, last=10))
    assert index[-10:] == list(range(N - 10, N))
    question = llama.prompt(5, seed=9)
    chosen = [ids[j] for j in chosen_tokens(llama, ids, METHOD)]
    answers = [
        decode(llama.model, llama.prefill(prompt, method), 8, question=question)[0].ids
        for prompt, method in ((ids, METHOD), (chosen, Full()))
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("layers", "layer"), [(1, 0), (2, 1), (28, 11), (30, 12), (32, 13), (36, 17), (40, 19)]
)
def test_the_default_layer(layers: int, layer: int) -> None:
    """The published ones, else 0.4 of the depth."""
    assert GemFilter().filter(layers) == layer
    assert GemFilter().compressor(1000, layers).facts() == {"pivot": layer}


@pytest.mark.parametrize("layer", [-1, 30])
def test_a_layer_outside_the_model_is_refused(layer: int) -> None:
    """Naming the layers there are."""
    with pytest.raises(UserError, match=f"filter_layer={layer}: the model has layers 0 to 29"):
        GemFilter(filter_layer=layer).compressor(1000, 30)


def test_settings_out_of_range_are_refused() -> None:
    """Each names the setting and what would be right."""
    for wrong in ({"kernel": 4}, {"last": -1}, {"kv_ratio": 0}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            GemFilter(**wrong)
