"""The regression gate, on whole runs of a tiny model through the command line.

Rules protected here:
- What changes no prediction passes: a second run, another order of rows, a batch of another composition.
- A planted fault is a regression of the cells that it touches, and of no others.
- Each check fails for what it is meant for alone, and its tolerance can be set.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from structkv_bench.engine.cache import LayerCache
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Budgeted
from structkv_bench.engine.model import Model
from structkv_bench.methods.streaming_llm import _SinksAndLast
from structkv_bench.tasks.niah import Niah
from tests.gate import METHODS, edit, regress, run, verdict

COMPRESSING = METHODS[1:]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def before(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(model_folder, tmp_path_factory.mktemp("before"))


@pytest.fixture
def after(before: Path, tmp_path: Path) -> Path:
    """A copy of the results, to be changed."""
    return Path(shutil.copytree(before, tmp_path / "after"))


def test_a_second_run_passes(model_folder: Path, before: Path, tmp_path: Path, capsys: Any) -> None:
    assert verdict(capsys, before, run(model_folder, tmp_path)) == (0, {})


def test_another_order_of_rows_passes(before: Path, after: Path, capsys: Any) -> None:
    for file in after.glob("*/rows*.jsonl"):
        file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    assert verdict(capsys, before, after) == (0, {})


def test_a_batch_of_another_composition_passes(
    model_folder: Path, before: Path, tmp_path: Path, capsys: Any
) -> None:
    for methods in ("structkv", "full", "h2o,snapkv", "streaming_llm"):
        run(model_folder, tmp_path / "apart", f"method={methods}")
    for other in (tmp_path / "apart", run(model_folder, tmp_path / "together", "decode.batch=8")):
        assert verdict(capsys, before, other) == (0, {})


def wrong_position_in_prefill(monkeypatch: Patch) -> None:
    """One token of the prompt stands where the next one does."""
    rotary = Model.rotary

    def wrong(self: Model, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        return rotary(self, hidden, positions + (positions == 300) * (positions.shape[1] > 1))

    monkeypatch.setattr(Model, "rotary", wrong)


def wrong_position_in_decode(monkeypatch: Patch) -> None:
    """The third new token stands one place too far."""
    rotary = Model.rotary

    def wrong(self: Model, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        return rotary(self, hidden, positions + (positions == 496) * (positions.shape[1] == 1))

    monkeypatch.setattr(Model, "rotary", wrong)


def dropped_sink(monkeypatch: Patch) -> None:
    """The last of the sinks makes room for one more recent token."""
    choice = _SinksAndLast.choice

    def without(self: _SinksAndLast, tokens: int, heads: int, device: torch.device) -> torch.Tensor:
        return choice(_SinksAndLast(self.sinks - 1, self.entries), tokens, heads, device)

    monkeypatch.setattr(_SinksAndLast, "choice", without)


def window_off_by_one(monkeypatch: Patch) -> None:
    """One query too few scores the tokens."""
    window_attention = LayerView.window_attention

    def shorter(self: LayerView, window: int) -> torch.Tensor:
        return window_attention(self, window)[:, 1:]

    monkeypatch.setattr(LayerView, "window_attention", shorter)


def another_scorer(monkeypatch: Patch) -> None:
    """Half a point for any answer."""
    score = Niah.score
    monkeypatch.setattr(Niah, "score", lambda *args: max(0.5, score(*args)))


def more_bytes(monkeypatch: Patch) -> None:
    """The same entries take 10 % more."""
    bytes_ = LayerCache.bytes
    monkeypatch.setattr(LayerCache, "bytes", lambda self: int(1.1 * bytes_(self)))


def more_entries(monkeypatch: Patch) -> None:
    """Every budget is 10 % larger."""
    entries = Budgeted.entries
    monkeypatch.setattr(Budgeted, "entries", lambda *args: int(1.1 * entries(*args)))


FAULTS: list[tuple[Callable[[Patch], None], set[str], set[str]]] = [
    (wrong_position_in_prefill, set(METHODS), {"predictions", "logits"}),
    (wrong_position_in_decode, set(METHODS), {"predictions", "logits"}),
    (dropped_sink, {"streaming_llm"}, {"predictions", "logits"}),
    (window_off_by_one, {"snapkv", "structkv"}, {"predictions", "logits"}),
    (another_scorer, set(METHODS), {"scorer"}),
    (more_bytes, set(METHODS), {"memory"}),
    (more_entries, set(COMPRESSING), {"memory"}),
]


@pytest.mark.parametrize(("plant", "methods", "checks"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_planted_fault_is_caught_where_it_is(
    plant: Callable[[Patch], None],
    methods: set[str],
    checks: set[str],
    model_folder: Path,
    before: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Any,
) -> None:
    """Exit code 1; each touched method fails one of the checks meant for the fault, the others none."""
    plant(monkeypatch)
    code, faults = verdict(capsys, before, run(model_folder, tmp_path))
    assert code == 1
    assert faults.keys() == methods
    for found in faults.values():
        assert found & checks


def test_a_near_tie_is_let_pass_and_counted(before: Path, after: Path, capsys: Any) -> None:
    """Other ids are a regression, unless the margin of either row is within the tolerance."""

    def other(margin: float) -> Callable[[dict[str, Any]], None]:
        return lambda row: row.update(generated_ids=[7], tie_margin=margin)

    edit(after, "snapkv", other(0.5))
    assert verdict(capsys, before, after) == (1, {"snapkv": {"predictions"}})
    edit(after, "snapkv", other(1e-5))
    assert verdict(capsys, before, after) == (0, {})
    assert regress(before, after) == 0
    assert "3 near ties" in capsys.readouterr().out
    edit(after, "snapkv", other(0.5))
    assert regress(before, after, "--tolerance", "tie_margin=0.6") == 0


def test_ties_that_make_answers_worse_are_not_let_pass(before: Path, after: Path, capsys: Any) -> None:
    """The paired test sees a loss that is neither chance nor within the metric's tolerance."""
    good, bad = {"0000": 0.9, "0001": 0.95, "0002": 0.85}, {"0000": 0.5, "0001": 0.54, "0002": 0.46}
    sets = [Path(shutil.copytree(before, after / name)) for name in ("good", "bad")]
    for folder, scores in zip(sets, (good, bad), strict=True):
        edit(folder, "h2o", lambda row, scores=scores: row.update(score=scores[row["sample"]]))
        ids = [len(folder.name)]
        edit(folder, "h2o", lambda row, ids=ids: row.update(generated_ids=ids, tie_margin=1e-6))
    assert verdict(capsys, *sets) == (1, {"h2o": {"scores"}})
    assert verdict(capsys, *sets, "--tolerance", "score=50") == (0, {})
    assert verdict(capsys, *reversed(sets)) == (0, {})


def test_time_is_judged_as_a_share_of_the_full_caches(before: Path, after: Path, capsys: Any) -> None:
    """A machine ten times slower passes; a method that alone is four times slower does not."""

    def slower(times: float) -> Callable[[dict[str, Any]], None]:
        return lambda row: row.update({name: times * row[name] for name in ("prefill_s", "decode_s")})

    for method in METHODS:
        edit(after, method, slower(100))
    assert verdict(capsys, before, after) == (0, {})
    edit(after, "h2o", slower(4))
    assert verdict(capsys, before, after) == (1, {"h2o": {"speed"}})
    assert verdict(capsys, before, after, "--tolerance", "slower=5") == (0, {})
    edit(after, "h2o", lambda row: row.update(decode_s=9 * row["decode_s"], decode_rows=80))
    edit(after, "h2o", lambda row: row.update(prefill_s=row["prefill_s"] / 4))
    assert verdict(capsys, before, after) == (0, {})  # its decode was another batch's than full's
    edit(after, "full", lambda row: row.update(decode_rows=80))
    assert verdict(capsys, before, after) == (0, {})  # and that of both another one's than before
    baseline = Path(shutil.copytree(before, after / "baseline"))
    for folder in (*baseline.glob("tiny.full.*"), *after.glob("tiny.full.*")):
        shutil.rmtree(folder)
    assert regress(baseline, after) == 0
    assert "4 cells have no full cache beside them" in capsys.readouterr().out


def test_a_sample_that_fails_now_is_a_regression(before: Path, after: Path, capsys: Any) -> None:
    def fail(row: dict[str, Any]) -> None:
        if row["sample"] == "0001":
            row.update(status="failed", error="out of memory")

    edit(after, "structkv", fail)
    assert verdict(capsys, before, after) == (1, {"structkv": {"answers"}})


def test_other_tokens_prefilled_are_a_regression(before: Path, after: Path, capsys: Any) -> None:
    edit(after, "structkv", lambda row: row.update(prefill_pct=row["prefill_pct"] + 0.5))
    assert verdict(capsys, before, after) == (1, {"structkv": {"prefill"}})
