"""PyramidInfer against its definition done naively."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structkv_bench.engine.layer import LayerView
from structkv_bench.errors import UserError
from structkv_bench.methods.full import Full
from structkv_bench.methods.pyramidinfer import PyramidInfer
from tests.oracle import causal, forward
from tests.tiny import Tiny, tiny

N = 120


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def test_tokens_of_every_layer_equal_their_definition(llama: Tiny) -> None:
    """Scores, cosine schedule and cuts that add up, from the attention matrices of what is left."""
    ids = llama.prompt(N)
    method = PyramidInfer(recent_ratio=0.2, decay_ratio=0.3, sinks=3, min_context=8)
    [row] = llama.prefill(ids, method)
    recent, left, masks = 25, set(range(N)), []
    for layer in range(4):
        kept = row.cache.layers[layer].positions
        assert kept.tolist() == [sorted(left)] * 2
        assert row.layer_tokens[layer] == len(left)
        masks.append(among(left))
        _, attentions = forward(llama.stock, ids, masks + [causal(N)] * (3 - layer))
        attention = attentions[layer].mean(0)[N - recent :]
        scores = torch.linspace(1.0, 1.2, recent, dtype=torch.float64) @ attention
        context = sorted(left)[:-recent]
        share = 0.7 * (math.cos(math.pi * layer / 4) + 1) / 2 + 0.3
        count = int(len(context) * share)
        best = sorted(context[3:], key=lambda j: -float(scores[j]))[: count - 3]
        left = set(context[:3]) | set(best) | set(range(N - recent, N))
    assert row.layer_tokens == [120, 120, 110, 80]  # 95 before the recent 25: shares 1, 0.897, 0.65


def among(tokens: set[int]) -> torch.Tensor:
    """Causal attention in which the others don't exist."""
    seen = causal(N)
    seen[:, [j for j in range(N) if j not in tokens]] = False
    seen[torch.arange(N), torch.arange(N)] = True
    return seen


def test_the_first_layer_cuts_nothing_and_short_contexts_stay_whole(llama: Tiny) -> None:
    """d_0 = 1; a cut to no more than min_context tokens is not made."""
    assert PyramidInfer(decay_ratio=0.01).layer_tokens(1000, 32)[:2] == [1000, 1000]
    ids = llama.prompt(80)
    ours, full = llama.prefill(ids, PyramidInfer(decay_ratio=0.01), Full())
    assert torch.equal(ours.logits, full.logits)
    assert ours.layer_tokens == [80] * 4


@pytest.mark.parametrize(("recent", "rho", "percent"), [(0.2, 0.7, 60), (0.2, 0.3, 50), (0.01, 0.01, 35)])
def test_mean_over_the_layers_of_llama_3_1_8b_is_what_the_harness_calls_it(
    recent: float, rho: float, percent: int
) -> None:
    """FastKV's configs of 32 layers are named by their budget; the mean comes out near it."""
    tokens = PyramidInfer(recent_ratio=recent, decay_ratio=rho).layer_tokens(8000, 32)
    assert sum(tokens) / (32 * 8000) == pytest.approx(percent / 100, abs=0.015)


@given(
    tokens=st.integers(1, 3000),
    layers=st.integers(1, 40),
    recent=st.floats(0.01, 1.0),
    rho=st.floats(0.01, 1.0),
)
@settings(max_examples=200, deadline=None)
def test_fewer_tokens_from_layer_to_layer_and_the_recent_ones_always(
    tokens: int, layers: int, recent: float, rho: float
) -> None:
    """What `show` prints: never more than before, never less than what is sure of its place."""
    method = PyramidInfer(recent_ratio=recent, decay_ratio=rho)
    entering = method.layer_tokens(tokens, layers)
    assert len(entering) == layers
    assert entering == sorted(entering, reverse=True)
    assert entering[0] == tokens
    assert entering[-1] >= method.recent(tokens)
    assert entering[-1] == tokens or entering[-1] > method.recent(tokens) + method.min_context


def test_weighted_column_sums_of_the_last_queries() -> None:
    """In blocks, as from the whole matrix; the plain sums beside them are another score."""
    torch.manual_seed(0)
    q, k = torch.randn(8, 300, 8), torch.randn(2, 300, 8)
    layer = LayerView(0, q, k, k, torch.arange(300), 300, 8**-0.5)
    logits = (q @ k.repeat_interleave(4, 0).transpose(1, 2)) * 8**-0.5
    attention = logits.masked_fill(~causal(300), -torch.inf).softmax(-1)
    weights = torch.linspace(1.0, 1.2, 150)[:, None]
    assert torch.allclose(layer.column_sums(150, 1.2), (attention[:, 150:] * weights).sum(1), atol=1e-4)
    assert torch.allclose(layer.column_sums(150), attention[:, 150:].sum(1), atol=1e-4)
    assert torch.allclose(layer.column_sums(), attention.sum(1), atol=1e-4)


def test_settings_out_of_range_are_refused() -> None:
    """Each names the setting and what would be right."""
    for wrong in ({"recent_ratio": 0}, {"decay_ratio": 1.5}, {"newest_weight": 0}, {"sinks": 65},
                  {"sinks": -1}):  # fmt: skip
        with pytest.raises(UserError, match=f"{next(iter(wrong))}="):
            PyramidInfer(**wrong)
