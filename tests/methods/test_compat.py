"""Deviations of public harnesses: as they are there, off by default, and visible in every table."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from structkv_bench.config import compose
from structkv_bench.engine.attending import Attending
from structkv_bench.engine.column_sums import COLUMN_SUM_BLOCK
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Method
from structkv_bench.errors import UserError
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.report.naming import method_label
from tests.every_method import EVERY
from tests.tiny import tiny

N = 150


@pytest.mark.parametrize("window", [8, 64, 70])
def test_h2o_of_fastkv_masks_the_last_block_alone(window: int) -> None:
    """From the whole matrix: rows before the window see all keys, those of the window are causal."""
    torch.manual_seed(0)
    q, k = torch.randn(8, N, 16), torch.randn(2, N, 16)
    layer = LayerView(0, q, k, k, torch.arange(N), N, 0.25)
    logits = q @ k.repeat_interleave(4, 0).transpose(1, 2) * 0.25
    hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
    hidden[: N - window] = False
    expected = logits.masked_fill(hidden, -torch.inf).softmax(-1).sum(1)
    scores = H2O(window=window, compat="fastkv").scores(layer)
    assert torch.allclose(scores, expected, atol=1e-4)
    assert not torch.allclose(layer.column_sums(), expected, atol=1e-2)  # beside it, the method itself


def test_seeing_the_future_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of queries too: never tokens x tokens."""
    largest = []
    probabilities = Attending.probabilities

    def watched(self: Attending, start: int, stop: int) -> torch.Tensor:
        rows = probabilities(self, start, stop)
        largest.append(rows.shape)
        return rows

    monkeypatch.setattr(Attending, "probabilities", watched)
    q = torch.randn(8, 500, 8)
    LayerView(0, q, q[:2], q[:2], torch.arange(500), 500, 1.0).column_sums(causal_last=8)
    assert set(largest[:-1]) == {(8, COLUMN_SUM_BLOCK, 500)}


@pytest.mark.parametrize(
    ("ours", "compat"),
    [
        (StreamingLLM(budget=20), StreamingLLM(budget=20, compat="fastkv")),
        (SnapKV(budget=20, heads="query"), SnapKV(budget=20, compat="fastkv")),
        (H2O(budget=20, heads="query"), H2O(budget=20, compat="fastkv")),
    ],
)
def test_fastkv_stores_a_copy_per_query_head(ours: Method, compat: Method) -> None:
    """8 query heads share 2 KV heads here: four times the bytes, told before and after the prompt."""
    llama = tiny("llama")
    row, its = llama.prefill(llama.prompt(N), ours, compat)
    assert [layer.keys.shape[:2] for layer in its.cache.layers] == [(8, 20)] * 4
    assert compat.stored_heads(8, 2) == 8
    if not isinstance(compat, H2O):
        for mine, other in zip(row.cache.layers, its.cache.layers, strict=True):
            copies = 8 // len(mine.positions)
            assert torch.equal(mine.positions.repeat_interleave(copies, 0), other.positions)


def test_no_deviation_is_on_by_default() -> None:
    """Neither in the classes nor in conf/method/."""
    with_it = [method for method in EVERY.values() if hasattr(method, "compat")]
    assert len(with_it) >= 3
    assert {method.compat for method in with_it} == {"none"}
    assert {type(method)().compat for method in with_it} == {"none"}


@pytest.mark.parametrize("name", [name for name, method in EVERY.items() if hasattr(method, "compat")])
def test_no_table_hides_it(name: str) -> None:
    """The name that tables and figures show has it."""
    [setup] = compose([f"method={name}", "method.compat=fastkv"])
    about = {"names": {"method": name}, "config": {"method": asdict(setup.method)}}
    assert "compat=fastkv" in method_label(about).split()


def test_what_that_harness_does_not_do_is_refused() -> None:
    """And a harness that nobody has described."""
    with pytest.raises(UserError, match="compat=fastkv: that harness evicts once, give running=false"):
        H2O(running=True, compat="fastkv")
    with pytest.raises(UserError, match="compat=fastkv: that harness evicts once, give variant=harness"):
        StreamingLLM(variant="rolling", compat="fastkv")
    for method in (H2O, SnapKV, StreamingLLM):
        with pytest.raises(UserError, match="compat=kvpress: choose one of none, fastkv"):
            method(compat="kvpress")
