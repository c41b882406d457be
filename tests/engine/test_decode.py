"""Greedy decode: stop ids, budgets that hold while decoding, questions of several tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from structkv_bench.engine.attention import Projected
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.decode import Ending, decode, decode_batch
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Method
from structkv_bench.engine.prefill import _own_attention
from structkv_bench.methods.full import Full
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.scoring import best_and_last
from structkv_bench.methods.streaming_llm import StreamingLLM
from tests.tiny import Tiny, tiny


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def test_greedy_equals_stock_generate(llama: Tiny) -> None:
    """The full cache decodes what transformers' own greedy generate does."""
    ids = llama.prompt(50)
    out = llama.stock.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert llama.generate(ids, Full(), new=12)[0] == [t for t in out[0, 50:].tolist() if t != 1]


def test_stop_id_first_is_an_empty_answer_after_one_pass(llama: Tiny) -> None:
    """Case 7: the prompt's own forward pass is the only one."""
    ids = llama.prompt(40)
    [first] = llama.generate(ids, Full(), new=1)
    stop, llama.model.stop_ids = llama.model.stop_ids, frozenset({first[0]})
    try:
        [generated] = decode(llama.model, llama.prefill(ids, Full()), 8)
    finally:
        llama.model.stop_ids = stop
    assert (generated.ids, generated.forward_passes) == ([], 1)


@pytest.mark.parametrize("stop_at", [0, 1])
def test_each_stop_id_stops(llama: Tiny, stop_at: int) -> None:
    """Case 7: a model with two stop ids stops at either."""
    ids = llama.prompt(40)
    [answer] = llama.generate(ids, Full(), new=6)
    stop, llama.model.stop_ids = llama.model.stop_ids, frozenset({answer[2 + stop_at], 258})
    try:
        assert llama.generate(ids, Full(), new=6)[0] == answer[: answer.index(answer[2 + stop_at])]
    finally:
        llama.model.stop_ids = stop


def test_a_least_number_of_tokens_forbids_stop_ids_until_then(llama: Tiny) -> None:
    """samsum's rule: an immediate newline is no answer; the best other token is taken."""
    ids = llama.prompt(40)
    [first] = llama.generate(ids, Full(), new=1)
    stops = frozenset(first)
    [row] = decode(llama.model, llama.prefill(ids, Full()), 4, stops, min_new_tokens=1)
    logits = llama.prefill(ids, Full())[0].logits
    assert logits is not None
    assert row.ids[0] == logits.topk(2).indices[1]
    assert decode(llama.model, llama.prefill(ids, Full()), 4, stops)[0].ids == []


@dataclass(frozen=True)
class _Uneven(Method):
    """24, 20, 16 and 12 entries in layers 0 to 3."""

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return _UnevenCompressor()


class _UnevenCompressor(Compressor):
    def keep_kv(self, layer: LayerView) -> Tensor:
        scores = layer.window_attention(4).sum((0, 1)).expand(layer.kv_heads, -1)
        return best_and_last(scores, 24 - 4 * layer.index, 4, layer.tokens)


def test_question_in_one_pass_equals_single_steps_on_uneven_layers(llama: Tiny) -> None:
    """Case 5: one mask for all layers would be wrong, or not even fit."""
    ids, question = llama.prompt(40), llama.prompt(5, seed=9)
    at_once, one_by_one = llama.prefill(ids, _Uneven()) + llama.prefill(ids, _Uneven())
    with torch.inference_mode():
        logits = Batch(llama.model, [at_once], room=5).forward(torch.tensor([question]))
        batch = Batch(llama.model, [one_by_one], room=5)
        for token in question:
            last = batch.forward(torch.tensor([[token]]))
    assert torch.allclose(logits, last, atol=1e-5)


def test_rolling_decode_goes_on_as_rolling_prefill_did(llama: Tiny) -> None:
    """StreamingLLM as published: feeding tokens one by one equals having them in the prompt."""
    ids = llama.prompt(70)
    method = StreamingLLM(budget=20, variant="rolling")
    [whole] = llama.prefill(ids, method)
    [part] = llama.prefill(ids[:60], method)
    with torch.inference_mode():
        batch = Batch(llama.model, [part], room=10)
        for token in ids[60:]:
            logits = batch.forward(torch.tensor([[token]]))
    assert torch.allclose(logits[0], whole.logits, atol=1e-4)


def test_rolling_attention_counts_positions_inside_the_cache() -> None:
    """Against the official rule done naively: keys before rotation, rotated by their place in the cache."""
    model = tiny("llama").model
    sinks, recent, tokens = 4, 8, 40
    torch.manual_seed(0)
    q, k, v = torch.randn(8, tokens, 8), torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)
    at = torch.arange(tokens)
    with torch.inference_mode():
        rotated = Projected(0, model.rotate(q, at)[None], model.rotate(k, at)[None], v[None], 8**-0.5, None)
        attention = StreamingLLM(budget=12, variant="rolling").compressor(tokens, 4).attention
        assert attention is not None
        got = _own_attention(attention, rotated, at, model)[0]
        for t in range(tokens):
            cached = list(range(t + 1)) if t < 12 else [*range(sinks), *range(t - recent + 1, t + 1)]
            places = torch.arange(len(cached))
            keys = model.rotate(k[:, cached], places).repeat_interleave(4, 0)
            query = model.rotate(q[:, t : t + 1], places[-1:])
            weights = (query @ keys.transpose(1, 2) * 8**-0.5).softmax(-1)
            expected = weights @ v[:, cached].repeat_interleave(4, 0)
            assert torch.allclose(got[:, t], expected[:, 0], atol=1e-5)


@pytest.mark.parametrize("method", [H2O(budget=16, running=True), StreamingLLM(budget=16, variant="rolling")])
def test_running_methods_hold_their_budget(llama: Tiny, method: Method) -> None:
    """The buffers of a running method never grow beyond the budget and the newest token."""
    [row] = llama.prefill(llama.prompt(50), method)
    with torch.inference_mode():
        batch = Batch(llama.model, [row], room=10)
        for token in range(10, 20):
            batch.forward(torch.tensor([[token]]))
    [cache] = batch.release()
    assert cache.entries() == [2 * (16 if isinstance(method, H2O) else 15)] * 4
    for layer in cache.layers:
        assert [int(head.positions[0, -1]) for head in layer.by_head()] == [59, 59]


@pytest.mark.parametrize(
    "method",
    [Full(), H2O(budget=16), H2O(budget=16, running=True), StreamingLLM(budget=16, variant="rolling")],
    ids=["full", "h2o", "h2o running", "rolling"],
)
def test_a_question_after_compression_equals_feeding_it_token_by_token(llama: Tiny, method: Method) -> None:
    """query_aware=false: the question meets the compressed context, for every kind of method."""
    ids, question = llama.prompt(60), llama.prompt(7, seed=9)
    [answer] = decode(llama.model, llama.prefill(ids, method), 6, question=question)
    [row] = llama.prefill(ids, method)
    with torch.inference_mode():
        batch = Batch(llama.model, [row], room=20)
        for token in question:
            logits = batch.forward(torch.tensor([[token]]))
        expected = []
        while len(expected) < 6:
            expected.append(int(logits[0].argmax()))
            logits = batch.forward(torch.tensor([[expected[-1]]]))
    stops = [place for place, token in enumerate(expected) if token in llama.model.stop_ids]
    assert answer.ids == expected[: min(stops, default=6)]


def test_each_row_ends_as_it_says_whatever_decodes_beside_it(llama: Tiny) -> None:
    """Its own least and most tokens and stop ids; rows of other prompts and lengths change nothing."""
    prompts = [llama.prompt(tokens, seed) for seed, tokens in enumerate((40, 90, 41, 60))]
    first = [frozenset(llama.generate(ids, Full(), new=1)[0]) for ids in prompts]
    endings = [Ending(9), Ending(2), Ending(7, first[2], 3), Ending(7, first[3])]
    rows = [llama.prefill(ids, H2O(budget=16))[0] for ids in prompts]
    together = decode_batch(llama.model, rows, endings)
    for ids, ending, row in zip(prompts, endings, together, strict=True):
        [alone] = decode_batch(llama.model, llama.prefill(ids, H2O(budget=16)), [ending])
        assert (row.ids, row.forward_passes) == (alone.ids, alone.forward_passes)
        assert row.tie_margin == pytest.approx(alone.tie_margin, abs=1e-4)
    assert [len(row.ids) for row in together[:2]] == [9, 2]
    assert len(together[2].ids) >= 3
    assert together[3].ids == []
