"""HeadWiseKV with SeqCalib (arXiv 2609.02029): each KV head keeps a window as long as it needs.

Calibration, on running text: a prompt of N tokens, and Q tokens after it (`structkv-bench calibrate`):

    for layers l = 1 ... L, in which the windows of the layers before hold already:
        w_g = the smallest N / d of a ladder with   mean over the Q queries of
              cos( outputs of group g over the last w tokens of the prompt, over all of it )  >=  tau

In use head g keeps the prompt's last w_g tokens, and the first `sinks` where wanted; nothing is scored. tau
is a fidelity: what share of the entries its windows come to is known afterwards. So the calibration bisects
tau for shares, and `kv_ratio` takes the highest tau measured that needs no more; what is left of the budget
makes all windows longer.

Ours, where sources leave it open: text, cosine, its mean over queries, a group's outputs side by side, and
that windows hold after the prompt alone, as evictions do in this harness. See docs/methods/calibrated.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, scaled_dot_product_attention

from structkv_bench.calibrate.method import Calibrated, Measured
from structkv_bench.calibrate.running import RunningText
from structkv_bench.engine.attention import Projected, visible
from structkv_bench.engine.cache import LayerCache
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Kept, check_ratio
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model

Rungs = list[list[int]]
"""Of each layer and KV head, the place of its window in the ladder."""


@dataclass(frozen=True)
class HeadWiseKV(Calibrated):
    """Settings of HeadWiseKV, which has no public code."""

    tau: float | None = None
    """As in the paper, in place of a budget: the windows of this fidelity, whatever share they come to."""
    sinks: int = 0
    """First tokens that each head keeps beside its window, inside the budget; in the paper there are none."""

    name: ClassVar[str] = "headwisekv"
    texts: ClassVar[type[Any]] = RunningText

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.sinks < 0:
            raise UserError(f"sinks={self.sinks}: give 0 or more")
        if self.tau is not None:
            check_ratio("tau", self.tau)
            object.__setattr__(self, "kv_ratio", 1.0)  # without a say
            object.__setattr__(self, "budget", None)

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        """A compressor for one prompt.

        Raises:
            UserError: no calibration, or one of another model; none with these sinks or this tau; a budget
                below the shortest windows.
        """
        return _HeadWiseKVCompressor(self.sinks, self.head_entries(prompt_tokens, layers))

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        """The mean over a layer's heads, rounded; without a calibration the budget everywhere."""
        if not self.is_calibrated:
            return [min(self.entries(prompt_tokens, self.sinks), prompt_tokens)] * layers
        return [round(sum(its) / len(its)) for its in self.head_entries(prompt_tokens, layers)]

    def head_entries(self, prompt_tokens: int, layers: int) -> list[list[int]]:
        """Entries of each layer's KV heads: windows and sinks.

        Raises:
            UserError: as for `compressor`.
        """
        by_tau = self._by_tau(prompt_tokens, layers)
        if self.tau is not None:
            if self.tau not in by_tau:
                raise UserError(
                    f"tau={self.tau}: not measured; this calibration has {', '.join(map(str, by_tau))}; "
                    f"others are with calibration.fidelities=[{self.tau}]"
                )
            return by_tau[self.tau]
        mean = min(self.entries(prompt_tokens, self.sinks), prompt_tokens)
        fitting = [entries for entries in by_tau.values() if _mean(entries) <= mean]
        if not fitting:
            asked = f"kv_ratio={self.kv_ratio}" if self.budget is None else f"budget={self.budget}"
            raise UserError(
                f"{asked} keeps {mean} of {prompt_tokens} prompt tokens per head, the shortest windows take "
                f"{min(map(_mean, by_tau.values())):g}: raise it, or give another calibration.ladder"
            )
        return lengthened(fitting[-1], mean, prompt_tokens)

    def _by_tau(self, prompt_tokens: int, layers: int) -> dict[float, list[list[int]]]:
        """Entries of each layer's KV heads at each tau that was measured, rising."""
        learned = self.learned(layers)
        if str(self.sinks) not in learned["windows"]:
            raise UserError(
                f"sinks={self.sinks}: this calibration has sinks={', '.join(learned['windows'])}; others are "
                f"measured with calibration.sinks=[0,{self.sinks}]"
            )
        ladder = entries_of(learned["ladder"], prompt_tokens, self.sinks)
        return {
            row["tau"]: [[ladder[int(rung)] for rung in its] for its in row["rungs"]]
            for row in learned["windows"][str(self.sinks)]
        }

    def measure(self, model: Model, texts: RunningText) -> Measured:
        """Windows by rising tau, for each number of sinks.

        Raises:
            UserError: texts that are not to be had.
        """
        sequences = texts.sequences(model)
        prompts = Prompts.of(model, sequences, texts.length)
        windows = {str(sinks): _bisected(model, prompts, texts, sinks) for sinks in texts.sinks}
        return Measured({"ladder": list(texts.ladder), "windows": windows}, sequences, len(sequences))


def entries_of(ladder: Sequence[int], tokens: int, sinks: int) -> list[int]:
    """Entries of each of the ladder's windows on a prompt of so many tokens, with its sinks."""
    return [min(tokens, max(1, tokens // divisor) + sinks) for divisor in ladder]


def lengthened(entries: list[list[int]], mean: int, most: int) -> list[list[int]]:
    """Windows made longer evenly, none above `most`, until they hold `mean` on average."""
    flat = [one for its in entries for one in its]
    spare = mean * len(flat) - sum(flat)
    while spare:
        growing = [place for place, one in enumerate(flat) if one < most][:spare]
        step = max(1, min(spare // len(growing), most - max(flat[place] for place in growing)))
        for place in growing:
            flat[place] += step
        spare -= step * len(growing)
    dealt = iter(flat)
    return [[next(dealt) for _ in its] for its in entries]


def _mean(entries: Sequence[Sequence[float]]) -> float:
    flat = [one for its in entries for one in its]
    return sum(flat) / len(flat)


@dataclass
class _HeadWiseKVCompressor(Compressor):
    sinks: int
    entries: list[list[int]]

    def keep_kv(self, layer: LayerView) -> Kept:
        entries = self.entries[layer.index]
        if min(entries) >= layer.tokens:
            return None
        tokens = torch.arange(layer.tokens, device=layer.key.device)
        starts = [layer.tokens - one + self.sinks for one in entries]
        return [torch.cat((tokens[: self.sinks], tokens[start:])) for start in starts]


@dataclass(frozen=True)
class Prompts:
    """Prompts of equal length, prefilled, and the tokens after them."""

    keys: list[Tensor]
    """Per layer, [samples, kv_heads, tokens, head_dim]"""
    values: list[Tensor]
    later: Tensor
    """Ids [samples, queries]."""

    @classmethod
    def of(cls, model: Model, sequences: Sequence[Sequence[int]], length: int) -> Prompts:
        """Sequences whose first `length` tokens are the prompt."""
        caches = [prefill(model, ids[:length], [Compressor()])[0].cache.layers for ids in sequences]
        keys, values = [], []
        for of_all in zip(*caches, strict=True):
            layers = [layer for layer in of_all if isinstance(layer, LayerCache)]
            keys.append(torch.stack([layer.keys for layer in layers]))
            values.append(torch.stack([layer.values for layer in layers]))
        return cls(keys, values, torch.tensor([ids[length:] for ids in sequences], device=model.device))

    @property
    def tokens(self) -> int:
        """Of each prompt."""
        return self.keys[0].shape[2]


@dataclass
class SeqCalib:
    """One pass of the later tokens through the layers, which fixes each layer's windows as it comes to it."""

    prompts: Prompts
    ladder: list[int]
    """Entries of the prompt, sinks among them, by rising length; the last one is all of it."""
    sinks: int
    tau: float
    rungs: Rungs = field(default_factory=list)

    def run(self, model: Model) -> Rungs:
        """The windows of all layers."""
        with torch.inference_mode():
            hidden = model.embed(self.prompts.later)
            places = torch.arange(hidden.shape[1], device=hidden.device) + self.prompts.tokens
            at = places.expand(hidden.shape[0], -1)
            rotary = model.rotary(hidden, at)
            for layer in model.layers:
                hidden = model.run_layer(layer, hidden, at, rotary, self)
        return self.rungs

    def attend(self, projected: Projected) -> Tensor:
        """Attention over the windows that this layer needs: [samples, heads, queries, head_dim]."""
        outputs = torch.stack([self._output(projected, entries) for entries in self.ladder])
        kv_heads, heads = projected.key.shape[1], projected.query.shape[1]
        beside = [_side_by_side(output, kv_heads) for output in outputs]
        cosines = [cosine_similarity(some, beside[-1], dim=-1).mean((0, 2)).tolist() for some in beside[:-1]]
        true_enough = [[cosine[head] >= self.tau for cosine in cosines] + [True] for head in range(kv_heads)]
        rungs = [its.index(True) for its in true_enough]
        self.rungs.append(rungs)
        windows = [rungs[head * kv_heads // heads] for head in range(heads)]
        return torch.stack([outputs[window, :, head] for head, window in enumerate(windows)], dim=1)

    def _output(self, new: Projected, entries: int) -> Tensor:
        """Of the later tokens, over so many of the prompt's entries and over one another."""
        prompt, queries = self.prompts.tokens, new.query.shape[2]
        positions = torch.arange(prompt + queries, device=new.query.device)
        stays = (positions < self.sinks) | (positions >= prompt - (entries - self.sinks))
        mask = visible(positions[prompt:], positions, new.sliding_window) & stays
        keys = torch.cat((self.prompts.keys[new.layer], new.key), dim=2)
        values = torch.cat((self.prompts.values[new.layer], new.value), dim=2)
        return scaled_dot_product_attention(
            new.query, keys, values, attn_mask=mask, scale=new.scaling, enable_gqa=True
        )


def _side_by_side(output: Tensor, kv_heads: int) -> Tensor:
    """[samples, heads, queries, head_dim] -> [samples, kv_heads, queries, group x head_dim], in fp32."""
    samples, _, queries, _ = output.shape
    return output.float().reshape(samples, kv_heads, -1, queries, output.shape[-1]).transpose(2, 3).flatten(3)


def _bisected(model: Model, prompts: Prompts, texts: RunningText, sinks: int) -> list[dict[str, Any]]:
    """Rungs by rising tau: those sought for each ratio, and the fidelities asked for."""
    known: dict[float, Rungs] = {}
    ladder = entries_of(texts.ladder, texts.length, sinks)

    def share(tau: float) -> float:
        if tau not in known:
            known[tau] = SeqCalib(prompts, ladder, sinks, tau).run(model)
        return _mean([[ladder[rung] for rung in its] for its in known[tau]]) / texts.length

    for ratio in texts.ratios:
        low, high = -1.0, 1.0  # of any cosine
        share(low)
        for _ in range(texts.steps):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) <= ratio else (low, middle)
    for tau in texts.fidelities:
        share(tau)
    return [
        {"tau": tau, "share": round(share(tau), 4), "rungs": ["".join(map(str, its)) for its in known[tau]]}
        for tau in sorted(known)
    ]
