"""Rows -> result lines.

Rules protected here:
- The columns and their order are fixed; a failed sample counts as failed and enters no mean.
- Every format says the same numbers; a table fits its terminal and cuts no number short.
- What was left out is said in a footnote.
"""

import csv
import json

import pytest

from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.plan import Cell, plan
from structkv_bench.report.render import Format
from structkv_bench.report.results import line, render, results
from structkv_bench.store import Store

COLUMNS = [
    *("model", "method", "kv_ratio", "task", "length", "n", "failed", "score"),
    *("kv_bytes_pct", "prefill_pct", "pivot", "prefill_s", "decode_s"),
]


def row(sample: int, **values: object) -> dict[str, object]:
    ok = {"score": 1.0, "kv_bytes": 10, "kv_bytes_full": 100, "prefill_pct": 100.0, "pivot": None}
    return {"sample": str(sample), "status": "ok", **ok, "prefill_s": 1.0, "decode_s": 0.5, **values}


def failed(sample: int) -> dict[str, object]:
    return {"sample": str(sample), "status": "failed", "error": "out of memory", "pivot": None}


def cells(*overrides: str) -> list[Cell]:
    lengths = [] if any("lengths" in text for text in overrides) else ["task.lengths=[64,128]"]
    return [cell for group in plan(compose([*overrides, *lengths])) for cell in group.cells]


def stored(folder, cell: Cell, *rows: dict[str, object]) -> None:
    store = Store(folder).cell(cell)
    store.begin({})
    for one in rows:
        store.append(one)


def about(cell: Cell) -> dict[str, object]:
    names = {"model": cell.model.name, "method": cell.method_name, "task": cell.task_name}
    return {"key": cell.key, "names": names, "config": cell.config}


STRUCTKV = cells("method=structkv")[0]


def test_a_line_has_exactly_these_columns_in_this_order():
    assert list(line(about(STRUCTKV), [row(0)])) == COLUMNS


def test_means_medians_and_mode_over_the_samples_that_worked():
    rows = [
        row(0, score=1.0, kv_bytes=10, prefill_pct=40.0, pivot=13, prefill_s=1.0, decode_s=1.0),
        row(1, score=0.0, kv_bytes=20, prefill_pct=50.0, pivot=13, prefill_s=2.0, decode_s=2.0),
        row(2, score=1.0, kv_bytes=30, prefill_pct=60.0, pivot=14, prefill_s=9.0, decode_s=4.5),
        failed(3),
    ]
    assert list(line(about(STRUCTKV), rows).values()) == [
        *("smollm2_135m", "structkv", 0.1, STRUCTKV.subtask, 64, 3, 1, 66.67),
        *(20.0, 50.0, 13, 2.0, 2.0),
    ]


def test_a_cell_without_a_sample_that_worked_has_no_numbers():
    assert list(line(about(STRUCTKV), [failed(0)]).values())[5:] == [0, 1, *[None] * 6]


def test_kv_ratio_is_empty_where_a_method_has_none_or_a_budget_instead():
    def shown(*overrides):
        return line(about(cells(*overrides)[0]), [row(0)])["kv_ratio"]

    assert shown("method=snapkv", "method.kv_ratio=0.2") == 0.2
    assert shown("method=snapkv", "method.budget=16") is None
    assert shown("method=full") is None


SIX = "task.subset=[niah_single_1,niah_multikey_2,niah_multikey_3,vt,cwe,fwe]"


@pytest.fixture
def folder(tmp_path):
    for cell in cells("method=snapkv,full,structkv", "method.kv_ratio=0.2,0.05", "task=ruler", SIX):
        stored(tmp_path, cell, row(0, pivot=13 if cell.method_name == "structkv" else None))
    return tmp_path


def test_all_results_come_in_the_order_of_their_columns_numbers_as_numbers(folder):
    found, note = results([folder])
    lines = found[: 5 * 2 * 6]
    order = [(one["task"], one["length"], one["method"], one["kv_ratio"] or 0) for one in lines]
    assert order == sorted(order)
    assert len(found) == 5 * 2 * 6 + 5 * 2  # an average of each method at each length follows
    assert note is None


def test_seconds_of_batches_of_several_samples_are_said_to_be_that(tmp_path):
    stored(tmp_path, STRUCTKV, row(0, decode_rows=24), row(1, decode_rows=80), row(2))
    _, note = results([tmp_path])
    assert note == "decode_s is that of batches of up to 80 rows, of several samples (decode.batch)"


def test_an_average_follows_that_says_over_what_it_is(tmp_path):
    """The plain mean of the tasks' means, whatever their n; a task without samples is named as missing."""
    for cell in cells("method=snapkv,full", "task=ruler", "task.subset=[vt,cwe,fwe]"):
        score = {"vt": 1.0, "cwe": 0.5, "fwe": 0.0}[cell.subtask]
        rows = [row(i, score=score) for i in range(5 if cell.subtask == "vt" else 2)]
        stored(tmp_path, cell, *([] if (cell.subtask, cell.length) == ("fwe", 128) else rows))
    lines, _ = results([tmp_path])
    averages = [(one["method"], one["length"], one["task"], one["score"], one["n"]) for one in lines[12:]]
    assert averages == [
        ("full", 64, "mean of 3 of 13 tasks", 50.0, 9),
        ("snapkv", 64, "mean of 3 of 13 tasks", 50.0, 9),
        ("full", 128, "mean of 2 of 13 tasks", 75.0, 7),
        ("snapkv", 128, "mean of 2 of 13 tasks", 75.0, 7),
    ]


def test_each_suite_has_its_own_averages(tmp_path):
    for cell in cells("method=full", "task=longbench,longbench_v2,ruler", "task.lengths=[64]"):
        rows = [row(i, fields={"difficulty": "easy", "length": "short"}, score=float(i == 0)) for i in (0, 1)]
        stored(tmp_path, cell, *rows)
    lines, _ = results([tmp_path])
    assert {one["task"]: one["score"] for one in lines if one["kv_bytes_pct"] is None} == {
        "avg16 (plain mean of the 16 English tasks)": 50.0,
        "official (mean of category means)": 50.0,
        "overall, 2 of 503 questions": 50.0,
        "easy, 2 of 192 questions": 50.0,
        "short, 2 of 180 questions": 50.0,
        "mean of 13 tasks": 50.0,
    }


def test_results_of_given_cells_come_in_the_order_given(folder):
    wanted = [
        c.key for c in cells("method=structkv,full", "method.kv_ratio=0.2", "task=ruler", "task.subset=[vt]")
    ]
    lines, _ = results([folder], wanted)
    assert [(one["method"], one["length"]) for one in lines] == [  # of one task there is no average
        *(("structkv", 64), ("full", 64), ("structkv", 128), ("full", 128))
    ]


def test_what_is_left_out_is_said(tmp_path):
    stored(tmp_path, STRUCTKV, row(0), failed(1))
    with (tmp_path / STRUCTKV.folder / "rows.jsonl").open("a") as file:
        file.write('{"sample": "2", "sta')
    _, note = results([tmp_path])
    assert "1 failed" in note
    assert "1 damaged line" in note
    assert "\n" not in note


def test_no_results_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no results"):
        results([tmp_path])


def test_csv_and_json_and_markdown_say_the_same(folder):
    lines, _ = results([folder])
    assert json.loads(render(lines, Format.JSON)) == lines
    read = list(csv.DictReader(render(lines, Format.CSV).splitlines()))
    assert list(read[0]) == COLUMNS
    head, rule, *rows = render(lines, Format.MARKDOWN).splitlines()
    assert head == f"| {' | '.join(COLUMNS)} |"
    assert rule.count("|") == head.count("|")
    for one, texts, text in zip(lines, read, rows, strict=True):
        assert [cell.strip() for cell in text.strip("|").split("|")] == list(texts.values())
        for name, value in one.items():
            assert texts[name] == ("" if value is None else texts[name])
            assert isinstance(value, str | None) or float(texts[name]) == value


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
@pytest.mark.parametrize("tasks", ["task=niah", "task=ruler"])
def test_a_table_fits_its_terminal_and_cuts_no_number(tmp_path, width, tasks):
    for cell in cells("method=full,streaming_llm,structkv", "method.kv_ratio=0.2", tasks):
        stored(tmp_path, cell, row(0, kv_bytes=99.99, prefill_s=1234.567, decode_s=1234.5, pivot=13))
    lines, _ = results([tmp_path])
    text = render(lines, Format.TABLE, width)
    assert max(map(len, text.splitlines())) <= width
    of_cells = [one for one in lines if one["kv_bytes_pct"] is not None]
    for number in ("100.00", "99.99", "1234.567", "1234.500"):
        assert text.count(number) >= len(of_cells)


def test_a_table_with_room_has_every_column_on_one_line(folder):
    lines, _ = results([folder])
    head, _, *rows = render(lines, Format.TABLE).splitlines()
    assert head.split() == COLUMNS
    assert len(rows) == len(lines)


def test_what_all_rows_of_a_narrow_table_share_stands_above_it(tmp_path):
    for cell in cells("method=full,streaming_llm"):
        stored(tmp_path, cell, row(0))
    assert render(results([tmp_path])[0], Format.TABLE, 80).startswith("model: smollm2_135m\n")


def test_cells_that_differ_look_different():
    """Settings other than a choice's own defaults stand behind its name, a budget among them."""
    overrides = ["method.heads=kv,query", "method.budget=null,100", "task.seed=42,7"]
    names = [line(about(c), [row(0)]) for c in cells("method=snapkv", *overrides)]
    shown = {(one["method"], one["task"]) for one in names}
    methods = ["snapkv", "snapkv budget=100", "snapkv heads=query", "snapkv budget=100 heads=query"]
    tasks = ["niah_essay", "niah_essay seed=7"]
    assert shown == {(method, task) for method in methods for task in tasks}
