"""The cost model beside measurement: torch's FLOP counter, the bytes of caches, the peak of live tensors.

Rules that it rests on:

- torch counts a causal attention as a square unless it is told otherwise; here it counts the triangle.
- A method says what it scores with and how its tokens go; only an online pivot is not known before.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from structkv_bench.bench.peak import peak_memory
from structkv_bench.catalog import choices
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.cost.published import published
from structkv_bench.cost.speed import KNOWN, Device, device, probed
from structkv_bench.cost.work import Cost, batch_peak_bytes, cost, group_flops, group_need
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.decode import decode
from structkv_bench.engine.method import Method
from structkv_bench.errors import UserError
from structkv_bench.methods.fastkv import FastKV
from structkv_bench.methods.full import Full
from structkv_bench.methods.gemfilter import GemFilter
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.pyramidinfer import PyramidInfer
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.methods.structkv import StructKV
from structkv_bench.shape import ModelShape
from tests.tiny import Tiny, save_tiny, tiny

METHODS = {
    "full": Full(),
    "streaming_llm": StreamingLLM(kv_ratio=0.2),
    "snapkv": SnapKV(kv_ratio=0.2),
    "snapkv per query head": SnapKV(kv_ratio=0.2, heads="query"),
    "h2o": H2O(kv_ratio=0.2),
    "pyramidinfer": PyramidInfer(min_context=8),
    "gemfilter": GemFilter(kv_ratio=0.2),
    "fastkv": FastKV(kv_ratio=0.2),
    "structkv": StructKV(kv_ratio=0.2, pivot=1),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
TOKENS = 500
LLAMA = ModelShape(32, 32, 8, 128, 4096, 14336, 128256, max_positions=131072, itemsize=2)


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def attention_flops(
    query: Any, key: Any, value: Any, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> int:
    """Of the CPU's kernel, from its shapes, which torch's counter does not know; causal: the triangle."""
    rows, heads, queries, width = query
    keys = key[2]
    pairs = queries * (queries + 1) // 2 if is_causal else queries * keys
    return 4 * int(rows * heads * width * pairs)


def counted(run: Any) -> int:
    """FLOPs that torch counts of what `run` does."""
    own = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        run()
    assert any("attention" in str(op) for op in counter.get_flop_counts()["Global"])
    return int(counter.get_total_flops())


@every_method
def test_prefill_flops_are_those_that_torch_counts(llama: Tiny, method: Method) -> None:
    ids = llama.prompt(TOKENS)
    own = cost(llama.model.shape, method, TOKENS).prefill_flops
    assert own == pytest.approx(counted(lambda: llama.prefill(ids, method)), rel=0.01)


def test_an_online_pivot_costs_at_most_and_exactly_once_it_is_known(llama: Tiny) -> None:
    method, ids = StructKV(kv_ratio=0.2, pivot_floor=-9.0), llama.prompt(TOKENS)
    [row] = llama.prefill(ids, method)
    torch_says = counted(lambda: llama.prefill(ids, method))
    known = cost(llama.model.shape, method, TOKENS, processed=row.layer_tokens)
    assert known.prefill_flops == pytest.approx(torch_says, rel=0.01)
    assert cost(llama.model.shape, method, TOKENS).prefill_flops >= known.prefill_flops


@every_method
def test_decode_flops_are_those_that_torch_counts(llama: Tiny, method: Method) -> None:
    [row] = llama.prefill(llama.prompt(TOKENS), method)
    own = cost(llama.model.shape, method, TOKENS, new=1)
    with torch.inference_mode():
        batch = Batch(llama.model, [row], room=1)
        torch_says = counted(lambda: batch.forward(torch.tensor([[7]])))
    assert own.decode_flops == pytest.approx(torch_says, rel=0.01)


@every_method
@pytest.mark.parametrize("tokens", [TOKENS, 731])
def test_kept_bytes_are_those_of_the_cache(llama: Tiny, method: Method, tokens: int) -> None:
    [row] = llama.prefill(llama.prompt(tokens), method)
    assert cost(llama.model.shape, method, tokens).kept_bytes == row.cache.bytes()


def test_weights_are_counted_whole(llama: Tiny) -> None:
    assert llama.model.shape.weight_bytes == llama.model.weight_bytes
    assert replace(llama.model.shape, tied=True).weight_bytes == llama.model.weight_bytes - 4 * 64 * 259


@every_method
@pytest.mark.parametrize("tokens", [TOKENS, 2000])
def test_the_peak_is_the_measured_one_within_a_tenth(llama: Tiny, method: Method, tokens: int) -> None:
    """Beside the weights, which would hide what is off."""
    ids = llama.prompt(tokens)
    with peak_memory(llama.model.device, 0) as measured:
        decode(llama.model, llama.prefill(ids, method), 8, min_new_tokens=8)
    own = cost(llama.model.shape, method, tokens, new=8)
    assert own.peak_bytes - own.weight_bytes == pytest.approx(measured.bytes, rel=0.1)


def test_freed_tensors_leave_the_count() -> None:
    with peak_memory(torch.device("cpu"), 100) as peak:
        for _ in range(5):
            a = torch.ones(1000)
            _view = a.view(10, 100)  # no storage of its own
            del a, _view
    assert peak.bytes == 100 + 4000


def test_a_rolling_window_sees_its_budget_alone() -> None:
    """The method's own attention: a band, where the harness's variant has the triangle."""
    rolling, harness = StreamingLLM(kv_ratio=0.1, variant="rolling"), StreamingLLM(kv_ratio=0.1)
    band, triangle = cost(LLAMA, rolling, 1000), cost(LLAMA, harness, 1000)
    pairs = sum(min(t + 1, 100) for t in range(1000))
    assert band.attention * 1000 * 1001 // 2 == triangle.attention * pairs
    assert band.mlp == triangle.mlp


def test_gemfilter_goes_twice_and_each_way_pays_its_own_square() -> None:
    own, full = cost(LLAMA, GemFilter(kv_ratio=0.1), 1000), cost(LLAMA, Full(), 1000)
    assert own.attention == full.attention * 14 // 32 + cost(LLAMA, Full(), 100).attention
    assert own.mlp == full.mlp * 14 // 32 + full.mlp // 10
    assert sum(GemFilter(kv_ratio=0.1).layer_tokens(1000, 32)) == 14 * 1000 + 32 * 100


def test_a_group_pays_once_for_what_it_shares() -> None:
    def work(*methods: Method, new: int = 0) -> float:
        return group_flops(LLAMA, methods, 4096, new)

    full, structkv = Full(), StructKV(pivot=13)
    h2o = H2O(kv_ratio=0.1)
    assert work(full) == cost(LLAMA, full, 4096).forward
    assert work(full, StreamingLLM()) == work(full)
    assert work(h2o, H2O(kv_ratio=0.2)) == work(h2o) == cost(LLAMA, h2o, 4096).prefill_flops
    assert work(structkv, replace(structkv, kv_ratio=0.2)) == work(structkv)
    assert work(structkv, replace(structkv, struct_ratio=0.4)) > work(structkv)
    assert work(full, structkv) < work(full) + work(structkv)
    fork = cost(LLAMA, structkv, 4096).prefill_flops
    assert work(full) < work(full, structkv) < work(full) + fork
    one, nine = work(full, new=100) - work(full), work(*[full] * 9, new=100) - work(full)
    assert one < nine < 9 * one  # the weights are read once


@pytest.mark.parametrize(
    "names",
    [
        ["full"],
        ["full", "snapkv", "h2o", "structkv"],
        ["structkv", "gemfilter"],
        ["snapkv", "pyramidinfer", "fastkv"],
        [*METHODS],
    ],
    ids=" ".join,
)
def test_a_groups_peak_is_a_bound_on_the_measured_one_and_near_it(llama: Tiny, names: list[str]) -> None:
    methods, ids = [METHODS[name] for name in names], llama.prompt(900)
    with peak_memory(llama.model.device, llama.model.weight_bytes) as measured:
        decode(llama.model, llama.prefill(ids, *methods), 8, min_new_tokens=8)
    shape, weights = llama.model.shape, llama.model.weight_bytes
    bound = batch_peak_bytes(shape, [group_need(shape, methods, 900)], 8)
    assert 1 <= (bound - weights) / (measured.bytes - weights) < 1.25


def test_a_device_limits_by_flops_or_by_bytes() -> None:
    own = cost(LLAMA, Full(), 4096)
    fast, slow = Device("", 1e15, 1e12), Device("", 1e12, 1e15)
    assert own.prefill_seconds(fast) == own.prefill_flops / 1e15
    assert own.decode_seconds(fast) == own.decode_bytes / 1e12
    assert own.decode_seconds(slow) == own.decode_flops / 1e12


def test_devices_are_named_given_or_probed() -> None:
    assert device("h100").flops == KNOWN["h100"][0]
    assert device("1e12,2e10") == Device("as given", 1e12, 2e10)
    assert device("here") is probed("float32")
    assert 1e8 < probed("float32").flops < 1e16
    assert 1e8 < probed("float32").bandwidth < 1e14
    for wrong in ("h1000", "1e12", "1,2,3", "0,1", "nan,1", "inf,1", "-1,1"):
        with pytest.raises(UserError, match="give here, a100"):
            device(wrong)


def test_each_model_of_the_hub_that_conf_names_has_a_published_shape() -> None:
    """And the numbers of parameters that their cards state, in billions."""
    stated = {"llama3_1_8b": 8.03, "ministral_8b": 8.02, "qwen2_5_7b": 7.61, "qwen2_5_14b": 14.77,
              "qwen2_5_32b": 32.76}  # fmt: skip
    named = {name for name in choices("model") if name not in ("custom", "smollm2_135m")}
    assert named == set(stated)
    for name, billions in stated.items():
        shape = published(compose([f"model={name}", "method=full"])[0].model)
        assert shape is not None
        assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=0.002)
    assert published(compose(["model=smollm2_135m", "method=full"])[0].model) is None


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """No model and no text in the hub's cache."""
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "transformers.utils.hub.TRANSFORMERS_CACHE"):
        monkeypatch.setattr(name, str(tmp_path / "hub"), raising=False)


@pytest.mark.usefixtures("no_hub")
def test_show_estimates_a_table_without_its_model(capsys: Any) -> None:
    """One line a cell, for all subtasks of the length, and what the numbers rest on."""
    assert main(["show", "experiment=table1", "model=llama3_1_8b", "--device", "h100"]) == 0
    out = capsys.readouterr().out
    assert "sizes as published for meta-llama/Llama-3.1-8B-Instruct; no prompt is shown" in out
    assert "structkv-bench fetch model=llama3_1_8b" in out
    assert "narrativeqa, qasper" in out
    assert "estimates for a prompt of 127500 tokens" in out
    assert "h100 at its data sheet's speed: 989 TFLOP/s, 3.35e+03 GB/s" in out
    rows = [line.split() for line in out.splitlines()]
    cells = [row for row in rows if row and row[0] in ("full", "gemfilter", "structkv")]
    assert [row[:2] for row in cells[1:]] == [["gemfilter", "0.1"], ["gemfilter", "0.2"],
                                              ["structkv", "0.1"], ["structkv", "0.2"]]  # fmt: skip
    expected: Cost = cost(replace(LLAMA, tied=False), Full(), 127500)
    assert cells[0][1] == f"{expected.prefill_flops / 1e12:.4g}"
    assert f"{expected.peak_bytes / 2**30:.2f}" in cells[0]


@pytest.mark.usefixtures("no_hub")
def test_show_refuses_a_model_of_no_known_size(capsys: Any) -> None:
    assert main(["show", "model=custom", "model.path=some/other-model", "method=full"]) == 2
    assert "not whole in the hub's cache" in capsys.readouterr().err


@pytest.mark.usefixtures("no_hub")
def test_show_estimates_methods_that_nobody_has_calibrated_yet(capsys: Any) -> None:
    """By their budget, which needs no file; a run is refused."""
    asked = ["model=llama3_1_8b", "method=snapkv,compresskv,sgdkv,headwisekv", "method.kv_ratio=0.2"]
    assert main(["show", *asked, "task.lengths=[4096]"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    kept = {" ".join(row[:-10]): row[-4] for row in rows if row[-10:-9] == ["0.2"]}
    calibrated = {f"{name} calibration=none" for name in ("compresskv", "sgdkv", "headwisekv")}
    assert kept.keys() == {"snapkv", *calibrated}
    assert set(kept.values()) == {kept["snapkv"]}
    named = ["model=llama3_1_8b", "method=sgdkv", "method.calibration=nowhere.json", "task.lengths=[4096]"]
    assert main(["show", *named]) == 2
    assert "sgdkv at 4096 tokens: nowhere.json: no such file" in capsys.readouterr().err
    assert main(["show", "model=llama3_1_8b", "method=sgdkv", "method.budget=1", "task.lengths=[4096]"]) == 2
    assert "sgdkv at 4096 tokens: " in capsys.readouterr().err


@pytest.mark.usefixtures("no_hub")
def test_show_refuses_what_no_prompt_of_the_length_could_do(capsys: Any) -> None:
    too_small = ["show", "model=llama3_1_8b", "method=snapkv", "method.budget=8", "task.lengths=[4096]"]
    assert main(too_small) == 2
    assert "snapkv at 4096 tokens: budget=8 keeps 8 of 4096" in capsys.readouterr().err
    assert main(["show", "model=qwen2_5_7b", "method=full", "task.lengths=[65536]"]) == 2
    assert "has 32768 positions" in capsys.readouterr().err


@pytest.mark.usefixtures("no_hub")
def test_show_estimates_subtasks_whose_texts_are_missing_and_shows_the_others(
    tmp_path: Any, capsys: Any
) -> None:
    model = save_tiny(tmp_path / "model")
    some = ["show", "method=full", "task=ruler", "task.subset=[qa_1,niah_single_1]", "task.samples=1"]
    some += ["model=custom", f"model.path={model}", "model.name=tiny", "task.lengths=[1500]"]
    assert main([*some, "--device", "1e12,1e10"]) == 0
    out = capsys.readouterr().out
    assert "=== niah_single_1 at 1500, sample 0000" in out
    assert "=== tiny on qa_1: estimates for a prompt of 1500 tokens" in out
    assert "structkv-bench fetch task=ruler" in out
    assert "estimated time:" in out
    assert "at the full speed of as given: 1 TFLOP/s, 10 GB/s" in out
