"""What a method gets in a group is what it gets alone; nothing survives a prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from structkv_bench.engine.attending import Attending
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.cache import LayerCache
from structkv_bench.engine.decode import decode
from structkv_bench.engine.method import Compressor
from structkv_bench.engine.prefill import PARTS, Prefilled, prefill
from structkv_bench.methods.full import Full
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.methods.structkv import StructKV
from tests.engine.test_evict_is_mask import METHODS
from tests.every_method import BUDGETED, but
from tests.tiny import Tiny, tiny

GROUP = [
    *METHODS.values(),
    H2O(budget=20, running=True),
    StreamingLLM(budget=20, variant="rolling"),
    StreamingLLM(budget=30, variant="rolling"),
    StructKV(kv_ratio=0.1, struct_ratio=0.5, window=4),
    StructKV(kv_ratio=0.2, struct_ratio=0.5, window=4),
]


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def _heads(row: Prefilled) -> list[LayerCache]:
    """Of all layers."""
    return [head for layer in row.cache.layers for head in layer.by_head()]


def test_group_equals_alone(llama: Tiny) -> None:
    """Kept sets, logits, pivots and answers of all methods in one prefill and one decode batch."""
    ids = llama.prompt(90)
    together = llama.prefill(ids, *GROUP)
    for method, row in zip(GROUP, together, strict=True):
        [alone] = llama.prefill(ids, method)
        assert torch.equal(row.logits, alone.logits)
        assert row.layer_tokens == alone.layer_tokens
        assert row.compressor.facts() == alone.compressor.facts()
        for mine, other in zip(_heads(row), _heads(alone), strict=True):
            assert torch.equal(mine.positions, other.positions)
            assert torch.equal(mine.keys, other.keys)
    answers = [row.ids for row in decode(llama.model, together, 12)]
    assert answers == [llama.generate(ids, method, new=12)[0] for method in GROUP]


def test_two_budgets_of_structkv_share_their_skeleton(llama: Tiny) -> None:
    """Equal cuts are one branch: the layers run once for both."""
    passes = []
    run_layer = llama.model.run_layer

    def counting(*args: Any) -> torch.Tensor:
        passes.append(args[1].shape[1])
        return run_layer(*args)

    llama.model.run_layer = counting  # type: ignore[method-assign]
    try:
        methods = [StructKV(kv_ratio=ratio, struct_ratio=0.5, pivot=1) for ratio in (0.2, 0.3)]
        llama.prefill(llama.prompt(90), *methods)
    finally:
        del llama.model.run_layer  # type: ignore[misc]
    assert passes == [90, 90, 45, 45]


def test_order_of_samples_does_not_matter(llama: Tiny) -> None:
    """Case 4: [A,B], [B,A], [A], [B] agree, also after a sample that raised inside a method."""
    a, b = llama.prompt(70, seed=1), llama.prompt(50, seed=2)
    fresh = {"a": llama.generate(a, *GROUP), "b": llama.generate(b, *GROUP)}
    for order in ("ab", "ba"):
        for name in order:
            assert llama.generate({"a": a, "b": b}[name], *GROUP) == fresh[name]
    [broken] = prefill(llama.model, a, [_Raises()])
    assert broken.error is not None
    assert "out of luck" in broken.error
    assert llama.generate(b, *GROUP) == fresh["b"]


def test_a_method_that_raises_leaves_the_others_alone(llama: Tiny) -> None:
    """A fault in one method of a group is that method's alone."""
    ids = llama.prompt(50)
    compressors = [Full().compressor(50, 4), _Raises(), SnapKV(budget=16).compressor(50, 4)]
    full, broken, snapkv = prefill(llama.model, ids, compressors)
    assert (full.error, snapkv.error) == (None, None)
    assert broken.error is not None
    assert [row.ids for row in decode(llama.model, [full, snapkv], 8)] == llama.generate(
        ids, Full(), SnapKV(budget=16)
    )


@pytest.mark.parametrize("method", BUDGETED.values(), ids=BUDGETED.keys())
def test_the_method_acts_on_every_sample(llama: Tiny, method: Any) -> None:
    """Case 3: counts, bytes and the sets themselves, sample after sample, as in a fresh model."""
    method = but(method, budget=16, struct_ratio=0.5, tsp_ratio=0.5, window=8)
    prompts = [llama.prompt(tokens, seed=tokens) for tokens in (60, 48, 77)]
    for ids in prompts:
        [row] = llama.prefill(ids, method)
        held = row.cache.entries()
        off = 3 if getattr(method, "allocator", "") == "adakv" else 1  # it rounds for each head, others once
        assert held == pytest.approx([2 * n for n in method.layer_entries(len(ids), 4)], abs=off)
        assert sum(held) == pytest.approx(4 * 2 * 16, abs=4 + 4 * off)  # layers, KV heads, entries
        assert row.cache.bytes() == 2 * sum(held) * 8 * 4  # K and V, dim, fp32
        [fresh] = tiny("llama").prefill(ids, method)
        assert all(
            torch.equal(mine.positions, other.positions)
            for mine, other in zip(_heads(row), _heads(fresh), strict=True)
        )


@pytest.mark.parametrize(
    "method",
    [
        Full(),
        SnapKV(kv_ratio=0.5),
        H2O(kv_ratio=0.5, heads="query"),
        SnapKV(kv_ratio=0.5, allocator="adakv"),
        SnapKV(kv_ratio=0.5, heads="query", allocator="pyramidkv+adakv"),
    ],
)
def test_batch_of_unequal_caches_equals_alone(llama: Tiny, method: Any) -> None:
    """Case 6: rows of different length in one buffer; padding is never seen."""
    prompts = [llama.prompt(60, seed=3), llama.prompt(52, seed=4), llama.prompt(33, seed=5)]
    rows = [llama.prefill(ids, method)[0] for ids in prompts]
    step = torch.tensor([[5], [6], [7]])
    with torch.inference_mode():
        together = Batch(llama.model, rows, room=1).forward(step)
    for ids, token, logits in zip(prompts, step, together, strict=True):
        [row] = llama.prefill(ids, method)
        assert torch.allclose(llama.next_logits(row, int(token)), logits, atol=1e-5)


def test_a_batch_pads_nothing_to_speak_of(llama: Tiny) -> None:
    """Rows and heads of any length: what is allocated is what they hold and the room for new tokens."""
    rows = [
        llama.prefill(llama.prompt(tokens, seed=tokens), method)[0]
        for tokens in (601, 333)
        for method in (Full(), SnapKV(allocator="pyramidkv+adakv", kv_ratio=0.3), SnapKV(heads="query"))
    ]
    held = sum(row.cache.bytes() for row in rows)
    lanes = sum(len(layer.by_head()) for row in rows for layer in row.cache.layers)
    batch = Batch(llama.model, rows, room=3)
    assert all(not row.cache.layers for row in rows)  # taken over, not copied beside
    buffers = [
        buffer for layer in batch._layers for bucket in layer for buffer in (bucket.keys, bucket.values)
    ]
    entry = 2 * 8 * 4  # K and V, dim, fp32
    assert (
        held + 3 * lanes * entry
        <= sum(buffer.nbytes for buffer in buffers)
        <= 1.01 * held + 4 * lanes * entry
    )


def test_a_batch_gives_its_caches_back(llama: Tiny) -> None:
    """With what was appended; going on from them is going on."""
    methods = [Full(), SnapKV(kv_ratio=0.3, allocator="adakv"), H2O(budget=20, running=True)]
    ids, new = llama.prompt(60), torch.tensor([[5, 6, 7]])
    rows, at_once = llama.prefill(ids, *methods), llama.prefill(ids, *methods)
    with torch.inference_mode():
        expected = Batch(llama.model, at_once, room=3).forward(new.expand(3, -1))
        batch = Batch(llama.model, rows, room=2)
        batch.forward(new[:, :2].expand(3, -1))
        for row, cache in zip(rows, batch.release(), strict=True):
            assert cache.seen == 62
            row.cache = cache
        assert torch.allclose(
            Batch(llama.model, rows, room=1).forward(new[:, 2:].expand(3, -1)), expected, atol=1e-5
        )


def test_rows_that_finish_leave_the_batch(llama: Tiny) -> None:
    """A row's answer does not depend on when the others stop."""
    prompts = [llama.prompt(40 + 3 * i, seed=i) for i in range(6)]
    alone = [llama.generate(ids, Full(), new=10)[0] for ids in prompts]
    stop = llama.model.stop_ids
    llama.model.stop_ids = frozenset(token for answer in alone for token in answer[3:5])
    try:
        expected = [llama.generate(ids, Full(), new=10)[0] for ids in prompts]
        rows = [llama.prefill(ids, Full())[0] for ids in prompts]
        assert [row.ids for row in decode(llama.model, rows, 10)] == expected
        assert len({len(answer) for answer in expected}) > 1
    finally:
        llama.model.stop_ids = stop


class _Raises(Compressor):
    def keep_kv(self, layer: Any) -> None:
        if layer.index == 2:
            raise ValueError("out of luck")


def test_prefill_seconds_are_a_methods_own_way(llama: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if alone: the layers of its branch, its own choices, and scores that another method computed."""
    clock = [0.0]
    for module in ("prefill", "layer"):
        monkeypatch.setattr(f"structkv_bench.engine.{module}.now", lambda like: clock[0])

    def taking(seconds: float, function: Any) -> Any:
        def timed(*args: Any) -> Any:
            result = function(*args)
            clock[0] += seconds
            return result

        return timed

    monkeypatch.setattr(llama.model, "run_layer", taking(10, llama.model.run_layer))
    monkeypatch.setattr(Attending, "probabilities", taking(5, Attending.probabilities))
    ids = llama.prompt(60)
    snapkv, other = SnapKV(budget=24), SnapKV(budget=20)
    assert llama.prefill(ids, snapkv)[0].seconds == 4 * (10 + 5)
    assert [row.seconds for row in llama.prefill(ids, Full(), other, snapkv)] == [40, 60, 60]


def test_parts_of_the_time_add_up(llama: Tiny) -> None:
    """Figure 7's parts: all of a method's time, each above 0 where the method does such a thing."""
    structkv = StructKV(kv_ratio=0.3, struct_ratio=0.5, pivot=1)
    full, row = llama.prefill(llama.prompt(120), Full(), structkv)
    assert set(row.parts) == set(PARTS)
    assert min(row.parts.values()) > 0
    assert row.seconds == sum(row.parts.values())
    assert (full.parts["scoring"], full.parts["detection"]) == (0, 0)


def test_fidelity_is_the_cosine_to_the_pass_that_kept_all(llama: Tiny) -> None:
    """Figure 5: layers after the cut, over the tokens that were kept; 1 where dropping changes nothing."""
    ids = llama.prompt(120)
    structkv = StructKV(kv_ratio=0.3, struct_ratio=0.5, pivot=1)
    full, row = llama.prefill(ids, Full(), structkv)
    assert full.fidelity == []
    assert len(row.fidelity) == 3  # the pivot's own output, then layers 2 and 3
    assert row.fidelity[0] == 1
    assert all(0 < value < 1 for value in row.fidelity[1:])
    [alone] = llama.prefill(ids, structkv)
    assert alone.fidelity == []
