"""Every method picks, index by index, what the official code picked on the same tensors.

Rule of the reference data: the number kept is equal, every entry that must be kept is, none that must be
dropped is; entries tied with the lowest kept score may go either way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from structkv_bench.engine.attention import Projected
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.cache import LayerCache
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Method
from structkv_bench.engine.model import Model
from structkv_bench.methods.fastkv import FastKV
from structkv_bench.methods.full import Full
from structkv_bench.methods.gemfilter import GemFilter
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.scoring import over_group, pool
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.methods.structkv import StructKV
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.shape import ModelShape
from tests.shared import shared
from tests.tiny import Tiny, tokenizer

FOLDER = "golden/methods"
CASES = [(shape, seed) for shape in "AB" for seed in (0, 1, 2)]
all_inputs = pytest.mark.parametrize(("shape", "seed"), CASES)


def golden(name: str, shape: str, seed: int) -> dict[str, torch.Tensor]:
    """One case lies in tests/golden/, the others beside the checkout."""
    kept = Path(__file__).parents[1] / "golden" / f"{name}__{shape}__seed{seed}.npz"
    file = kept if kept.is_file() else shared(f"{FOLDER}/{kept.name}")
    return {key: torch.from_numpy(array) for key, array in np.load(file).items()}


def layer_of(inputs: dict[str, torch.Tensor]) -> LayerView:
    q, k, v = inputs["q"][0], inputs["k"][0], inputs["v"][0]
    tokens = k.shape[1]
    return LayerView(0, q, k, v, torch.arange(tokens), tokens, q.shape[-1] ** -0.5)


def assert_kept(index: torch.Tensor, reference: dict[str, torch.Tensor], variant: str) -> None:
    kept, status = reference[f"{variant}.kept"], reference[f"{variant}.status"]
    assert index.shape == kept.shape
    chosen = torch.zeros_like(status, dtype=torch.bool).scatter_(1, index, True)
    assert chosen.sum() == kept.numel()
    assert chosen[status == 2].all()
    assert not chosen[status == 0].any()


def assert_scores(scores: torch.Tensor, reference: torch.Tensor) -> None:
    assert scores.shape == reference.shape
    assert (scores - reference).abs().max() <= 1e-5 * max(1, reference.abs().max())


@all_inputs
@pytest.mark.parametrize(("window", "budget"), [(8, 24), (8, 64), (32, 64)])
@pytest.mark.parametrize(("pooling", "kernel"), [("max", 7), ("avg", 5)])
def test_snapkv_per_query_head(
    shape: str, seed: int, window: int, pooling: str, kernel: int, budget: int
) -> None:
    """FasterDecoding/SnapKV: window sums per query head, pooled; top C - W and the window."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("snapkv", shape, seed)
    method = SnapKV(budget=budget, window=window, pooling=pooling, kernel=kernel, heads="query")
    variant = f"W{window}_{pooling}pool{kernel}_C{budget}"
    assert_scores(method.scores(layer), reference[f"{variant}.scores"])
    index = method.compressor(layer.tokens, 4).keep_kv(layer)
    assert index is not None
    assert_kept(index, reference, variant)


@all_inputs
@pytest.mark.parametrize("group", ["mean", "max", "sum"])
def test_snapkv_per_kv_head(shape: str, seed: int, group: str) -> None:
    """KVCache-Factory's KV-head layout: reduce over the group, then pool."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("snapkv_variants", shape, seed)
    method = SnapKV(budget=24, group=group)
    assert_scores(method.scores(layer), reference[f"kvhead_{group}_W8_maxpool7_C24.scores"])
    index = method.compressor(layer.tokens, 4).keep_kv(layer)
    assert index is not None
    assert_kept(index, reference, f"kvhead_{group}_W8_maxpool7_C24")


@all_inputs
def test_snapkv_with_a_ratio(shape: str, seed: int) -> None:
    """FastKV's harness: C = int(N * 0.2), per query head."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("snapkv_variants", shape, seed)
    index = SnapKV(kv_ratio=0.2, heads="query").compressor(layer.tokens, 4).keep_kv(layer)
    assert index is not None
    assert_kept(index, reference, "W8_maxpool7_r0.2")


@all_inputs
@pytest.mark.parametrize("variant", ["kvcf_C24", "fastkv_C24", "adakv_slm_C24", "fastkv_r0.2"])
def test_streaming_llm(shape: str, seed: int, variant: str) -> None:
    """Harness ports: the first 4 and the last C - 4 positions."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("streamingllm", shape, seed)
    method = StreamingLLM(kv_ratio=0.2) if variant.endswith("r0.2") else StreamingLLM(budget=24)
    index = method.compressor(layer.tokens, 4).keep_kv(layer)
    assert index is not None
    assert all(torch.equal(index[0].int(), row) for row in reference[f"{variant}.kept"])


@all_inputs
@pytest.mark.parametrize(
    ("variant", "heads"), [("oneshot_causal", "query"), ("oneshot_causal_kvhead_mean", "kv")]
)
def test_h2o_one_shot(shape: str, seed: int, variant: str, heads: str) -> None:
    """KVCache-Factory: column sums over all queries, causal; top C - W and the window."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("h2o", shape, seed)
    method = H2O(budget=24, heads=heads)
    sums = method.per_stored_head(layer.column_sums(), layer.kv_heads)
    assert_scores(sums[:, : layer.tokens - 8], reference[f"{variant}_W8_C24.scores"])
    index = method.compressor(layer.tokens, 4).keep_kv(layer)
    assert index is not None
    assert_kept(index, reference, f"{variant}_W8_C24")


@all_inputs
@pytest.mark.parametrize("budget", [24, 64])
def test_pyramidkv(shape: str, seed: int, budget: int) -> None:
    """KVCache-Factory: SnapKV per query head, fewer entries from layer to layer."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("pyramidkv", shape, seed)
    compressor = SnapKV(budget=budget, heads="query", allocator="pyramidkv").compressor(layer.tokens, 4)
    for number in range(4):
        index = compressor.keep_kv(replace(layer, index=number))
        if index is None:
            index = torch.arange(layer.tokens).expand(8, -1)
        assert isinstance(index, torch.Tensor)
        assert_kept(index, reference, f"L4_C{budget}_layer{number}")


@all_inputs
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("gqa_mean", {}),
        ("gqa_max", {"group": "max"}),
        ("queryhead", {"heads": "query"}),
        ("gqa_mean_normalize", {"normalize": True}),
        ("kvcf_kvhead_mean_normalize", {"normalize": True}),
    ],
)
def test_adakv(shape: str, seed: int, variant: str, settings: dict[str, Any]) -> None:
    """FFY0/AdaKV: each head's number of entries, and which they are; its scores are means over the window."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("adakv", shape, seed)
    method = SnapKV(budget=24, allocator="adakv", **settings)
    assert_scores(method.scores(layer) / 8, reference[f"{variant}.scores"])
    index = method.compressor(layer.tokens, 4).keep_kv(layer)
    assert isinstance(index, list)
    assert [len(head) for head in index] == reference[f"{variant}.head_len"].tolist()
    for head, status in zip(index, reference[f"{variant}.status"], strict=True):
        chosen = torch.zeros_like(status, dtype=torch.bool).scatter_(0, head, True)
        assert chosen[status == 2].all()
        assert not chosen[status == 0].any()


@all_inputs
def test_h2o_as_fastkv_runs_it(shape: str, seed: int) -> None:
    """dongwonjo/FastKV: of the causal mask only the last W x W block, so that other rows see the future."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("h2o", shape, seed)
    method, variant = H2O(budget=24, compat="fastkv"), "oneshot_fastkv_noncausal_W8_C24"
    assert_scores(method.scores(layer)[:, : layer.tokens - 8], reference[f"{variant}.scores"])
    index = method.compressor(layer.tokens, 4).keep_kv(layer)
    assert isinstance(index, torch.Tensor)
    assert_kept(index, reference, variant)


@all_inputs
def test_h2o_running(shape: str, seed: int) -> None:
    """FMInference/H2O real drop: 12 heavy and 12 recent, scores carried on through decode."""
    inputs, reference = golden("inputs", shape, seed), golden("h2o", shape, seed)
    layer = layer_of(inputs)
    compressor = H2O(budget=24, window=12, heads="query", running=True).compressor(layer.tokens, 4)
    assert_scores(layer.column_sums(), reference["official_hh12_r12.colsum"])
    index = compressor.keep_kv(layer)
    assert index is not None
    assert torch.equal(index.int(), reference["official_hh12_r12.kept"])
    cache = LayerCache.of_tokens(layer.key, layer.value, layer.positions).kept(index)
    copies = layer.group_size
    for step in range(3):
        new = [inputs[name][0, :, step : step + 1] for name in ("q_dec", "k_dec", "v_dec")]
        cache.keys = torch.cat((cache.keys, new[1].repeat_interleave(copies, 0)), dim=1)
        cache.values = torch.cat((cache.values, new[2].repeat_interleave(copies, 0)), dim=1)
        position = torch.full((cache.positions.shape[0], 1), layer.tokens + step)
        cache.positions = torch.cat((cache.positions, position), dim=1)
        compressor.step(Projected(0, *(part[None] for part in new), layer.scaling, None), cache)
        assert torch.equal(cache.positions.int(), reference[f"official_hh12_r12.decode{step}.kept"])


@all_inputs
@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_fastkv(shape: str, seed: int, pooling: str) -> None:
    """dongwonjo/FastKV: pooled per query head; summed over the group for entries, over all for tokens."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("fastkv", shape, seed)
    method = FastKV(kv_ratio=0.2, tsp_ratio=0.3, tsp_layer=0, pooling=pooling)
    scores = method.scores(layer)
    assert_scores(scores, reference[f"kv_{pooling}pool7.scores"])
    assert_scores(scores.sum(0, keepdim=True), reference[f"tsp_{pooling}pool7.scores"])
    compressor = method.compressor(layer.tokens, 4)
    index, tokens = compressor.keep_kv(layer), compressor.keep_tokens(layer)
    assert index is not None
    assert tokens is not None
    assert_kept(index, reference, f"kv_{pooling}pool7")
    assert_kept(tokens[None], reference, f"tsp_{pooling}pool7")


@all_inputs
def test_gemfilter(shape: str, seed: int) -> None:
    """SalesforceAIResearch/GemFilter: the last query's raw products over all heads, averaged over 5 keys."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("gemfilter", shape, seed)
    method = GemFilter(budget=24, filter_layer=0)
    assert_scores(method.scores(layer), reference["top24.scores"])
    tokens = method.compressor(layer.tokens, 4).keep_tokens(layer)
    assert tokens is not None
    assert_kept(tokens[None], reference, "top24")


@all_inputs
@pytest.mark.parametrize(("pooling", "kernel"), [("max", 7), ("avg", 7)])
def test_structkv_without_memory_is_fastkv(shape: str, seed: int, pooling: str, kernel: int) -> None:
    """Tie to FastKV: with decay 0, a fixed pivot and its pooling, its entries and its tokens."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("fastkv", shape, seed)
    method = StructKV(
        kv_ratio=0.2, struct_ratio=0.3, decay=0.0, pivot=0, kernel=kernel,
        kv_pooling=pooling, centrality_pooling=pooling,
    )  # fmt: skip
    compressor = method.compressor(layer.tokens, 4)
    index = compressor.keep_kv(layer)
    assert index is not None
    assert_kept(index, reference, f"kv_{pooling}pool{kernel}")
    tokens = compressor.keep_tokens(layer)
    assert tokens is not None
    assert_kept(tokens[None], reference, f"tsp_{pooling}pool{kernel}")


@all_inputs
def test_pooling_before_and_after_the_group_sum_is_one_for_averages(shape: str, seed: int) -> None:
    """Average pooling is linear; max pooling is not, which is why the order is stated."""
    layer = layer_of(golden("inputs", shape, seed))
    scores = layer.window_attention(8).sum(1)
    first = over_group(pool(scores, "avg", 5), layer.kv_heads, "sum")
    then = pool(over_group(scores, layer.kv_heads, "sum"), "avg", 5)
    assert torch.allclose(first, then, atol=1e-5)


@all_inputs
def test_kvpress_snapkv_and_streaming_llm(shape: str, seed: int) -> None:
    """kvpress's presses at a quarter of the entries: the same choice, its way of writing scores aside."""
    layer, reference = layer_of(golden("inputs", shape, seed)), golden("kvpress_scores", shape, seed)
    for name, method in (
        ("snapkv_W8_k5", SnapKV(kv_ratio=0.25, pooling="avg", kernel=5)),
        ("streamingllm", StreamingLLM(kv_ratio=0.25)),
    ):
        index = method.compressor(layer.tokens, 4).keep_kv(layer)
        assert index is not None
        assert_kept(index, reference, name)


@pytest.fixture(scope="module")
def tiny_llama() -> Tiny:
    """The reference data's own model in our engine."""
    config = LlamaConfig.from_json_file(shared(f"{FOLDER}/tiny_llama_config.json"))
    stock = LlamaForCausalLM(config).eval()
    stock.load_state_dict(load_file(shared(f"{FOLDER}/tiny_llama.safetensors")))
    stock.set_attn_implementation("sdpa")
    model = Model(stock, TokenizerPrompts(tokenizer()), ModelShape.of(config, "float32", None))
    return Tiny(model, stock)


def whole(name: str) -> dict[str, torch.Tensor]:
    arrays = np.load(shared(f"{FOLDER}/tiny_{name}.npz"))
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("full", Full()),
        ("snapkv", SnapKV(kv_ratio=0.5, pooling="avg", kernel=5)),
        ("streamingllm", StreamingLLM(kv_ratio=0.5)),
    ],
)
def test_a_whole_model_through_kvpress(tiny_llama: Tiny, name: str, method: Method) -> None:
    """Kept sets of every layer, and logits of forced tokens over the compressed cache, at true positions."""
    full, reference = whole("full"), whole(name)
    ids = full["input_ids"].flatten().tolist()
    [row] = tiny_llama.prefill(ids, method)
    assert torch.allclose(row.logits, full["prompt_logits"].reshape(-1, 256)[-1], atol=1e-3)
    if name != "full":
        for number, layer in enumerate(row.cache.layers):
            assert_kept(layer.positions, reference, f"layer{number}")
    with torch.inference_mode():
        batch = Batch(tiny_llama.model, [row], room=8)
        tokens, logits_of = full["greedy_tokens"].flatten(), reference["decode_logits"].reshape(-1, 256)
        for token, expected in zip(tokens, logits_of, strict=True):
            logits = batch.forward(token.reshape(1, 1).long())[0]
            assert torch.allclose(logits, expected, atol=1e-3)
