"""HeadWiseKV: SeqCalib finds the windows that heads need, sees what the method sees, and meets a budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structkv_bench.calibrate.file import Calibration
from structkv_bench.calibrate.running import RunningText
from structkv_bench.engine.attention import Projected
from structkv_bench.engine.batch import Batch
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.prefill import prefill
from structkv_bench.errors import UserError
from structkv_bench.methods.headwisekv import HeadWiseKV, Prompts, SeqCalib, entries_of, lengthened
from tests.every_method import LEARNED, calibrated
from tests.tiny import Tiny, tiny

LADDER = [8, 16, 32, 64, 128]


@pytest.fixture(scope="module")
def llama() -> Tiny:
    return tiny("llama")


def two_heads(samples: int = 2, queries: int = 6, prompt: int = 128) -> tuple[Prompts, Projected]:
    """KV head 0 looks at the prompt's last 8 tokens, KV head 1 at token 0; two query heads each."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.zeros(samples, 2, prompt, 8)
    keys[:, 0, -8:, 0] = 1
    keys[:, 1, 0, 0] = 1
    values = torch.randn(samples, 2, prompt, 8, generator=generator)
    new = Projected(
        0,
        query=torch.tensor([60.0, *[0] * 7]).expand(samples, 4, queries, 8),
        key=torch.zeros(samples, 2, queries, 8),
        value=torch.randn(samples, 2, queries, 8, generator=generator),
        scaling=8**-0.5,
        sliding_window=None,
    )
    return Prompts([keys], [values], torch.zeros(samples, queries, dtype=torch.long)), new


@pytest.mark.parametrize(("sinks", "rungs"), [(0, [0, 4]), (1, [0, 0])])
def test_a_local_head_gets_the_smallest_window_and_one_on_token_0_all(sinks: int, rungs: list[int]) -> None:
    """Unless the first token is a sink, which every window then has."""
    prompts, new = two_heads()
    calibration = SeqCalib(prompts, [n + sinks if n < 128 else n for n in LADDER], sinks, tau=0.99)
    out = calibration.attend(new)
    assert calibration.rungs == [rungs]
    whole = SeqCalib(prompts, [128], 0, tau=0.99).attend(new)
    assert torch.allclose(out, whole, atol=1e-3)


def test_the_smallest_window_that_is_true_enough_is_taken() -> None:
    """A head on the last 30 tokens alike needs 32 of them at a high tau, and fewer at a low one."""
    prompts, new = two_heads()
    prompts.keys[0][:, 0, -30:, 0] = 1
    found = {}
    for tau in (-1.0, 0.5, 0.999):
        calibration = SeqCalib(prompts, LADDER, 0, tau)
        calibration.attend(new)
        found[tau] = calibration.rungs[0][0]
    assert found[-1.0] == 0
    assert found[0.999] == 2
    assert found[0.5] < 2


def test_no_window_is_true_to_itself_alone() -> None:
    """tau = 1 takes all of the prompt wherever a shorter window is off by anything."""
    prompts, new = two_heads()
    prompts.keys[0].normal_(generator=torch.Generator().manual_seed(1))
    calibration = SeqCalib(prompts, LADDER, 0, tau=1.0)
    calibration.attend(new)
    assert calibration.rungs == [[4, 4]]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_calibration_sees_what_the_method_sees(family: str) -> None:
    """The pass in which windows hold already ends in the states of a decode over the method's own cache."""
    model, prompt = tiny(family), 96
    sequences = [model.prompt(prompt + 7, seed=seed) for seed in (3, 4)]
    prompts = Prompts.of(model.model, sequences, prompt)
    ladder = entries_of([16, 8, 4, 2, 1], prompt, 2)
    calibration, states = SeqCalib(prompts, ladder, 2, tau=0.7), []
    last: Any = model.model.layers[-1]
    hook = last.register_forward_hook(lambda _m, _i, out: states.append(out))
    rungs = calibration.run(model.model)
    hook.remove()
    assert len({rung for layer in rungs for rung in layer}) > 1
    values = {"ladder": [16, 8, 4, 2, 1], "windows": {"2": [{"tau": 0.7, "rungs": _digits(rungs)}]}}
    method = replace(HeadWiseKV(tau=0.7, sinks=2), calibration_sha256=_calibration(values))
    for sample, ids in enumerate(sequences):
        rows = model.prefill(ids[:prompt], method)
        with torch.inference_mode():
            logits = Batch(model.model, rows, room=7).forward(torch.tensor([ids[prompt:]]))[0]
            expected = model.model.logits(states[0][sample, -1:])[0]
        assert torch.allclose(logits, expected, atol=1e-4)


def _digits(rungs: list[list[int]]) -> list[str]:
    return ["".join(map(str, layer)) for layer in rungs]


def _calibration(values: dict[str, Any]) -> Calibration:
    return Calibration({"version": 1, "method": "headwisekv", "model": {"layers": 4}, "values": values})


def test_each_ratio_gets_the_highest_tau_that_needs_no_more(llama: Tiny) -> None:
    """Bisected on own text: rising tau, shares within the ratios, the paper's fidelities beside them."""
    ladder = [16, 8, 4, 2, 1]
    texts = RunningText(
        length=128, queries=16, samples=2, ladder=ladder, ratios=[0.2, 0.6], steps=4, sinks=[0]
    )
    found = HeadWiseKV().measure(llama.model, texts)
    rows = found.values["windows"]["0"]
    assert [row["tau"] for row in rows] == sorted({row["tau"] for row in rows})
    assert {0.995, 0.998} <= {row["tau"] for row in rows}
    assert rows[0]["share"] == pytest.approx(1 / 16)  # below any cosine: the smallest windows
    assert all(sum(row["share"] <= ratio for row in rows) >= 1 for ratio in (0.2, 0.6))
    prompts = Prompts.of(llama.model, found.prompts, 128)
    for row in rows:
        rungs = SeqCalib(prompts, entries_of(ladder, 128, 0), 0, row["tau"]).run(llama.model)
        assert _digits(rungs) == row["rungs"]
        kept = [128 // ladder[rung] for layer in rungs for rung in layer]
        assert row["share"] == pytest.approx(sum(kept) / len(kept) / 128, abs=1e-4)


@given(
    entries=st.lists(st.lists(st.integers(1, 50), min_size=2, max_size=2), min_size=1, max_size=8),
    more=st.floats(0, 1),
    room=st.integers(0, 60),
)
@settings(max_examples=300, deadline=None)
def test_what_is_left_makes_windows_longer(entries: list[list[int]], more: float, room: int) -> None:
    """To the budget exactly, none above the prompt, none shorter than before, all by the same or to the end.

    A single entry that can't be shared goes to the first.
    """
    most = 50 + room
    least = sum(map(sum, entries)) / (2 * len(entries))
    mean = int(least) + 1 + int(more * (most - least - 1)) if most > least else most
    longer = lengthened(entries, mean, most)
    assert sum(map(sum, longer)) == 2 * mean * len(entries)
    pairs = [(new, old) for its in zip(longer, entries, strict=True) for new, old in zip(*its, strict=True)]
    assert all(old <= new <= most for new, old in pairs)
    grown = [new - old for new, old in pairs if new < most]
    assert not grown or max(grown) - min(grown) <= 1


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize(("tokens", "ratio"), [(60, 0.2), (301, 0.3), (2048, 0.1), (2048, 0.7), (512, 1.0)])
def test_all_heads_together_hold_the_budget(tokens: int, ratio: float, sinks: int) -> None:
    method = calibrated(HeadWiseKV(kv_ratio=ratio, sinks=sinks))
    flat = [entries for layer in method.head_entries(tokens, 4) for entries in layer]
    assert sum(flat) == 8 * int(tokens * ratio)
    assert max(flat) <= tokens


def test_a_larger_budget_takes_the_windows_of_a_higher_tau() -> None:
    """0.1 has room for the shortest windows alone, 0.4 for those of tau = 0.9, which differ between heads."""
    low, high = (calibrated(HeadWiseKV(kv_ratio=ratio)).head_entries(1600, 4) for ratio in (0.1, 0.4))
    assert len({entries for layer in low for entries in layer}) == 1
    rungs = LEARNED["headwisekv"]["windows"]["0"][1]["rungs"]
    order = sorted(zip("".join(rungs), (entries for layer in high for entries in layer), strict=True))
    assert all(a[0] == b[0] or a[1] < b[1] for a, b in pairwise(order))


def test_a_head_keeps_its_sinks_and_its_last_tokens() -> None:
    """And with tau the windows as they were measured, whatever they come to."""
    method = calibrated(HeadWiseKV(tau=0.9, sinks=4))
    view = LayerView(0, torch.zeros(8, 160, 8), torch.zeros(2, 160, 8), torch.zeros(2, 160, 8),
                     torch.arange(160), 160, 1.0)  # fmt: skip
    kept = method.compressor(160, 4).keep_kv(view)
    assert [index.tolist() for index in kept] == [[0, 1, 2, 3, *range(150, 160)], [*range(160)]]
    assert method.layer_entries(160, 4)[0] == (14 + 160) / 2
    assert HeadWiseKV(tau=0.9, kv_ratio=0.1) == HeadWiseKV(tau=0.9, kv_ratio=0.2)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (HeadWiseKV(kv_ratio=0.05), "kv_ratio=0.05 keeps 50 of 1000 .* shortest windows take 62"),
        (HeadWiseKV(budget=3), "budget=3 keeps 3 of 1000 .* shortest windows take 62"),
        (HeadWiseKV(kv_ratio=0.0001), "keeps 0 of 1000"),
        (HeadWiseKV(sinks=2), r"sinks=2: this calibration has sinks=0, 4.*calibration.sinks=\[0,2\]"),
        (HeadWiseKV(tau=0.7), r"tau=0.7: not measured; this calibration has 0.5, 0.9, 0.99"),
    ],
)
def test_what_the_calibration_cannot_meet_is_refused(method: HeadWiseKV, says: str) -> None:
    with pytest.raises(UserError, match=says):
        calibrated(method).compressor(1000, 4)


@pytest.mark.parametrize("wrong", [{"sinks": -1}, {"tau": 0.0}, {"tau": 1.5}])
def test_a_setting_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        HeadWiseKV(**wrong)


def test_prefill_is_untouched(llama: Tiny) -> None:
    """Windows hold after the prompt: its logits are the full cache's."""
    from structkv_bench.methods.full import Full

    ids = llama.prompt(80)
    method = calibrated(HeadWiseKV(kv_ratio=0.3))
    full, ours = prefill(llama.model, ids, [Full().compressor(80, 4), method.compressor(80, 4)])
    assert torch.equal(full.logits, ours.logits)
    assert sum(ours.cache.entries()) == 8 * 24
