"""Stored rows -> a table in the paper's layout.

Rules protected here:
- A number is the plain mean over what it says it is; what is missing is said, and never averaged over.
- Only rows of one protocol, with the same prompts and weights, stand in one table.
- Each method is compared with the reference on the samples that both have, at the same KV budget.
- The paper's numbers are those that were handed down, and stand only beside the same method and budget.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.manifest import Manifest, write_manifest
from structkv_bench.plan import Cell, plan
from structkv_bench.report.paper import FILES, paper_table, read_csv
from structkv_bench.report.statistics import compare_groups, holm
from structkv_bench.store import ROWS_FILE, Store
from tests.shared import shared

N = 20
SIX = [
    "method=full,snapkv,structkv",
    "method.kv_ratio=0.1",
    "task.subset=[vt,fwe]",
    "task.lengths=[512,1024]",
]


def cells(*overrides: str) -> list[Cell]:
    return [cell for group in plan(compose(list(overrides))) for cell in group.cells]


def score_of(cell: Cell, sample: int) -> float:
    """full is always right, structkv on the even samples, snapkv on the first half; fwe by a fifth less."""
    right = {"full": True, "structkv": sample % 2 == 0, "snapkv": sample < N // 2}[cell.method_name]
    return float(right) * (0.8 if cell.subtask == "fwe" else 1.0)


def row(cell: Cell, sample: int, **values: Any) -> dict[str, Any]:
    aware = cell.method_name == "structkv"
    return {
        "sample": f"{sample:04d}",
        "status": "ok",
        "score": score_of(cell, sample),
        "prompt_sha256": f"{cell.subtask}{cell.length}{sample}",
        "prediction": "so",
        "references": ["so"],
        "truncated_tokens": 0,
        "kv_bytes": 1000 if cell.method_name == "full" else 99,
        "kv_bytes_full": 1000,
        "prefill_pct": 57.33 if aware else 100.0,
        "pivot": 13 if aware else None,
        "fields": {},
        "prefill_s": 1.0,
        "decode_s": 1.0,
        **values,
    }


def store(
    place: Path,
    asked: list[Cell],
    make: Callable[[Cell, int], dict[str, Any] | None] = row,
    experiment: str = "table2",
    provenance: dict[str, Any] | None = None,
    left_out: dict[str, str] | None = None,
) -> None:
    """Rows of an experiment as a run leaves them; `make` gives None where a sample was not run."""
    manifest = Manifest(experiment)
    wanted = {c.folder: {"samples": N, "names": c.names, "config": c.config} for c in asked}
    manifest.add(wanted, left_out or {}, [])
    write_manifest(place, manifest)
    for cell in asked:
        rows = [made for sample in range(N) if (made := make(cell, sample)) is not None]
        if rows:
            kept = Store(place).cell(cell)
            kept.begin(provenance or {})
            # at once: `append` waits for the disk at each row
            (kept.path / ROWS_FILE).write_text("".join(json.dumps(one) + "\n" for one in rows))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["table", *arguments]) == code
    out = capsys.readouterr()
    return out.err if code else out.out


def tidy(capsys: pytest.CaptureFixture[str], place: Path, *arguments: str) -> dict[tuple[str, str], Any]:
    lines = json.loads(printed(capsys, "2", "--format", "json", "--results", str(place), *arguments))
    return {(line["method"], line["column"]): line for line in lines}


def test_a_length_is_the_mean_over_its_tasks_and_the_average_that_over_all(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX))
    lines = tidy(capsys, tmp_path)
    assert {key: line["score"] for key, line in lines.items()} == {
        (method, column): pytest.approx(score)
        for method, score in {"full": 90.0, "snapkv": 45.0, "structkv": 45.0}.items()
        for column in ("512", "1024", "avg")
    }
    assert {line["n"] for (_, column), line in lines.items() if column != "avg"} == {2 * N}
    assert {line["asked"] for (_, column), line in lines.items() if column == "avg"} == {4 * N}
    text = printed(capsys, "2", "--results", str(tmp_path))
    assert text.startswith("Table 2: RULER · smollm2_135m\n")
    assert "mean of 2 of 13 tasks" in text
    assert f"n = {N} samples a task and length" in text


def test_any_setting_can_have_the_columns(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX))
    by_task = tidy(capsys, tmp_path, "--columns", "subtask")
    assert {column: by_task["full", column]["score"] for column in ("vt", "fwe", "avg")} == {
        "vt": 100.0,
        "fwe": pytest.approx(80.0),
        "avg": pytest.approx(90.0),
    }
    assert "subtask, length" in printed(capsys, "2", "--columns", "no such", code=2)


def test_measured_shares_stand_next_to_the_nominal_ones_and_group_the_methods(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX))
    lines = printed(capsys, "2", "--results", str(tmp_path), "--compare").splitlines()
    found = {line.split()[0]: line for line in lines if line}
    assert "10 → 9.9" in found["snapkv"]
    assert "60 → 57.33" in found["structkv"]  # nominal: as the paper prints it
    order = ["full", "full", "decoding", "snapkv", "prefill-aware:", "structkv"]
    assert [line.split()[0] for line in lines if line.split()[:1] and line.split()[0] in order] == order


def test_every_comparison_is_with_the_reference_on_the_same_samples(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX))
    lines = tidy(capsys, tmp_path)
    assert {line["reference"] for (method, _), line in lines.items() if method != "structkv"} == {"structkv"}
    assert {lines["structkv", column]["reference"] for column in ("512", "1024", "avg")} == {None}
    ours = {m: [[score_of(c, i) for i in range(N)] for c in cells("task=ruler", *SIX) if c.method_name == m]
            for m in ("full", "snapkv", "structkv")}  # fmt: skip
    by_hand = [compare_groups(list(zip(ours[m], ours["structkv"], strict=True))) for m in ("full", "snapkv")]
    adjusted = holm([one.p_value for one in by_hand])
    for method, comparison, p_value in zip(("full", "snapkv"), by_hand, adjusted, strict=True):
        line = lines[method, "avg"]
        assert line["difference"] == pytest.approx(100 * comparison.difference, abs=1e-4)
        assert line["p_holm"] == pytest.approx(p_value, rel=1e-3)
        assert line["n_needed"] == comparison.n_needed
    text = printed(capsys, "2", "--results", str(tmp_path))
    assert "45.00≈" in text
    assert "90.00≈" not in text
    other = tidy(capsys, tmp_path, "--reference", "full")
    assert other["structkv", "avg"]["difference"] == pytest.approx(-45.0)


def test_an_incomplete_table_says_so_and_averages_over_nothing_that_is_missing(tmp_path, capsys):
    def make(cell: Cell, sample: int) -> dict[str, Any] | None:
        if (cell.method_name, cell.subtask, cell.length) == ("snapkv", "fwe", 1024):
            return None  # never begun
        stopped = (cell.method_name, cell.length) == ("structkv", 512) and sample >= 5
        return None if stopped else row(cell, sample)

    store(tmp_path, cells("task=ruler", *SIX), make)
    lines = tidy(capsys, tmp_path)
    assert lines["snapkv", "512"]["score"] == pytest.approx(45.0)
    assert lines["snapkv", "1024"]["score"] is None
    assert lines["snapkv", "avg"]["score"] is None
    assert (lines["structkv", "512"]["n"], lines["structkv", "512"]["asked"]) == (10, 2 * N)
    text = printed(capsys, "2", "--results", str(tmp_path))
    assert text.splitlines()[0].endswith(f"INCOMPLETE: {3 * 4 * N - N - 30} of {3 * 4 * N} samples")
    assert f"* 10/{2 * N}" in text
    assert f"{N}/{2 * N}" in text


def test_failed_samples_are_in_no_mean(tmp_path, capsys):
    def make(cell: Cell, sample: int) -> dict[str, Any]:
        if cell.method_name == "structkv" and sample == 1:
            return {"sample": f"{sample:04d}", "status": "failed", "error": "boom"}
        return row(cell, sample)

    store(tmp_path, cells("task=ruler", *SIX), make)
    assert tidy(capsys, tmp_path)["structkv", "512"]["score"] == pytest.approx(90 * 10 / 19, abs=1e-3)
    text = printed(capsys, "2", "--results", str(tmp_path))
    assert "4 samples failed" in text
    assert "INCOMPLETE" in text


def test_what_was_left_out_is_named(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX), left_out={"qa_1": "SQuAD is not here"})
    assert "Left out: qa_1 (SQuAD is not here)." in printed(capsys, "2", "--results", str(tmp_path))


def test_a_sweep_compares_each_value_with_the_default(tmp_path, capsys):
    def make(cell: Cell, sample: int) -> dict[str, Any]:
        return row(cell, sample, score=float(sample < (12 if cell.method.decay == 0.9 else 6)))

    sweep = ["method=structkv", "method.decay=0.5,0.9,1.0", "task=ruler", "task.subset=[vt]"]
    store(tmp_path, cells(*sweep, "task.lengths=[512]"), make, "table3")
    lines = json.loads(printed(capsys, "3", "--format", "json", "--results", str(tmp_path)))
    assert [(line["column"], line["score"], line["difference"]) for line in lines] == [
        ("0.5", 30.0, -30.0),
        ("0.9", 60.0, None),
        ("1", 30.0, -30.0),
    ]


@pytest.mark.parametrize("format", ["table", "markdown", "latex", "html", "csv"])
def test_every_format_says_the_same_numbers(tmp_path, capsys, format):
    store(tmp_path, cells("task=ruler", *SIX))
    text = printed(capsys, "2", "--format", format, "--results", str(tmp_path))
    expected = ("90.0", "45.0") if format == "csv" else ("90.00", "45.00")
    assert all(number in text for number in expected)
    if format == "latex":
        assert text.count("{") == text.count("}")
        assert r"KV \%" in text
    if format == "csv":
        assert {line["method"] for line in csv.DictReader(text.splitlines())} == {
            "full",
            "snapkv",
            "structkv",
        }


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_gets_every_number_whole(tmp_path, capsys, monkeypatch, width):
    """What does not fit beside the methods' names goes below, beside them once more."""
    six = ["method=full,snapkv,structkv", "method.kv_ratio=0.1", "task.lengths=[512,1024]"]
    store(tmp_path, cells("task=ruler", "task.subset=[vt,fwe,cwe,niah_single_1,niah_multikey_2]", *six))

    def drawn(columns: int) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        text = printed(capsys, "2", "--columns", "subtask", "--intervals", "--results", str(tmp_path))
        return text[: text.index("Protocol: ")]

    narrow, wide = drawn(width), drawn(400)
    assert max(map(len, narrow.splitlines())) <= width
    entries = re.compile(r"\d+\.\d\d≈? \[[^]]*\]")
    assert sorted(entries.findall(narrow)) == sorted(entries.findall(wide))
    assert len(entries.findall(wide)) == 3 * 6


def test_rows_of_two_protocols_are_refused_unless_mixing_is_allowed(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX) + cells("task=ruler", "protocol=paper", *SIX))
    told = printed(capsys, "2", "--results", str(tmp_path), code=2)
    assert "official and paper" in told or "prompts" in told
    assert "--allow-mixed" in told
    lines = tidy(capsys, tmp_path, "--allow-mixed")
    paper = "(paper answer_room=64 prefix_in=user)"
    assert {method for method, _ in lines} == {
        *(f"{method} (official)" for method in ("full", "snapkv", "structkv")),
        *(f"{method} {paper}" for method in ("full", "snapkv heads=query", "structkv")),
    }
    assert lines["full (official)", "avg"]["reference"] == "structkv (official)"
    assert {line["n"] for (_, column), line in lines.items() if column == "avg"} == {4 * N}


def test_rows_of_two_texts_are_refused_and_both_are_named(tmp_path, capsys):
    def make(cell: Cell, sample: int) -> dict[str, Any]:
        return row(cell, sample, prompt_sha256=f"{cell.task.seed}")

    snapkv = ["task=ruler", "method=snapkv", *SIX[1:]]
    store(tmp_path, cells("task=ruler", "method=structkv", *SIX[1:]) + cells("task.seed=7", *snapkv), make)
    told = printed(capsys, "2", "--results", str(tmp_path), code=2)
    assert "seed=42" in told
    assert "seed=7" in told


def test_rows_of_two_models_of_one_name_are_refused(tmp_path, capsys):
    for name, weights in (("one", "aa"), ("two", "bb")):
        store(tmp_path / name, cells("task=ruler", *SIX), provenance={"model": {"weights": weights}})
    both = ("--results", str(tmp_path / "one"), "--results", str(tmp_path / "two"))
    told = printed(capsys, "2", *both, code=2)
    assert "aa" in told
    assert "bb" in told


def test_folders_are_merged_and_what_is_twice_counts_once(tmp_path, capsys):
    def part(start: int, stop: int) -> Callable[[Cell, int], dict[str, Any] | None]:
        return lambda cell, sample: row(cell, sample) if start <= sample < stop else None

    store(tmp_path / "one", cells("task=ruler", *SIX), part(0, 12))
    store(tmp_path / "two", cells("task=ruler", *SIX), part(10, N))
    both = ("--results", str(tmp_path / "one"), "--results", str(tmp_path / "two"))
    text = printed(capsys, "2", *both)
    assert "INCOMPLETE" not in text
    assert f"{2 * 12} samples are in several of the results folders" in text

    def otherwise(cell: Cell, sample: int) -> dict[str, Any] | None:
        return row(cell, sample, prediction="otherwise", score=0.0) if sample == 0 else None

    store(tmp_path / "three", cells("task=ruler", *SIX), otherwise)
    text = printed(capsys, "2", *both, "--results", str(tmp_path / "three"))
    assert "12 of them have different predictions" in text
    lines = json.loads(printed(capsys, "2", *both, "--results", str(tmp_path / "three"), "--format", "json"))
    assert lines[0]["score"] == pytest.approx(90.0)  # the first folder's say


def test_a_damaged_line_is_skipped_and_counted(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX))
    with next(tmp_path.glob("*snapkv*/rows.jsonl")).open("a") as file:
        file.write('{"sample": "0019", "sta')
    assert "1 damaged lines were skipped" in printed(capsys, "2", "--results", str(tmp_path))


def test_no_rows_says_which_command_makes_them(tmp_path, capsys):
    told = printed(capsys, "2", "--results", str(tmp_path), code=2)
    assert "structkv-bench run experiment=table2" in told
    assert "choose one of" in printed(capsys, "9", code=2)


@pytest.mark.parametrize("name", FILES)
def test_the_papers_numbers_are_those_handed_down(name):
    assert read_csv(name) == list(csv.DictReader(shared(f"paper/{name}").read_text().splitlines()))


def test_the_papers_averages_are_the_plain_means_of_its_sixteen_tasks():
    """To rounding; which tells what average to print beside it."""
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for one in read_csv("longbench.csv"):
        place = (one["table"], one["model"], one["method"], one["kv_pct"])
        rows.setdefault(place, {})[one["task"]] = float(one["score"])
    whole = {place: scores for place, scores in rows.items() if len(scores) == 17}
    assert len(whole) == 15
    for scores in whole.values():
        assert fmean(v for task, v in scores.items() if task != "avg") == pytest.approx(
            scores["avg"], abs=0.0051
        )


def test_the_papers_number_stands_below_ours_only_for_the_same_method_and_budget(tmp_path, capsys):
    """With the difference; secondary values are marked, and what can't be had is empty."""
    table2 = ["method=full,snapkv,structkv", "task.subset=[vt,fwe]", "task.lengths=[8192,512]"]
    store(tmp_path, cells("task=ruler", "method.kv_ratio=0.1,0.3", *table2))
    lines = printed(capsys, "2", "--results", str(tmp_path), "--compare").splitlines()
    after = {lines[i].split()[0] + lines[i].split()[1]: lines[i + 1 : i + 3] for i in range(len(lines) - 2)
             if lines[i].split()[:1] and lines[i].split()[0] in ("full", "snapkv", "structkv")
             and len(lines[i].split()) > 4}  # fmt: skip
    assert after["full100"][0].split() == ["paper", "90.10", "86.00"]
    assert after["full100"][1].split() == ["ours", "less", "paper", "-0.10", "+4.00"]
    assert after["structkv10"][0].split() == ["paper", "81.30†", "80.10†"]
    assert after["snapkv30"][0].split()[:1] != ["paper"]
    table = paper_table("table2")
    assert table.score("structkv", 10, "512") is None


@pytest.mark.parametrize("command", [["table", "2"], ["results"], ["score", "runs"]], ids=" ".join)
def test_reports_need_no_torch(tmp_path, command):
    store(tmp_path, cells("task=ruler", *SIX))
    place = [str(tmp_path)] if command[0] == "score" else ["--results", str(tmp_path)]
    code = (
        "import sys; from structkv_bench.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, *command, *place], check=False).returncode == 0


def test_stored_predictions_are_scored_anew_without_a_model(tmp_path, capsys):
    """With the task's scorer of today; nothing is written."""

    def make(cell: Cell, sample: int) -> dict[str, Any]:
        return row(cell, sample, prediction="not so" if sample < 5 else "never", score=1.0)

    store(tmp_path, cells("task=ruler", *SIX), make)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl")}
    assert main(["score", "runs", str(tmp_path)]) == 0
    lines = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert len(lines) == 12
    assert {(line["stored"], line["score"], line["changed"]) for line in lines} == {("100.0", "25.0", "15")}
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.jsonl")} == before


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        ({"score": float("nan")}, "damaged lines"),
        ({"score": 55}, "damaged lines"),
        ({"score": "high"}, "damaged lines"),
        ({"kv_bytes_full": 0}, "damaged lines"),
    ],
)
def test_a_row_that_can_not_be_is_a_damaged_line(tmp_path, capsys, damage, wrong):
    def make(cell: Cell, sample: int) -> dict[str, Any]:
        bad = (cell.method_name, cell.subtask, sample) == ("snapkv", "vt", 3)
        return row(cell, sample, **(damage if bad else {}))

    store(tmp_path, cells("task=ruler", *SIX), make)
    text = printed(capsys, "2", "--results", str(tmp_path))
    assert wrong in text
    assert "INCOMPLETE" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--columns", "method.decaz"], "did you mean method.decay?"),
        (["--reference", "structkw"], "did you mean structkv?"),
        (["--results", "no such folder"], "no such folder: there is no such folder"),
    ],
)
def test_a_name_that_is_not_there_is_said(tmp_path, capsys, arguments, told):
    store(tmp_path, cells("task=ruler", *SIX))
    assert told in printed(capsys, "2", "--results", str(tmp_path), *arguments, code=2)


def test_a_damaged_manifest_is_one_line(tmp_path, capsys):
    store(tmp_path, cells("task=ruler", *SIX))
    for cells_of_it in ([1], {"a.b": {}}, {"a.b": 3}):
        text = json.dumps({"experiment": "table2", "cells": cells_of_it})
        (tmp_path / "manifests" / "table2.json").write_text(text)
        assert "damaged" in printed(capsys, "2", "--results", str(tmp_path), code=2)
