"""The bench on a tiny model: what it prints, its order, what a failure does. No time is judged."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from structkv_bench.bench import measure
from structkv_bench.bench.measure import Wish, overrides
from structkv_bench.bench.timing import Spread, timed
from structkv_bench.cli import main
from structkv_bench.cost.work import cost
from structkv_bench.engine.layer import LayerView
from structkv_bench.engine.method import Compressor, Method
from structkv_bench.engine.prefill import PARTS
from structkv_bench.errors import UserError
from structkv_bench.methods.full import Full
from structkv_bench.methods.structkv import StructKV
from tests.tiny import tiny


def arguments(model: Path, essays: Path, *more: str) -> list[str]:
    chosen = ["model=custom", f"model.path={model}", "model.name=tiny", f"task.essays={essays}"]
    return ["bench", *chosen, "--repeats", "3", "--new-tokens", "4", *more]


def measured(capsys: Any, model: Path, essays: Path, *more: str) -> dict[str, Any]:
    assert main(arguments(model, essays, "--format", "json", *more)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_json_has_every_measure_of_every_cell(model_folder: Path, essays: Path, capsys: Any) -> None:
    methods = ["method=full,snapkv,structkv", "method.kv_ratio=0.2", "method.pivot=1"]
    found = measured(capsys, model_folder, essays, *methods, "length=700,900")
    assert [(line["method"].split()[0], line["length"]) for line in found["lines"]] == [
        (name, length) for length in (700, 900) for name in ("full", "snapkv", "structkv")
    ]
    assert "host" not in found["provenance"]
    assert found["groups"] == []
    for line in found["lines"]:
        assert line["error"] is None
        assert (line["repeats"], line["distinct_prompts"]) == (3, 3)
        assert line["prompt_tokens"] == line["length"] - 4
        for name in ("prefill_s", "first_token_s", "decode_s_per_token", "achieved_speedup", "share_reached"):
            assert 0 < line[name]["q1"] <= line[name]["median"] <= line[name]["q3"]
        assert line["prefill_s"]["median"] <= line["first_token_s"]["median"]
        assert set(line["parts_s"]) == set(PARTS)
        assert sum(line["parts_s"].values()) < line["first_token_s"]["q3"] * 1.5
        assert line["peak_of"] == "live tensors"
        assert line["estimated_peak_bytes"] == pytest.approx(line["peak_bytes"], rel=0.1)
        assert line["kv_bytes_pct"] == pytest.approx(100 if line["method"] == "full" else 20, abs=0.2)
    full, snapkv, structkv = found["lines"][:3]
    assert full["kept_bytes"] == 2 * 4 * 2 * 696 * 8 * 4
    assert full["achieved_speedup"]["median"] == full["possible_speedup"] == 1
    assert snapkv["possible_speedup"] == 1
    assert snapkv["prefill_flops"] > full["prefill_flops"]
    shape = tiny("llama").model.shape
    assert structkv["possible_speedup"] == pytest.approx(
        cost(shape, Full(), 696).forward / cost(shape, StructKV(pivot=1), 696).forward
    )
    assert structkv["pivots"] == [1, 1, 1]


def test_cells_are_measured_in_turn_on_the_same_prompt(
    model_folder: Path, essays: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up first, then A B group, A B group ...: another text each time, the same for all."""
    calls: list[tuple[list[str], tuple[int, ...], bool]] = []

    def noted(model: Any, methods: Any, ids: Any, new: int, look: bool = False) -> Any:
        calls.append(([type(method).__name__ for method in methods], tuple(ids), look))
        return timed(model, methods, ids, new, look)

    monkeypatch.setattr(measure, "timed", noted)
    found = measured(
        capsys, model_folder, essays, "method=full,h2o", "method.kv_ratio=0.2", "length=700", "--grouped"
    )
    assert [names for names, _, _ in calls] == [["Full"], ["H2O"], ["Full", "H2O"]] * 4
    assert [look for _, _, look in calls] == [True] * 3 + [False] * 9
    prompts = [ids for _, ids, _ in calls]
    assert all(len(set(prompts[turn : turn + 3])) == 1 for turn in (0, 3, 6, 9))
    assert len(set(prompts)) == 4
    [group] = found["groups"]
    assert (group["cells"], group["length"], group["error"]) == (2, 700, None)
    for name in ("group_s", "one_by_one_s", "times_as_fast", "over_full"):
        assert 0 < group[name]["q1"] <= group[name]["median"] <= group[name]["q3"]


@pytest.mark.parametrize("format", ["table", "markdown"])
def test_tables_have_a_row_per_cell(
    model_folder: Path, essays: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    grid = ["method=full,snapkv", "method.kv_ratio=0.2", "length=[700]", "--format", format, "--grouped"]
    assert main(arguments(model_folder, essays, *grid)) == 0
    printed = capsys.readouterr()
    for column in ("prefill s", "first token s", "decode ms/token", "peak MiB", "kept MiB", "possible",
                   "achieved", "reached %", *(f"{part} %" for part in PARTS), "times as fast"):  # fmt: skip
        assert column in printed.out
    assert "3 repeats on 3 prompts: median (quartiles); peak: live tensors" in printed.out
    starts = [line.strip("| ").split()[0] for line in printed.out.splitlines() if line.strip("| ")]
    assert starts.count("full") == starts.count("snapkv") == 2
    assert "700 tokens: repeat 3 of 3" in printed.err


def test_csv_is_one_flat_line_per_cell_and_out_takes_it(
    model_folder: Path, essays: Path, tmp_path: Path, capsys: Any
) -> None:
    """Without full there is no achieved speed-up, and what is possible is told all the same."""
    file = tmp_path / "deep" / "bench.csv"
    grid = [
        "method=snapkv",
        "method.kv_ratio=0.2,0.4",
        "task.lengths=[700]",
        "--format",
        "csv",
        "--out",
        str(file),
    ]
    assert main(arguments(model_folder, essays, *grid)) == 0
    assert "prefill s" in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [row["kv_ratio"] for row in rows] == ["0.2", "0.4"]
    for row in rows:
        assert float(row["prefill_s_q1"]) <= float(row["prefill_s"]) <= float(row["prefill_s_q3"])
        assert float(row["parts_s_attention"]) > 0
        assert (row["achieved_speedup"], row["possible_speedup"]) == ("", "1.0")


@dataclass(frozen=True)
class Fails(Method):
    """A plug-in method that fails on every prompt."""

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return _Fails()


class _Fails(Compressor):
    def keep_kv(self, layer: LayerView) -> Any:
        raise MemoryError("out of luck")


def test_a_cell_that_fails_is_a_line_and_the_others_go_on(
    model_folder: Path, essays: Path, capsys: Any
) -> None:
    grid = ["method=full", f"method._target_=structkv_bench.methods.full.Full,{__name__}.Fails", "length=700"]
    assert main(arguments(model_folder, essays, *grid, "--format", "json", "--grouped")) == 1
    found = json.loads(capsys.readouterr().out)
    errors = {line["method"]: line["error"] for line in found["lines"]}
    assert len(errors) == 2
    [failed] = [error for error in errors.values() if error]
    assert "696 prompt tokens" in failed
    assert "MemoryError: out of luck" in failed
    assert [line["repeats"] for line in found["lines"]] == [3, 0]
    assert "out of luck" in found["groups"][0]["error"]
    assert main(arguments(model_folder, essays, *grid)) == 1
    assert "out of luck" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["length=many"], "length=2048,4096"),
        (["length=700", "task.lengths=[900]"], "given twice"),
        (["task.samples=3"], "one sample for each of --repeats"),
        (["--repeats", "0"], "give 1 or more"),
        (["--out", "/"], "give a file's name"),
        (["--new-tokens", "0"], "give 1 or more"),
        (["method=snapkv", "method.budget=8", "length=700"], "keeps 8 of 696"),
        (["method=full", "length=9000"], "8192 positions"),
        (["method=snap"], "did you mean snapkv"),
    ],
)
def test_a_mistake_is_one_line(
    model_folder: Path, essays: Path, capsys: Any, wrong: list[str], says: str
) -> None:
    assert main(arguments(model_folder, essays, *wrong)) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.out == ""


def test_overrides_ask_for_other_text_each_time_and_for_the_answer_room() -> None:
    wish = Wish(repeats=4, new_tokens=9)
    assert set(overrides(["method=full", "length=64,128"], wish)) == {
        "task=niah", "task.samples=5", "task.depths=1", "task.max_new_tokens=9", "method=full",
        "task.lengths=[64,128]",
    }  # fmt: skip
    assert set(overrides(["task=ruler", "task.answer_room=3"], wish)) == {
        "task=ruler", "task.samples=5", "task.answer_room=3",
    }  # fmt: skip
    assert "task=niah" not in overrides(["experiment=fig7"], wish)
    with pytest.raises(UserError, match="list token counts"):
        overrides(["length="], wish)


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5)


def test_timed_decodes_as_many_tokens_as_asked_and_tells_what_it_held() -> None:
    small = tiny("llama")
    ids = small.prompt(200)
    one = timed(small.model, [Full()], ids, 1)
    assert (one.decode_s_per_token, one.peak_bytes, one.pivot) == (None, None, None)
    assert one.kept_bytes == small.model.shape.kv_bytes([200] * 4)
    assert one.layer_tokens == [200] * 4
    two = timed(small.model, [Full(), Full()], ids, 3, look=True)
    assert two.kept_bytes == 2 * one.kept_bytes
    assert two.peak_bytes is not None
    assert two.peak_bytes > small.model.weight_bytes + two.kept_bytes
    assert two.decode_s_per_token == two.decode_s / 2
    assert two.seconds >= two.first_token_s >= two.prefill_s > 0
