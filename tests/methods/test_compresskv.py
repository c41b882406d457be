"""CompressKV: the official choice index by index, heads that find the needle, and budgets by layer error."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structkv_bench.calibrate.needles import NeedleRun, Needles
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError
from structkv_bench.methods import compresskv
from structkv_bench.methods.compresskv import CompressKV, layer_budgets
from tests.every_method import calibrated
from tests.methods.test_golden import all_inputs, assert_kept, assert_scores, golden, layer_of
from tests.tiny import Tiny, tiny

ORDERS = {
    "A": [[5, 0, 3, 7, 6, 1, 2, 4], [2, 6, 7, 1, 0, 3, 4, 5]],
    "B": [[5, 0, 3, 1, 2, 4], [4, 2, 1, 0, 5, 3]],
}
"""Heads by rank, in layers 0 and 1 of the reference data."""


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


@all_inputs
@pytest.mark.parametrize(("number", "entries"), [(0, 24), (1, 40)])
def test_the_official_choice(shape: str, seed: int, number: int, entries: int) -> None:
    """TUDa-HWAI/CompressKV: four heads' window sums, averaged over 5 keys, one set for all KV heads."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("compresskv", shape, seed)
    heads = ORDERS[shape][number][:4]
    assert_scores(CompressKV().scores(layer, heads), reference[f"layer{number}_C{entries}.scores"])
    index = CompressKV().choice(layer, heads, entries)
    assert index.shape == (layer.kv_heads, entries)
    assert (index == index[0]).all()
    assert_kept(index[:1], reference, f"layer{number}_C{entries}")


@given(
    errors=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    mean=st.integers(9, 400),
    spare=st.integers(0, 300),
    room=st.integers(0, 800),
)
@settings(max_examples=300, deadline=None)
def test_layer_budgets_sum_exactly(errors: list[float], mean: int, spare: int, room: int) -> None:
    """For any errors: the total is met, between floor and cap, and a larger error never gets less."""
    floor, cap = max(1, mean - spare), mean + room
    budgets = layer_budgets(errors, mean, floor, cap)
    assert sum(budgets) == mean * len(errors)
    assert all(floor <= budget <= cap for budget in budgets)
    for error, budget in zip(errors, budgets, strict=True):
        assert all(budget >= other - 1 for e, other in zip(errors, budgets, strict=True) if error >= e)


def test_layer_budgets_follow_the_formula() -> None:
    """C_l = 32 + e_l (total - 32 L) where no bound is met; what the cap takes off goes to the others."""
    assert layer_budgets([0.4, 0.3, 0.2, 0.1], 100, 32, 300) == [141, 114, 86, 59]
    assert layer_budgets([0.97, 0.01, 0.01, 0.01], 100, 32, 300) == [295, 35, 35, 35]  # 296 is one too many
    assert layer_budgets([0.97, 0.01, 0.01, 0.01], 100, 32, 200) == [200, 67, 67, 66]


@pytest.mark.parametrize(("tokens", "ratio"), [(60, 0.3), (301, 0.1), (2048, 0.1), (2048, 0.9), (512, 1.0)])
def test_a_method_keeps_its_budget(tokens: int, ratio: float) -> None:
    """On any prompt all layers together hold int(N ratio) a layer, and none more than the prompt has."""
    method = calibrated(CompressKV(kv_ratio=ratio))
    budgets = method.layer_entries(tokens, 4)
    assert sum(budgets) == 4 * int(tokens * ratio)
    assert max(budgets) <= tokens
    assert min(budgets) > 8
    assert budgets != [budgets[0]] * 4 or ratio == 1


def planted(layer: int, tokens: int, needle: range, finder: int) -> LayerView:
    """A layer of 6 heads and 2 KV heads: `finder` alone looks at the needle, the others at token 0."""
    key = torch.zeros(2, tokens, 8)
    key[:, 0, 0] = 1
    key[:, needle.start : needle.stop, 1] = 1
    query = torch.zeros(6, tokens, 8)
    query[:, :, 0] = 60
    query[finder, :, 0], query[finder, :, 1] = 0, 60
    value = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(layer))
    return LayerView(layer, query, key, value, torch.arange(tokens), tokens, 8**-0.5)


def test_the_head_that_looks_at_the_needle_ranks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: another head in each layer, with the whole needle's mass; runs that failed don't count."""
    finders = [4, 1, 5]
    needle, ids = range(20, 25), [*range(100, 180)]
    good = NeedleRun(ids, needle, [ids[20], 7, ids[22]], recall=1.0)
    failed = NeedleRun(ids, range(40, 45), [ids[40]], recall=0.5)

    def watch(_model: Any, ids: list[int], watcher: Compressor) -> None:
        for layer, finder in enumerate(finders):
            watcher.keep_kv(planted(layer, len(ids), needle, finder))

    monkeypatch.setattr(compresskv, "watch", watch)
    projection = SimpleNamespace(self_attn=SimpleNamespace(o_proj=SimpleNamespace(weight=torch.eye(48))))
    model: Any = SimpleNamespace(layers=[projection] * 3)
    texts: Any = SimpleNamespace(runs=lambda _: iter([good, failed]), above_recall=0.5)
    found = CompressKV(retrieval_heads=1).measure(model, texts)
    assert [order[0] for order in found.values["heads"]] == finders
    assert all(sorted(order) == [*range(6)] for order in found.values["heads"])
    assert all(mass[finder] > 0.99 for mass, finder in zip(found.values["needle_mass"], finders, strict=True))
    assert (found.counted, len(found.prompts)) == (1, 2)
    assert sum(found.values["errors"]) == pytest.approx(1, abs=1e-4)
    texts = SimpleNamespace(runs=lambda _: iter([failed]), above_recall=0.5)
    with pytest.raises(UserError, match=r"in none of 1 needle tests .*answers=forced"):
        CompressKV().measure(model, texts)


def test_a_needle_token_is_looked_for_by_the_query_that_says_it() -> None:
    """The query one place before a token brings it forth: the prompt's last one says the answer's first."""
    view = planted(0, 50, range(10, 12), 3)
    view.query[:, 39] = 0  # the prompt's last token looks everywhere alike
    run = NeedleRun([*range(40)], range(10, 12), [10, 5, 11], recall=1.0)
    watcher = compresskv._NeedleMass(run)
    watcher.keep_kv(replace(view, query=view.query[:, :43], key=view.key[:, :43], value=view.value[:, :43]))
    assert watcher.mass[0].shape == (6, 2)
    assert watcher.mass[0][3].tolist() == pytest.approx([2 / 40, 1.0], abs=1e-3)


def test_layer_errors_are_those_of_a_decode_over_the_compressed_layer(llama: Tiny) -> None:
    """e_0 by hand: the real engine decodes the answer with layer 0 compressed, o_proj's outputs compared."""
    ids, answer, heads = llama.prompt(90), llama.prompt(5, seed=1), [5, 0, 3, 7]
    method = CompressKV(floor=20)
    run = NeedleRun(ids, range(30, 36), answer, recall=1.0)
    watcher = compresskv._LayerErrors(method, llama.model, run, [heads] * 4)
    prefill(llama.model, [*ids, *answer], [watcher])

    class FirstLayer(Compressor):
        def keep_kv(self, layer: LayerView) -> torch.Tensor | None:
            return method.choice(layer, heads, 20) if layer.index == 0 else None

    outputs = []
    for compressor in (Compressor(), FirstLayer()):
        seen: list[torch.Tensor] = []
        module: Any = llama.model.layers[0]
        hook = module.self_attn.o_proj.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out))
        rows = prefill(llama.model, ids, [compressor])
        seen.clear()
        with torch.inference_mode():
            batch = Batch(llama.model, rows, room=5)
            for token in answer:
                batch.forward(torch.tensor([[token]]))
        hook.remove()
        outputs.append(torch.cat(seen))
    full, compressed = outputs
    assert watcher.errors[0] == pytest.approx(float((full - compressed).norm() / full.norm()), rel=1e-4)
    assert watcher.errors[0] > 0.01


def test_a_calibration_of_the_tiny_model_is_whole(llama: Tiny) -> None:
    """Every layer has an order of all its heads and a share of the error; answers may be put in its mouth."""
    found = CompressKV().measure(llama.model, Needles(lengths=[600], depths=2, answers="forced"))
    assert [sorted(order) for order in found.values["heads"]] == [[*range(8)]] * 4
    assert len(found.values["errors"]) == 4
    assert (found.counted, len(found.prompts)) == (2, 2)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (CompressKV(kv_ratio=0.05), "kv_ratio=0.05 keeps 5 of 100 .* at least 9 entries"),
        (CompressKV(kv_ratio=0.001), "keeps 0 of 100"),
    ],
)
def test_a_budget_that_no_layer_can_meet_is_refused(method: CompressKV, says: str) -> None:
    with pytest.raises(UserError, match=says):
        calibrated(method).compressor(100, 4)


def test_an_infinite_cap_is_none() -> None:
    budgets = calibrated(CompressKV(kv_ratio=0.2, cap=math.inf)).layer_entries(1000, 4)
    assert sum(budgets) == 4 * 200


@pytest.mark.parametrize("wrong", [{"retrieval_heads": 0}, {"floor": 8}, {"cap": 0.5}, {"pooling": "mean"}])
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        CompressKV(**wrong)
