"""A method of the user's, a class anywhere on the path: what it does wrong is its own rows' failure alone."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from structkv_bench import models
from structkv_bench.batches import Order, run_batch
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Method
from structkv_bench.plan import plan
from tests.runs import overrides, rows_of


@dataclass(frozen=True)
class FailsOnThird(Method):
    """A plug-in method that raises on its third prompt."""

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return _Fails()


class _Fails(Compressor):
    prompts = 0

    def keep_kv(self, layer: LayerView) -> None:
        _Fails.prompts += layer.index == 0
        if _Fails.prompts == 3:
            raise ZeroDivisionError("third prompt")


def test_a_failure_is_a_row(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Case 18: 4 scored rows, 1 with its traceback, n = 4, exit code 1; the next run tries it again."""
    _Fails.prompts = 0
    target = f"{FailsOnThird.__module__}.{FailsOnThird.__qualname__}"
    chosen = overrides(model_folder, tmp_path, "method=full", f"method._target_={target}")
    assert main(chosen) == 1
    captured = capsys.readouterr()
    assert "FailsOnThird" in captured.out
    assert "1 failed" in captured.err
    [rows] = rows_of(tmp_path).values()
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(rows) == 5
    assert len(failed) == 1
    assert "ZeroDivisionError: third prompt" in failed[0]["error"]
    main(["results", "--results", str(tmp_path), "--format", "json"])
    [line] = json.loads(capsys.readouterr().out)
    assert (line["n"], line["failed"]) == (4, 1)
    assert main(chosen) == 0
    capsys.readouterr()
    main(["results", "--results", str(tmp_path), "--format", "json"])
    [line] = json.loads(capsys.readouterr().out)
    assert (line["n"], line["failed"]) == (5, 0)


@dataclass(frozen=True)
class Unsized(Method):
    """A plug-in that does not know what it keeps."""

    told: str = "nothing"

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return Compressor()

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[Any]:
        return {"few": [prompt_tokens] * (layers - 1), "no number": [math.nan] * layers}[self.told]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("nothing", "KeyError"),
        ("few", "ValueError: layer_entries gives [694, 694, 694], not a count for each of 4 layers"),
        ("no number", "ValueError: layer_entries gives [nan, nan, nan, nan], not a count"),
    ],
)
def test_a_method_that_cannot_tell_its_sizes_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path, capsys: Any, told: str, says: str
) -> None:
    """What is shared and what fits in memory is estimated from them."""
    target = f"{Unsized.__module__}.{Unsized.__qualname__}"
    plugin = [f"method._target_={target}", f"method.told={told}"]
    assert main(overrides(model_folder, tmp_path, "method=full", *plugin)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"Unsized on niah_noise at 700, sample 0000: {says}" in error
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class OfNumpy(Method):
    """A plug-in that counts with numpy."""

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return Compressor()

    def layer_entries(self, prompt_tokens: int, layers: int) -> list[int]:
        return list(np.full(layers, prompt_tokens))


def test_any_whole_number_is_a_count(model_folder: Path, tmp_path: Path) -> None:
    target = f"{OfNumpy.__module__}.{OfNumpy.__qualname__}"
    assert main(overrides(model_folder, tmp_path, "method=full", f"method._target_={target}")) == 0


@dataclass(frozen=True)
class Breaks(Method):
    """A plug-in method that fails in the place it is told."""

    where: str = "step"

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return _Breaks(self.where)


class _Breaks(Compressor):
    evicts_in_decode = True

    def __init__(self, where: str) -> None:
        self.where = where
        if where == "attention":
            self.attention = self._fail

    def _fail(self, *_: Any) -> Any:
        raise ZeroDivisionError("out of luck")

    def keep_kv(self, layer: LayerView) -> Any:
        return layer.positions if self.where == "shape" else None  # [tokens], not [heads, tokens]

    def step(self, *_: Any) -> None:
        if self.where == "step":
            self._fail()

    def facts(self) -> Any:
        return FACTS.get(self.where, {"found": 1.0})


FACTS = {
    "facts": {"found": float("nan")},
    "a row's own name": {"error": 5},
    "names of two kinds": {1: 2, "b": 3},
    "no names": [1],
}


@pytest.mark.parametrize("where", ["step", "attention", "shape", *FACTS])
def test_a_fault_anywhere_in_a_method_fails_its_own_rows_alone(
    model_folder: Path, tmp_path: Path, where: str
) -> None:
    """Decode, own attention, a malformed index, numbers that JSON lacks: the others' rows are as alone."""
    model = models.load(compose(overrides(model_folder, tmp_path)[1:])[0].model)
    cells = plan(compose(overrides(model_folder, tmp_path, "method=full,snapkv")[1:]))[0].cells
    [sample] = cells[0].task.build("niah_noise", 700, model.prompts)[:1]
    group = [cells[0], replace(cells[0], method=Breaks(where=where)), cells[1]]
    [[full, broken, snapkv]] = run_batch(model, [Order(sample, group, [cell.method for cell in group])])
    assert (full["status"], broken["status"], snapkv["status"]) == ("ok", "failed", "ok")
    expected = {"step": "ZeroDivisionError", "attention": "ZeroDivisionError",
                "names of two kinds": "TypeError", "no names": "TypeError"}  # fmt: skip
    assert expected.get(where, "ValueError") in broken["error"]
    for row, cell in ((full, cells[0]), (snapkv, cells[1])):
        [[alone]] = run_batch(model, [Order(sample, [cell], [cell.method])])
        assert row["generated_ids"] == alone["generated_ids"]
