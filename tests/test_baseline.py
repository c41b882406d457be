"""What the regression gate compares, and how it tells of it.

Rules protected here:
- Sets of other models, protocols, prompts, cells or samples are refused by name, with exit code 2.
- A baseline file judges as the results that it was made of, and holds no text and no path of its machine.
- Every format tells the same; the gate needs no torch.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from structkv_bench import plan
from tests.gate import edit, regress, run, verdict
from tests.tiny import tiny

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def before(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(model_folder, tmp_path_factory.mktemp("before"))


@pytest.fixture
def after(before: Path, tmp_path: Path) -> Path:
    """A copy of the results, to be changed."""
    return Path(shutil.copytree(before, tmp_path / "after"))


def missing_cell(after: Path) -> None:
    shutil.rmtree(next(after.glob("tiny.snapkv*")))


def missing_samples(after: Path) -> None:
    [file] = next(after.glob("tiny.snapkv*")).glob("rows*.jsonl")
    file.write_text(file.read_text().split("\n", 1)[1])


def other_prompts(after: Path) -> None:
    edit(after, "snapkv", lambda row: row.update(prompt_sha256="0" * 16))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (missing_cell, "snapkv 0.2 niah_noise max_new_tokens=6 500: not compared: missing"),
        (missing_samples, "missing samples: 1 (0000)"),
        (other_prompts, "other prompts: 3 (0000, 0001, 0002)"),
    ],
)
def test_what_is_not_the_same_experiment_is_refused(
    change: Callable[[Path], None], says: str, before: Path, after: Path, capsys: Any
) -> None:
    """Exit code 2 and a line that names the cell and the reason."""
    change(after)
    assert regress(before, after) == 2
    out = capsys.readouterr().out
    assert says in out
    assert "can't be compared: 1 of 5 cells" in out


def test_another_model_in_the_same_place_is_refused(
    before: Path, model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    other = Path(shutil.copytree(model_folder, tmp_path / "keep"))
    try:
        tiny(seed=1).stock.save_pretrained(model_folder)
        results = run(model_folder, tmp_path / "results")
    finally:
        shutil.copytree(other, model_folder, dirs_exist_ok=True)
    assert regress(before, results) == 2
    assert "another model: weights " in capsys.readouterr().out


def test_other_protocol_and_settings_are_named(
    before: Path, model_folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Any
) -> None:
    results = run(model_folder, tmp_path / "settings", "method=full", "task.seed=7")
    run(model_folder, results, "method=snapkv", "method.kernel=5")
    assert regress(before, results) == 2
    out = capsys.readouterr().out
    assert "other settings: task.seed 42, now 7" in out
    assert "other settings: method.kernel 7, now 5" in out
    monkeypatch.setattr(plan, "PROTOCOL", "2")
    assert regress(before, run(model_folder, tmp_path / "protocol")) == 2
    assert "another protocol: protocol 1, now 2" in capsys.readouterr().out


def test_a_baseline_file_judges_as_its_results_do(
    before: Path, after: Path, model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """--update-baseline writes it; it has provenance, but no text, no host and no path of this machine."""
    file = tmp_path / "deep" / "baseline.json"
    assert regress(file, before, "--update-baseline") == 0
    assert verdict(capsys, file, after) == (0, {})
    edit(after, "h2o", lambda row: row.update(kv_bytes=1, tie_margin=9.0, prefill_s=1e3))
    assert verdict(capsys, file, after) == verdict(capsys, before, after)
    text = file.read_text()
    content = json.loads(text)
    assert content["schema"] == 1
    assert {"git", "versions", "device"} <= content["made_by"][0].keys()
    session = json.loads(next(before.glob("*/cell.json")).read_text())["sessions"][0]
    assert session["host"] not in re.findall(r'"([^"]*)"', text)
    assert str(model_folder.parent) not in text
    row = json.loads(next(before.glob("*/rows*.jsonl")).read_text().splitlines()[0])
    for kept_out in (row["prediction"], row["references"][0]):
        assert json.dumps(kept_out)[1:-1] not in text


def test_a_baseline_that_is_none_is_one_line(before: Path, after: Path, tmp_path: Path, capsys: Any) -> None:
    """Another schema, a damaged file, no file, a failed sample to be written: exit code 2."""
    (tmp_path / "schema.json").write_text('{"schema": 99, "cells": []}')
    (tmp_path / "torn.json").write_text('{"schema": 1, "cel')
    (tmp_path / "empty.json").write_text('{"schema": 1, "made_by": [], "cells": []}')
    (tmp_path / "list.json").write_text("[]")
    for name, says in {
        "schema": "a baseline of schema 99, not 1",
        "torn": "damaged",
        "empty": "no cells",
        "list": "no baseline",
        "none": "can't be read",
    }.items():
        assert regress(tmp_path / f"{name}.json", before) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert says in error
    edit(after, "full", lambda row: row.update(status="failed", error="x"))
    assert regress(tmp_path / "new.json", after, "--update-baseline") == 2
    assert "3 samples failed" in capsys.readouterr().err
    for wrong in ("score", "score=x", "=1", "score=-1", "slower=nan"):
        assert regress(before, before, "--tolerance", wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_every_format_tells_the_same(before: Path, after: Path, tmp_path: Path, capsys: Any) -> None:
    """Markdown has the fault in a table, JUnit a failed case among those of every check; --out is a file."""
    edit(after, "h2o", lambda row: row.update(kv_bytes=1))
    assert regress(before, after, "--format", "markdown") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "❌" in lines[0]
    assert any(
        line.startswith("| tiny h2o 0.2 niah_noise max_new_tokens=6 500 | memory | other entries kept")
        for line in lines
    )
    assert regress(before, after, "--format", "junit", "--out", str(tmp_path / "junit.xml")) == 1
    assert "a regression in 1 of 5 cells" in capsys.readouterr().out
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    [suite] = root
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("40", "1", "0")
    [failed] = [case for case in suite if len(case)]
    assert (failed.get("name"), failed[0].tag) == ("memory", "failure")
    missing_cell(after)
    assert regress(before, after, "--format", "junit") == 2
    [suite] = ElementTree.fromstring(capsys.readouterr().out)
    assert suite.get("errors") == "1"


def test_the_gate_imports_no_torch(before: Path) -> None:
    code = "import sys; from structkv_bench.cli import main; main(); print('torch' in sys.modules)"
    options = ["regress", "--baseline", str(before), "--current", str(before)]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize("lost", ["prompt_sha256", "score", "kept_entries"])
def test_a_damaged_row_is_no_regression(lost: str, before: Path, after: Path, capsys: Any) -> None:
    """A row that lacks what is compared can't be judged: one line and exit code 2, never 1."""
    edit(after, "snapkv", lambda row: row.pop(lost))
    capsys.readouterr()
    assert regress(before, after) == 2
    assert capsys.readouterr().err.count("\n") == 1
