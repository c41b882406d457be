"""Samples that decode together: rows as if each had been alone, and a fault that costs no other row.

Rules protected here:
- A row does not depend on what decodes beside it: other samples, lengths, endings, methods.
- Nothing is prefilled twice unless a fault lost it.
- What fails in company is tried again in smaller company before it is a failed row.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from structkv_bench import batches, models
from structkv_bench.batches import Order, run_batch
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.engine.decode import decode
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Method
from structkv_bench.engine.model import Model
from structkv_bench.engine.prefill import prefill
from structkv_bench.methods.full import Full
from structkv_bench.methods.h2o import H2O
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.streaming_llm import StreamingLLM
from structkv_bench.plan import Cell, plan
from structkv_bench.task import Sample
from tests.tiny import save_tiny

MEASURED = {"prefill_s", "prefill_parts_s", "decode_s", "decode_rows"}
METHODS = [
    Full(), SnapKV(kv_ratio=0.2), H2O(budget=20, running=True), StreamingLLM(budget=30, variant="rolling"),
]  # fmt: skip
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return models.load(compose(["model=custom", f"model.path={folder}", "method=full"])[0].model)


@pytest.fixture(scope="module")
def cells(folder: Path) -> list[Cell]:
    """A cell for each method."""
    setups = compose(["model=custom", f"model.path={folder}", "method=full", "task.haystack=noise"])
    [cell] = plan(setups)[0].cells[:1]
    return [replace(cell, method=method, method_name=str(method)) for method in METHODS]


@pytest.fixture(scope="module")
def samples(cells: list[Cell], model: Model) -> list[Sample]:
    """Four of unequal length, each with an ending of its own; the last has a question for later."""
    task = replace(cells[0].task, samples=4)
    made = [
        task.build("niah_noise", length, model.prompts)[place]
        for place, length in enumerate((700, 400, 900, 650))
    ]
    made[1] = replace(made[1], max_new_tokens=3)
    made[2] = replace(made[2], stop_at_newline=True, min_new_tokens=2)
    made[3] = replace(made[3], question_at=len(made[3].prompt) - 40)
    return [replace(sample, id=str(place)) for place, sample in enumerate(made)]


def orders(cells: list[Cell], samples: list[Sample]) -> list[Order]:
    return [Order(sample, cells, [cell.method for cell in cells]) for sample in samples]


def own(row: dict[str, Any]) -> dict[str, Any]:
    """Without what is measured, and the margin, whose last digits a batch's size rounds."""
    return {key: value for key, value in row.items() if key not in MEASURED | {"tie_margin"}}


@pytest.fixture
def prefilled(monkeypatch: Patch) -> Counter[int]:
    """How often a prompt of so many tokens was prefilled."""
    prefill, counts = batches.prefill, Counter[int]()

    def counting(model: Model, ids: list[int], compressors: Any) -> Any:
        counts[len(ids)] += 1
        return prefill(model, ids, compressors)

    monkeypatch.setattr(batches, "prefill", counting)
    return counts


def test_rows_that_decode_together_are_those_of_each_cell_of_each_sample_alone(
    model: Model, cells: list[Cell], samples: list[Sample]
) -> None:
    """For methods that only choose, that evict while decoding, and with an attention of their own."""
    together = run_batch(model, orders(cells, samples))
    for sample, rows in zip(samples, together, strict=True):
        for cell, row in zip(cells, rows, strict=True):
            [[alone]] = run_batch(model, orders([cell], [sample]))
            assert own(row) == own(alone)
            assert row["status"] == "ok"
            assert row["tie_margin"] == pytest.approx(alone["tie_margin"], abs=1e-4)
            assert row["decode_rows"] == 16
            assert "decode_rows" not in alone
    lengths = [[len(row["generated_ids"]) for row in rows] for rows in together]
    assert max(lengths[1]) <= 3 < max(lengths[0])


def test_a_question_in_a_batch_goes_on_from_its_own_context(
    model: Model, cells: list[Cell], samples: list[Sample]
) -> None:
    """Over a full cache it is as if prompt and question had been one; other samples have none."""
    context, question = model.prompts.parts(samples[3])
    assert len(question) >= 40
    whole = prefill(model, context + question, [Full().compressor(0, 4)])
    [expected] = decode(model, whole, samples[3].max_new_tokens)
    *_, [row, *_] = run_batch(model, orders(cells, samples))
    assert row["generated_ids"] == expected.ids
    assert row["kept_entries"] == [2 * len(context)] * 4


def test_a_run_in_batches_writes_the_rows_of_one_sample_by_sample(folder: Path, tmp_path: Path) -> None:
    """Through the command line, over two lengths, with samples that do not fill the last batch."""
    chosen = ["run", "model=custom", f"model.path={folder}", "model.name=tiny", "method=full,snapkv",
              "method.kv_ratio=0.2", "task=niah", "task.haystack=noise", "task.lengths=[400,700]",
              "task.samples=5", "task.max_new_tokens=6"]  # fmt: skip
    for batch in (1, 4):
        assert main([*chosen, f"decode.batch={batch}", f"results_dir={tmp_path / str(batch)}"]) == 0
    one, four = (
        {
            file.parent.name: [json.loads(line) for line in file.read_text().splitlines()]
            for file in (tmp_path / str(batch)).glob("*/rows.jsonl")
        }
        for batch in (1, 4)
    )
    assert len(one) == 4
    assert {name: list(map(own, rows)) for name, rows in four.items()} == {
        name: list(map(own, rows)) for name, rows in one.items()
    }
    assert Counter(row.get("decode_rows") for rows in four.values() for row in rows) == {8: 16, 4: 4}
    assert not any("decode_rows" in row for rows in one.values() for row in rows)


def test_a_sample_that_does_not_fit_beside_those_that_wait_comes_after_them(
    model: Model, cells: list[Cell], samples: list[Sample], prefilled: Counter[int], monkeypatch: Patch
) -> None:
    """No waiting sample is prefilled again, and the late one is no failure."""
    filled, waiting = batches._filled, []

    def full_of_two(model: Model, order: Order) -> Any:
        if len(waiting) == 2:
            waiting.clear()
            raise torch.OutOfMemoryError("2 samples wait")
        waiting.append(order.sample.id)
        return filled(model, order)

    monkeypatch.setattr(batches, "_filled", full_of_two)
    found = run_batch(model, orders(cells, samples))
    assert [row["decode_rows"] for rows in found for row in rows] == [8] * 16
    assert {row["status"] for rows in found for row in rows} == {"ok"}
    assert set(prefilled.values()) == {1}
    monkeypatch.setattr(batches, "_filled", filled)
    assert [list(map(own, rows)) for rows in found] == [
        list(map(own, run_batch(model, [order])[0])) for order in orders(cells, samples)
    ]


@dataclass(frozen=True)
class Breaks(Method):
    """Fails where it is told, on prompts of more than so many tokens."""

    where: str = "step"
    above: int = 0

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        if prompt_tokens <= self.above:
            return Compressor()
        if self.where == "compressor":
            raise ZeroDivisionError("out of luck")
        return _Breaks(self.where)


class _Breaks(Compressor):
    evicts_in_decode = True
    choices = 0

    def __init__(self, where: str) -> None:
        self.where = where

    def _fail(self, where: str) -> None:
        if self.where == where:
            raise ZeroDivisionError("out of luck")

    def keep_kv(self, layer: LayerView) -> None:
        self._fail("keep_kv")
        _Breaks.choices += layer.index == 0
        if self.where == "crowded" and _Breaks.choices == 1:
            raise MemoryError("in company")

    def keep_tokens(self, layer: LayerView) -> Any:
        if self.where == "tokens":
            return torch.tensor([10**9])  # outside of any prompt: what fails is the pass itself
        return None

    def step(self, *_: Any) -> None:
        self._fail("step")

    def facts(self) -> dict[str, Any]:
        self._fail("facts")
        return {}


@pytest.mark.parametrize("where", ["compressor", "keep_kv", "tokens", "step", "facts"])
def test_a_fault_on_one_sample_fails_that_row_alone(
    model: Model, cells: list[Cell], samples: list[Sample], where: str
) -> None:
    """Wherever it happens, the same method on other samples and other methods on that sample are as alone."""
    some = [cells[0], replace(cells[0], method=Breaks(where=where, above=800)), cells[1]]
    found = run_batch(model, orders(some, samples[:3]))
    assert [[row["status"] for row in rows] for rows in found] == [
        ["ok"] * 3, ["ok"] * 3, ["ok", "failed", "ok"],
    ]  # fmt: skip
    assert "Error: " in found[2][1]["error"]
    assert found[2][1]["prompt_tokens"] > 800
    for place, sample in enumerate(samples[:3]):
        for cell in (0, 2):
            [[alone]] = run_batch(model, orders([some[cell]], [sample]))
            assert own(found[place][cell]) == own(alone)


@pytest.mark.parametrize("where", ["keep_kv", "facts", "score"])
def test_what_can_be_laid_to_one_row_makes_no_other_run_again(
    model: Model, cells: list[Cell], samples: list[Sample], prefilled: Counter[int], where: str
) -> None:
    """Each prompt is prefilled once."""
    wrong = replace(cells[0].task)
    object.__setattr__(wrong, "score", lambda *_: float("nan"))
    broken = replace(cells[0], task=wrong) if where == "score" else replace(cells[0], method=Breaks(where))
    found = run_batch(model, orders([broken, cells[1]], samples[:2]))
    assert [[row["status"] for row in rows] for rows in found] == [["failed", "ok"]] * 2
    assert set(prefilled.values()) == {1}


def test_a_method_out_of_memory_in_company_is_tried_alone(
    model: Model, cells: list[Cell], samples: list[Sample], prefilled: Counter[int]
) -> None:
    """Its prompt is prefilled once more, for it alone."""
    _Breaks.choices = 0
    crowded = replace(cells[0], method=Breaks("crowded"))
    found = run_batch(model, orders([crowded, cells[1]], samples[:2]))
    assert [[row["status"] for row in rows] for rows in found] == [["ok", "ok"]] * 2
    assert sorted(prefilled.values()) == [1, 2]


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        ("  File\n    a = b\ntorch.OutOfMemoryError: CUDA out of memory.\nSee the manual\n", True),
        (
            "  File\n    x()\nRuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory: 9 bytes\n",
            True,
        ),
        ("  File\n    raise MemoryError\nValueError: no\n", False),
        ("ValueError: no", False),
        (None, False),
    ],
)
def test_out_of_memory_is_told_from_other_faults(error: str | None, is_memory: bool) -> None:
    assert batches.out_of_memory(error) is is_memory


def test_torchs_own_cpu_allocator_is_understood() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert batches.out_of_memory(f"  File\n    torch.empty\nRuntimeError: {raised.value}")
