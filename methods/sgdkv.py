"""SGD-KV (arXiv 2609.03235): heads that look keywords up, where a summary names them, hold more.

Calibration, on prompts of c documents whose keywords are asked for (`structkv-bench calibrate`):

    I_h  = mean over samples of 1/c sum_m 1/|K_m| sum_j max_n A_h(p_j^out, p_jn^in)
           documents m; tokens j of m's keywords K_m that the answer says, at p_j^out; j's occurrences n in m
    S_g  = max over heads h of group g of I_h, divided by the sum over all layers and groups

In use, with M = N - sink - window and R M = C - sink - window, so that heads hold C on average:

    b_g  = min( M, S_g L H_kv R M ) + sink + window       what is above M goes to the others, by falling S
    s_gj = pool( mean over the group of sum over the last queries t of a_tj )
    I_g  = the first sink tokens, the last window tokens, and top-k(s_g, b_g - sink - window) between them

Ours, where sources leave it open: prompts and documents, which samples are valid, pooling, and how sink,
window and observed queries shrink on short prompts. See docs/methods/calibrated.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from structkv_bench.calibrate.documents import Documents, DocumentsRun
from structkv_bench.calibrate.method import Calibrated, Measured
from structkv_bench.calibrate.prompts import watch
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Kept, check_choice, check_ratio, check_window
from structkv_bench.errors import UserError

from .scoring import GROUPS, POOLINGS, best, over_group, pool

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

LEAST_OBSERVED = 8


@dataclass(frozen=True)
class SGDKV(Calibrated):
    """Settings of SGD-KV, which has no public code."""

    sinks: int = 1024
    window: int = 1024
    edge_share: float = 0.02
    """What sinks and window take of a prompt at most, each."""
    observed: int = 128
    """Last queries, whose attention scores."""
    observed_share: float = 0.0625
    """What they are of a prompt at most; but never fewer than 8."""
    pooling: str = "max"
    kernel: int = 7
    group: str = "mean"

    name: ClassVar[str] = "sgdkv"
    texts: ClassVar[type[Any]] = Documents

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.sinks < 0:
            raise UserError(f"sinks={self.sinks}: give 0 or more")
        check_window(self.window)
        check_window(self.observed, self.kernel)
        for share in ("edge_share", "observed_share"):
            check_ratio(share, getattr(self, share))
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("group", self.group, GROUPS)

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt.

        Raises:
            UserError: no calibration, or one of another model; a budget not above sinks and window.
        """
        return _SGDKVCompressor(self, self.head_budgets(prompt_tokens, layers), self.edges(prompt_tokens))

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The mean of b_g over a layer's heads, rounded; without a calibration C everywhere."""
        mean = min(self.entries(prompt_tokens, sum(self.edges(prompt_tokens))), prompt_tokens)
        if not self.is_calibrated:
            return [mean] * layers
        return [round(sum(its) / len(its)) for its in self.head_budgets(prompt_tokens, layers)]

    def layer_queries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The observed ones, where not everything is kept."""
        entries = self.layer_entries(prompt_tokens, layers)
        return [self.observes(prompt_tokens) if kept < prompt_tokens else 0 for kept in entries]

    def edges(self, prompt_tokens: int) -> tuple[int, int]:
        """Sinks and window of a prompt; a window is one token at least."""
        most = max(1, int(prompt_tokens * self.edge_share))
        return min(self.sinks, most), min(self.window, most)

    def observes(self, prompt_tokens: int) -> int:
        """How many last queries score."""
        share = max(LEAST_OBSERVED, int(prompt_tokens * self.observed_share))
        return min(self.observed, share, prompt_tokens)

    def head_budgets(self, prompt_tokens: int, layers: int) -> list[list[int]]:
        """b_g of each layer's KV heads.

        Raises:
            UserError: as for `compressor`.
        """
        scores = self.learned(layers)["scores"]
        protected = sum(self.edges(prompt_tokens))
        mean = min(self.entries(prompt_tokens, protected), prompt_tokens)
        flat = [score for layer in scores for score in layer]
        dealt = iter(water_filled(flat, len(flat) * (mean - protected), prompt_tokens - protected))
        return [[next(dealt) + protected for _ in layer] for layer in scores]

    def measure(self, model: Model, texts: Documents) -> Measured:
        """S_g of each layer's KV heads; they sum to 1.

        Raises:
            UserError: in no run the answer said a keyword of each document.
        """
        runs = list(texts.runs(model))
        valid = [run for run in runs if run.valid]
        if not valid:
            raise UserError(
                f"sgdkv: in none of {len(runs)} samples the answer has a keyword of each document; "
                "calibration.answers=forced takes the right answers instead"
            )
        found = []
        for run in valid:
            lookup = _Lookup(run, texts.query)
            watch(model, [*run.ids, *run.answer], lookup)
            found.append(torch.stack(lookup.scores))
        heads = torch.stack(found).mean(0)  # I_h: [layers, heads]
        groups = heads.reshape(len(heads), model.shape.kv_heads, -1).amax(-1)
        if not groups.sum() > 0:
            raise UserError("no head attends to a keyword: is each within the model's sliding window?")
        scores = [[round(one, 6) for one in layer] for layer in (groups / groups.sum()).tolist()]
        return Measured({"scores": scores}, [run.ids + run.answer for run in runs], len(valid))


def water_filled(scores: Sequence[float], total: int, most: int) -> list[int]:
    """Numbers that sum to `total`, in proportion to `scores`, none above `most`.

    By falling score, each takes its share of what is left among those that are left: what the cap takes off
    one goes to all after it.
    """
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    dealt, left = [0] * len(scores), total
    for number, place in enumerate(order):
        weight = sum(scores[other] for other in order[number:])
        share = scores[place] / weight if weight else 1 / (len(scores) - number)
        dealt[place] = min(most, round(left * share))
        left -= dealt[place]
    return dealt


@dataclass
class _SGDKVCompressor(Compressor):
    method: SGDKV
    budgets: list[list[int]]
    """b_g per layer and KV head."""
    edges: tuple[int, int]

    def keep_kv(self, layer: LayerView) -> Kept:
        budgets, (sinks, window) = self.budgets[layer.index], self.edges
        if min(budgets) >= layer.tokens:
            return None
        received = layer.window_attention(self.method.observes(layer.tokens)).sum(1)
        between = received[:, sinks : layer.tokens - window]
        scores = over_group(between, layer.kv_heads, self.method.group)
        scores = pool(scores, self.method.pooling, self.method.kernel)
        tokens = torch.arange(layer.tokens, device=scores.device)
        return [
            torch.cat((
                tokens[:sinks],
                sinks + best(row[None], budget - sinks - window)[0],
                tokens[layer.tokens - window :],
            ))
            for row, budget in zip(scores, budgets, strict=True)
        ]  # fmt: skip


@dataclass
class _Lookup(Compressor):
    """Watches a prompt and its answer: I_h of this one sample."""

    run: DocumentsRun
    query: str
    scores: list[Tensor] = field(default_factory=list)
    """Per layer: [heads]."""

    def keep_kv(self, layer: LayerView) -> None:
        rows = layer.window_attention(len(self.run.answer) + 1)
        rows = rows[:, :-1] if self.query == "before" else rows[:, 1:]
        chunks = [
            torch.stack([rows[:, said.step, said.places].amax(-1) for said in chunk]).mean(0)
            for chunk in self.run.chunks
        ]
        self.scores.append(torch.stack(chunks).mean(0).cpu())
