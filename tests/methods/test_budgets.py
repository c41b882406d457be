"""Budgets mean the same for every method, and the window survives anything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from structkv_bench.config import compose
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Method
from structkv_bench.errors import UserError
from structkv_bench.methods.fastkv import FastKV
from structkv_bench.methods.gemfilter import GemFilter
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.scoring import best, best_and_last
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.methods.structkv import StructKV
from tests.every_method import BUDGETED, EVERY, WHOLE, but
from tests.tiny import Tiny, tiny

every_method = pytest.mark.parametrize("method", EVERY.values(), ids=EVERY.keys())
every_budgeted = pytest.mark.parametrize("method", BUDGETED.values(), ids=BUDGETED.keys())


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


@every_budgeted
def test_a_budget_above_the_prompt_is_the_full_cache(llama: Tiny, method: Method) -> None:
    """Case 2: same tokens, same logits, everything kept."""
    from structkv_bench.methods.full import Full

    method = but(method, budget=1000, **WHOLE)
    ids = llama.prompt(100)
    full, ours = llama.prefill(ids, Full(), method)
    assert torch.allclose(full.logits, ours.logits, atol=1e-4)
    assert ours.cache.entries() == [2 * 100] * 4
    assert len({tuple(answer) for answer in llama.generate(ids, Full(), method)}) == 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("method", [H2O(budget=1000, running=True),
                                    StreamingLLM(budget=1000, variant="rolling")])  # fmt: skip
def test_a_budget_that_is_never_reached_changes_nothing_while_decoding(family: str, method: Method) -> None:
    """Case 2 for methods that evict in decode: not before as many entries as the budget exist."""
    from structkv_bench.methods.full import Full

    model = tiny(family)
    ids = model.prompt(60)
    expected, got = model.generate(ids, Full(), method, new=12)
    assert got == expected
    full, ours = model.prefill(ids, Full(), method)
    assert torch.allclose(model.next_logits(full, 7), model.next_logits(ours, 7), atol=1e-4)


@every_budgeted
@pytest.mark.parametrize("ratio", [0.1, 0.15, 0.2])
def test_kept_bytes_are_the_nominal_share(llama: Tiny, method: Method, ratio: float) -> None:
    """Within one entry per layer and head, per KV head as stored, for every method at its defaults."""
    tokens = 301
    [row] = llama.prefill(llama.prompt(tokens), but(method, kv_ratio=ratio, window=8))
    one_entry = llama.model.shape.kv_bytes([1] * 4)
    nominal = ratio * llama.model.shape.kv_bytes([tokens] * 4)
    assert abs(row.cache.bytes() - nominal) <= one_entry


@every_method
def test_the_last_tokens_stay(llama: Tiny, method: Method) -> None:
    """The newest token is kept in every layer and head, whatever the scores.

    Where tokens began anew it is the newest of the chosen ones.
    """
    method = but(method, window=8)
    [row] = llama.prefill(llama.prompt(120), method)
    assert row.cache.seen == (method.entries(120) if row.compressor.begins_anew else 120)  # type: ignore[attr-defined]
    for layer in row.cache.layers:
        assert {int(head.positions.max()) for head in layer.by_head()} == {row.cache.seen - 1}


@pytest.mark.parametrize(
    "method",
    [
        SnapKV(budget=12),
        H2O(budget=12),
        StructKV(budget=12, struct_ratio=0.5, pivot=0),
        FastKV(budget=12, tsp_ratio=0.5),
    ],
)
def test_the_window_survives_ties(method: Method) -> None:
    """Case 10: with all scores equal the last 8 are kept, and the 4 others are always the same."""
    flat = LayerView(0, torch.zeros(8, 40, 8), torch.zeros(2, 40, 8), torch.zeros(2, 40, 8),
                     torch.arange(40), 40, 1.0)  # fmt: skip
    index = method.compressor(40, 4).keep_kv(flat)
    assert index is not None
    assert index[:, 4:].tolist() == [list(range(32, 40))] * 2
    assert torch.equal(index, method.compressor(40, 4).keep_kv(flat))


@given(
    scores=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=12, max_size=60),
    last=st.integers(1, 8),
    spare=st.integers(1, 30),
)
@settings(max_examples=300, deadline=None)
def test_best_and_last_keeps_what_it_says(scores: list[float], last: int, spare: int) -> None:
    """The last ones, then the highest before them, of equals the earliest; ascending, no index twice."""
    tokens = len(scores)
    entries = min(last + spare, tokens)
    [kept] = best_and_last(torch.tensor([scores]), entries, last, tokens).tolist()
    before = sorted(range(tokens - last), key=lambda j: (-scores[j], j))[: entries - last]
    assert kept == sorted(before) + list(range(tokens - last, tokens))


def test_best_takes_the_earliest_of_equals() -> None:
    """The choice among equal scores depends on no library."""
    assert best(torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0]]), 2).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (SnapKV(budget=8), "budget=8 keeps 8 of 100 .* raise it, to at least 9 entries"),
        (H2O(kv_ratio=0.05), "kv_ratio=0.05 keeps 5 of 100"),
        (StreamingLLM(budget=4), "not more than the 4"),
        (StructKV(kv_ratio=0.5, struct_ratio=0.08), "struct_ratio=0.08 keeps 8 of 100"),
        (FastKV(budget=8), "budget=8 keeps 8 of 100 .* raise it, to at least 9 entries"),
        (FastKV(kv_ratio=0.5, tsp_ratio=0.08), "tsp_ratio=0.08 keeps 8 of 100"),
        (GemFilter(kv_ratio=0.001), "kv_ratio=0.001 keeps 0 of 100"),
        (GemFilter(budget=4, last=4), "not more than the 4"),
    ],
)
def test_a_budget_not_above_the_window_is_refused(method: Method, says: str) -> None:
    """Before anything runs, with the numbers."""
    with pytest.raises(UserError, match=says):
        method.compressor(100, 4)


def test_beside_a_budget_the_ratio_has_no_say() -> None:
    """A grid over both is one cell per budget."""
    assert SnapKV(kv_ratio=0.1, budget=64) == SnapKV(kv_ratio=0.2, budget=64)
    assert len(compose(["method=snapkv", "method.budget=64", "method.kv_ratio=0.1,0.2"])) == 1


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01])
def test_a_ratio_outside_0_to_1_is_refused(ratio: float) -> None:
    """0 keeps nothing and more than all does not exist."""
    with pytest.raises(UserError, match="give a share above 0 and up to 1"):
        SnapKV(kv_ratio=ratio)


class _Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("tokens", [2048, 4096])
@pytest.mark.parametrize("method", [*EVERY.values(), StreamingLLM(variant="rolling")],
                         ids=[*EVERY, "rolling"])  # fmt: skip
def test_no_tensor_grows_with_the_square_of_the_prompt(tokens: int, method: Method) -> None:
    """Case 14: an out-of-memory test that runs on a CPU; heads x tokens x 256 numbers at most."""
    small = tiny("llama", layers=3)
    with _Largest() as largest:
        small.prefill(small.prompt(tokens), method)
    assert largest.numbers < 8 * tokens * 256


def test_column_sums_equal_the_whole_matrix() -> None:
    """Blocks of queries change nothing but the memory."""
    torch.manual_seed(0)
    q, k = torch.randn(8, 300, 8), torch.randn(2, 300, 8)
    layer = LayerView(0, q, k, k, torch.arange(300), 300, 8**-0.5)
    logits = (q @ k.repeat_interleave(4, 0).transpose(1, 2)) * 8**-0.5
    hidden = torch.ones(300, 300, dtype=torch.bool).triu(1)
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(1)
    assert torch.allclose(layer.column_sums(), expected, atol=1e-4)
