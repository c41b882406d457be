"""What a plan says of sharing: the FLOPs of a group beside those of its cells one by one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from structkv_bench.cli import main
from structkv_bench.cost.sharing import by_layer
from structkv_bench.cost.work import batch_peak_bytes, group_need
from structkv_bench.methods.full import Full
from structkv_bench.methods.snapkv import SnapKV
from structkv_bench.methods.structkv import StructKV
from tests.test_cost import counted
from tests.tiny import save_tiny, tiny


def test_show_says_what_a_group_shares_beside_its_cells_one_by_one(tmp_path: Any, capsys: Any) -> None:
    """The group's FLOPs are those that torch counts; a cell alone shares nothing and says nothing."""
    model = save_tiny(tmp_path / "model")
    some = ["show", "model=custom", f"model.path={model}", "task=niah", "task.haystack=noise"]
    some += ["task.lengths=[1500]", "method.kv_ratio=0.2"]
    three = ["method=full,snapkv,structkv", "method.pivot=1"]
    assert main([*some, *three]) == 0
    out = capsys.readouterr().out
    [line] = [line for line in out.splitlines() if "share a prefill" in line]
    tokens = int(re.findall(r"(\d+) prompt tokens", out)[0])
    methods = [Full(), SnapKV(kv_ratio=0.2), StructKV(kv_ratio=0.2, pivot=1)]
    llama = tiny("llama")
    together = counted(lambda: llama.prefill(llama.prompt(tokens), *methods))
    alone = sum(counted(lambda m=m: llama.prefill(llama.prompt(tokens), m)) for m in methods)
    assert "3 cells share a prefill, 1 pass in layers 0-1, 2 passes in layers 2-3: " in line
    given = [float(number) for number in re.findall(r"([\d.e-]+) (?:TFLOP|one by one|%|times)", line)]
    expected = [together / 1e12, alone / 1e12, 100 * together / alone, alone / together]
    assert given == pytest.approx(expected, rel=0.02)
    new = int(re.findall(r"up to (\d+) generated", out)[0])
    peak = batch_peak_bytes(llama.model.shape, [group_need(llama.model.shape, methods, tokens)], new)
    assert line.endswith(f"; {peak / 2**20:.1f} MiB of memory, a sample at a time")
    assert main([*some, "method=snapkv"]) == 0
    assert "share a prefill" not in capsys.readouterr().out


def test_a_run_says_once_what_it_shares(tmp_path: Any, capsys: Any) -> None:
    model = save_tiny(tmp_path / "model")
    some = ["run", "model=custom", f"model.path={model}", "task=niah", "task.haystack=noise"]
    some += ["task.samples=2", "task.lengths=[400,700]", "task.max_new_tokens=2", "method.kv_ratio=0.2"]
    some += [f"results_dir={tmp_path}"]
    assert main([*some, "method=full,snapkv"]) == 0
    told = capsys.readouterr().err
    assert "8 rows to make from 4 prefills: " in told
    assert "2.0 times less)" in told
    assert main([*some, "method=full,snapkv,h2o"]) == 0  # one row is left of each sample: it shares nothing
    assert "rows to make" not in capsys.readouterr().err


def test_runs_of_equal_layers_are_one_entry() -> None:
    assert by_layer([4, 4, 1, 2, 2]) == "4 in layers 0-1, 1 in layer 2, 2 in layers 3-4"
    assert by_layer([1, 2], "pass", "passes") == "1 pass in layer 0, 2 passes in layer 1"
