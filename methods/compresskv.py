"""CompressKV (arXiv 2508.02401, 2606.24467): a few heads that find meaning choose for their whole layer.

Calibration, on needle tests of our own (`structkv-bench calibrate`):

    m_h  = mean over answer tokens t that are the needle's of ( sum over its keys j of a_tj^h )
    e_l  = || O_l - O_l(B) || / || O_l ||                 attention output after o_proj, Frobenius, of the
                                                          answer's queries: all entries, and B of the prompt's
In use:

    s_j  = mean over the layer's 4 heads of highest m_h of pool( sum over the last w queries t of a_tj )
    C_l  = B + round( e_l / sum e (L C - L B) )           at most 3 C, then +-1 until sum C_l = L C
    I^l  = top-k(s, C_l - w) and the last w tokens        one choice for all KV heads of the layer

Ours, where sources leave it open: texts and their number; e_l is each layer's own error, on the full model's
states; B is at most half of C. See docs/methods/calibrated.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from structkv_bench.calibrate.method import Calibrated, Measured
from structkv_bench.calibrate.needles import NeedleRun, Needles
from structkv_bench.calibrate.prompts import watch
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, check_choice, check_window
from structkv_bench.errors import UserError

from .scoring import POOLINGS, best_and_last, pool

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model


@dataclass(frozen=True)
class CompressKV(Calibrated):
    """Settings of CompressKV (TUDa-HWAI/CompressKV)."""

    window: int = 8
    """w"""
    pooling: str = "avg"
    kernel: int = 5
    retrieval_heads: int = 4
    """Semantic retrieval heads of a layer that choose."""
    floor: int = 32
    """B, entries that every layer has; where C is below 2 B, half of C."""
    cap: float = 3.0
    """What no layer has more than, in multiples of C."""

    name: ClassVar[str] = "compresskv"
    texts: ClassVar[type[Any]] = Needles
    measured_with: ClassVar[tuple[str, ...]] = ("window", "pooling", "kernel", "retrieval_heads", "floor")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        check_window(self.window, self.kernel)
        check_choice("pooling", self.pooling, POOLINGS)
        if self.retrieval_heads < 1:
            raise UserError(f"retrieval_heads={self.retrieval_heads}: give at least 1")
        if self.floor <= self.window:
            raise UserError(f"floor={self.floor}: give more than the window's {self.window} entries")
        if not self.cap >= 1:
            raise UserError(f"cap={self.cap}: give 1 or more times the mean budget")

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt.

        Raises:
            UserError: no calibration, or one of another model; a budget not above the window.
        """
        orders = self.learned(layers)["heads"]
        chosen = [order[: self.retrieval_heads] for order in orders]
        return _CompressKVCompressor(self, chosen, self.layer_entries(prompt_tokens, layers))

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """C_l; without a calibration C everywhere."""
        mean = min(self.entries(prompt_tokens, self.window), prompt_tokens)
        if not self.is_calibrated:
            return [mean] * layers
        floor = min(mean, max(min(self.floor, mean // 2), self.window + 1))
        return layer_budgets(
            self.learned(layers)["errors"], mean, floor, int(min(self.cap * mean, prompt_tokens))
        )

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The window, where not everything is kept."""
        entries = self.layer_entries(prompt_tokens, layers)
        return [self.window if kept < prompt_tokens else 0 for kept in entries]

    def scores(self, layer: LayerView, heads: Sequence[int]) -> Tensor:
        """s of each token before the window, by the query heads `heads`: [1, tokens - window]."""
        received = layer.window_attention(self.window)[list(heads), :, : -self.window].sum(1)
        return pool(received, self.pooling, self.kernel).mean(0, keepdim=True)

    def choice(self, layer: LayerView, heads: Sequence[int], entries: int) -> Tensor:
        """I^l, chosen by the query heads `heads`: [kv_heads, entries]."""
        kept = best_and_last(self.scores(layer, heads), entries, self.window, layer.tokens)
        return kept.expand(layer.kv_heads, -1)

    def measure(self, model: Model, texts: Needles) -> Measured:
        """m_h as an order of each layer's heads, and e_l, which sums to 1.

        Raises:
            UserError: in no run the needle was found.
        """
        runs = list(texts.runs(model))
        counted = [run for run in runs if run.steps and run.recall > texts.above_recall]
        if not counted:
            raise UserError(
                f"compresskv: in none of {len(runs)} needle tests the answer had a recall above "
                f"{texts.above_recall}; calibration.answers=forced takes the right answers instead"
            )
        masses = []
        for run in counted:
            needle = _NeedleMass(run)
            watch(model, [*run.ids, *run.answer], needle)
            masses.append(torch.stack(needle.mass))
        mass = torch.cat(masses, dim=-1).mean(-1)  # [layers, heads], over all counted tokens
        if not mass.sum() > 0:
            raise UserError("no head attends to a needle: is each within the model's sliding window?")
        orders = mass.sort(dim=-1, descending=True, stable=True).indices.tolist()
        errors = self._errors(model, runs, orders)
        rounded = [[round(one, 5) for one in layer] for layer in mass.tolist()]
        values = {"heads": orders, "needle_mass": rounded, "errors": errors}
        return Measured(values, [run.ids + run.answer for run in runs], len(counted))

    def _errors(self, model: Model, runs: Sequence[NeedleRun], orders: list[list[int]]) -> list[float]:
        found = []
        for run in runs:
            if run.answer:
                error = _LayerErrors(self, model, run, [order[: self.retrieval_heads] for order in orders])
                watch(model, [*run.ids, *run.answer], error)
                found.append(torch.tensor(error.errors) / sum(error.errors))
        mean = torch.stack(found).mean(0)
        return [round(one, 6) for one in mean.tolist()]


def layer_budgets(errors: Sequence[float], mean: int, floor: int, cap: int) -> list[int]:
    """C_l of each layer, of which the sum is `mean` times their number.

    Args:
        errors: e_l.
        mean: C.
        floor: B, which every layer has; at most C.
        cap: what none has more than; at least C.
    """
    layers = len(errors)
    shares = [error / sum(errors) for error in errors] if any(errors) else [1 / layers] * layers
    budgets = [min(cap, floor + round(share * layers * (mean - floor))) for share in shares]
    order = sorted(range(layers), key=lambda layer: -shares[layer])
    while missing := layers * mean - sum(budgets):
        step = 1 if missing > 0 else -1
        able = [layer for layer in order if floor <= budgets[layer] + step <= cap]
        for layer in able[: abs(missing)]:
            budgets[layer] += step
    return budgets


@dataclass
class _CompressKVCompressor(Compressor):
    method: CompressKV
    heads: list[list[int]]
    """Those that choose, per layer."""
    entries: list[int]
    """C_l"""

    def keep_kv(self, layer: LayerView) -> Tensor | None:
        entries = self.entries[layer.index]
        return (
            None if entries >= layer.tokens else self.method.choice(layer, self.heads[layer.index], entries)
        )


@dataclass
class _NeedleMass(Compressor):
    """Watches a prompt and its answer: what each head gives the needle."""

    run: NeedleRun
    mass: list[Tensor] = field(default_factory=list)
    """Per layer, attention to the whole needle: [heads, answer tokens that are the needle's]."""

    def keep_kv(self, layer: LayerView) -> None:
        # the query that brings a token forth stands one place before it
        rows = layer.window_attention(len(self.run.answer) + 1)[:, self.run.steps]
        self.mass.append(rows[..., self.run.needle.start : self.run.needle.stop].sum(-1).cpu())


@dataclass
class _LayerErrors(Compressor):
    """Watches a prompt and its answer: how far off each layer's output is where B of its entries are kept."""

    method: CompressKV
    model: Model
    run: NeedleRun
    heads: list[list[int]]
    errors: list[float] = field(default_factory=list)
    """Per layer."""

    def keep_kv(self, layer: LayerView) -> None:
        prompt = len(self.run.ids)
        query, key, value = (part[:, :prompt] for part in (layer.query, layer.key, layer.value))
        before = replace(layer, query=query, key=key, value=value, positions=layer.positions[:prompt],
                         prompt_tokens=prompt, _scores={})  # fmt: skip
        kept = self.method.choice(before, self.heads[layer.index], min(self.method.floor, prompt))[0]
        attention = layer.window_attention(len(self.run.answer))
        stays = torch.zeros(layer.tokens, device=kept.device)
        stays[kept], stays[prompt:] = 1, 1
        left = attention * stays
        full, compressed = (
            self._output(layer, rows) for rows in (attention, left / left.sum(-1, keepdim=True))
        )
        self.errors.append(float((full - compressed).norm() / full.norm()))

    def _output(self, layer: LayerView, attention: Tensor) -> Tensor:
        """O_l of attention rows [heads, rows, tokens]: [rows, hidden_size]."""
        grouped = attention.reshape(layer.kv_heads, -1, layer.tokens) @ layer.value.float()
        heads = grouped.reshape(*attention.shape[:2], -1).transpose(0, 1).flatten(1)
        projection: Any = self.model.layers[layer.index]
        return linear(heads, projection.self_attn.o_proj.weight.float())
