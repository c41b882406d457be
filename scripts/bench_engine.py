"""The parts of `make bench` that drive the engine in this process. See bench.py.

Each repeat takes another text; what is compared takes the same text, in turn. Before the repeats each is
run once, untimed. A prompt has `tokens` tokens to the token, of niah's essays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from bench_setup import Scale, Section, in_turn, loaded, method, over, spread, texts

from structkv_bench import models
from structkv_bench.bench.timing import timed
from structkv_bench.config import compose
from structkv_bench.cost.work import cost
from structkv_bench.engine.cache import KVCache
from structkv_bench.engine.clock import now
from structkv_bench.engine.decode import decode
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import Prefilled, prefill

ROWS = 16
"""Of the decode batch."""


def ten_cells(scale: Scale) -> Section:
    """{full, streaming_llm, snapkv, h2o, structkv} x {10 %, 20 %}: as a group, one by one, and full alone."""
    model, tokens = loaded(scale), scale.tokens(4096)
    cells = {
        f"{name} {ratio}": method(name, **({} if name == "full" else {"kv_ratio": ratio}))
        for name in ("full", "streaming_llm", "snapkv", "h2o", "structkv")
        for ratio in (0.1, 0.2)
    }
    alone = {name: [cell] for name, cell in cells.items()}
    found = in_turn(model, scale, tokens, {**alone, "group": list(cells.values())}, scale.new_tokens)
    peaks = {name: times[0].peak_bytes for name, times in found.items()}
    seconds = {name: [time.seconds for time in times[1:]] for name, times in found.items()}
    one_by_one = [sum(some) for some in zip(*(seconds[name] for name in cells), strict=True)]
    return {
        "definition": "seconds of prefill and decode of 32 tokens per cell; ten cells, two of them full",
        "prompt_tokens": tokens,
        "full_alone_s": spread(seconds["full 0.1"]),
        "group_s": spread(seconds["group"]),
        "one_by_one_s": spread(one_by_one),
        "each_alone_s": {name: spread(seconds[name]) for name in cells},
        "group_over_full (at most 1.6)": over(seconds["group"], seconds["full 0.1"]),
        "times_as_fast_as_one_by_one (at least 5)": over(one_by_one, seconds["group"]),
        "group_peak_over_full": round((peaks["group"] or 0) / (peaks["full 0.1"] or 1), 3),
    }


def structkv_prefill(scale: Scale) -> Section:
    """structkv's prefill beside full's, and beside what its FLOPs allow at its pivot and R_struct."""
    model, ours = loaded(scale), method("structkv", kv_ratio=0.1)
    section: Section = {
        "definition": "possible: FLOPs of full's layers and head over structkv's, without its scoring; "
        "accumulation and detection: C and the search for the pivot; scoring: the window's attention"
    }
    for full_tokens in (4096, 8000):
        tokens = scale.tokens(full_tokens)
        found = in_turn(model, scale, tokens, {"full": [method("full")], "structkv": [ours]}, 1)
        full, own = found["full"][1:], found["structkv"][1:]
        forward = cost(model.shape, method("full"), tokens).forward
        possible = [forward / cost(model.shape, ours, tokens, 1, time.layer_tokens).forward for time in own]
        achieved = [a.prefill_s / b.prefill_s for a, b in zip(full, own, strict=True)]
        detection = [100 * time.parts["detection"] / time.prefill_s for time in own]
        scoring = [100 * time.parts["scoring"] / time.prefill_s for time in own]
        section[str(full_tokens)] = {
            "prompt_tokens": tokens,
            "pivots": [time.pivot for time in own],
            "full_prefill_s": spread(time.prefill_s for time in full),
            "structkv_prefill_s": spread(time.prefill_s for time in own),
            "possible_speedup": spread(possible),
            "achieved_speedup": spread(achieved),
            "share_reached (at least 0.95)": over(achieved, possible),
            "accumulation_and_detection_pct (under 2.5)": spread(detection),
            "with_scoring_pct": spread(a + b for a, b in zip(detection, scoring, strict=True)),
        }
    return section


def stock(scale: Scale) -> Section:
    """full through this engine beside transformers' own forward and greedy generate."""
    from transformers import AutoModelForCausalLM

    model, tokens = loaded(scale), scale.tokens(4096)
    spec = compose([*scale.overrides, "method=full"])[0].model
    other = AutoModelForCausalLM.from_pretrained(
        models.fetch(spec), dtype=getattr(torch, spec.dtype), attn_implementation="sdpa"
    ).to(model.device)
    new = 2 * scale.new_tokens
    ours, theirs = [], []
    for ids in texts(model, scale, tokens, scale.repeats + 1):
        ours.append(timed(model, [method("full")], ids, new))
        theirs.append(_stock_seconds(other.eval(), ids, new))
    ours, theirs = ours[1:], theirs[1:]
    forward, whole, after_first = zip(*theirs, strict=True)
    stock_decode = [seconds / (new - 1) for seconds in after_first]
    our_decode = [time.decode_s / (new - 1) for time in ours]
    return {
        "definition": "forward: with the cache filled and the last token's logits; whole: generate() to "
        f"{new} tokens; decode: per token after the first, of generate() by its streamer",
        "prompt_tokens": tokens,
        "our_prefill_s": spread(time.prefill_s for time in ours),
        "stock_forward_s": spread(forward),
        "our_whole_s": spread(time.seconds for time in ours),
        "stock_whole_s": spread(whole),
        "our_decode_s_per_token": spread(our_decode),
        "stock_decode_s_per_token": spread(stock_decode),
        "prefill_over_stock": over([time.prefill_s for time in ours], forward),
        "whole_over_stock (at most 1.02)": over([time.seconds for time in ours], whole),
        "decode_over_stock (at most 1)": over(our_decode, stock_decode),
    }


@dataclass
class _Stamps:
    """A streamer that notes when generate() hands it the prompt, and then each token."""

    like: torch.Tensor
    times: list[float] = field(default_factory=list)

    def put(self, _: torch.Tensor) -> None:
        self.times.append(now(self.like))

    def end(self) -> None:
        pass


def _stock_seconds(module: Any, ids: Sequence[int], new: int) -> tuple[float, float, float]:
    """Seconds of the stock model: of a forward, of a greedy generate, and of that after the first token."""
    with torch.inference_mode():
        prompt = torch.tensor([list(ids)], device=module.device)
        started = now(prompt)
        module(prompt, use_cache=True, logits_to_keep=1)
        forward, stamps = now(prompt), _Stamps(prompt)
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        module.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=stamps, **settings)
        return forward - started, now(prompt) - forward, stamps.times[-1] - stamps.times[1]


def decode_batch(scale: Scale) -> Section:
    """Tokens per second of 16 prompts at 10 % of their KV cache decoded together, beside one at a time."""
    model, tokens, snapkv = loaded(scale), scale.tokens(4096), method("snapkv", kv_ratio=0.1)
    prompts = texts(model, scale, tokens, ROWS)
    rows = [prefill(model, ids, [snapkv.compressor(len(ids), model.shape.layers)])[0] for ids in prompts]
    new = 2 * scale.new_tokens
    one, many = [], []
    for number in range(scale.repeats + 1):
        one.append(_tokens_per_second(model, [rows[number % ROWS]], new))
        many.append(_tokens_per_second(model, rows, new))
    return {
        "definition": f"snapkv; {new} tokens a row, none ends before; packing the caches is part of the time",
        "prompt_tokens": tokens,
        "kept_entries_per_layer": rows[0].cache.entries()[0],
        "tokens_per_s_of_1": spread(one[1:]),
        f"tokens_per_s_of_{ROWS}": spread(many[1:]),
        "times_as_many (at least 5)": over(many[1:], one[1:]),
    }


def _tokens_per_second(model: Model, rows: Sequence[Prefilled], new: int) -> float:
    """Of the tokens after each row's first; the rows can be decoded again."""
    copies = [replace(row, cache=KVCache(list(row.cache.layers), row.cache.seen)) for row in rows]
    like = torch.empty(0, device=model.device)
    started = now(like)
    decode(model, copies, new, min_new_tokens=new)
    return len(rows) * (new - 1) / (now(like) - started)


def h2o(scale: Scale) -> Section:
    """H2O beside full at 8,000 tokens: time and the largest memory."""
    model, tokens = loaded(scale), scale.tokens(8000)
    groups = {"full": [method("full")], "h2o": [method("h2o", kv_ratio=0.1)]}
    found = in_turn(model, scale, tokens, groups, scale.new_tokens)
    peaks = {name: times[0].peak_bytes or math.nan for name, times in found.items()}
    full, own = found["full"][1:], found["h2o"][1:]
    return {
        "definition": "peak: live tensors on a CPU, the allocator's on CUDA; time: prefill and 32 tokens",
        "prompt_tokens": tokens,
        "full_s": spread(time.seconds for time in full),
        "h2o_s": spread(time.seconds for time in own),
        "time_over_full (at most 1.8)": over([t.seconds for t in own], [t.seconds for t in full]),
        "prefill_over_full": over([t.prefill_s for t in own], [t.prefill_s for t in full]),
        "peak_bytes": peaks | {"weights": model.weight_bytes},
        "peak_over_full (at most 1.2)": round(peaks["h2o"] / peaks["full"], 3),
        "peak_over_full_without_weights": round(
            (peaks["h2o"] - model.weight_bytes) / (peaks["full"] - model.weight_bytes), 3
        ),
    }


PARTS: dict[str, Callable[[Scale], Section]] = {
    part.__name__: part for part in (ten_cells, structkv_prefill, stock, decode_batch, h2o)
}
