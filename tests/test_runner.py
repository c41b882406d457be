"""Whole runs on a tiny model, through the command line: rows, resume, failures, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import runner
from structkv_bench.batches import Order
from structkv_bench.cli import main
from structkv_bench.engine.model import Model
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.store import CELL_FILE, ROWS_FILE
from tests.runs import overrides, rows_of
from tests.tiny import save_tiny, tiny


def test_a_run_fills_a_row_per_sample_and_cell(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """All that is needed to judge a prediction stands in its row; the table follows."""
    assert main(overrides(model_folder, tmp_path)) == 0
    rows = rows_of(tmp_path)
    assert len(rows) == 3
    for folder, cell in rows.items():
        assert [row["sample"] for row in cell] == sorted({row["sample"] for row in cell})
        assert len(cell) == 5
        for row in cell:
            assert row["status"] == "ok"
            assert row["error"] is None
            assert row["prompt_tokens"] == 694
            assert 0 <= row["score"] <= 1
            assert len(row["generated_ids"]) <= 6
            assert row["kv_bytes_full"] == 2 * 4 * 2 * 694 * 8 * 4
            assert row["tie_margin"] > 0
            kept = 694 if ".full." in folder else int(694 * 0.2)
            assert row["kept_entries"] == [2 * kept] * 4
            assert (row["pivot"] is None) == (".structkv" not in folder)
    about = json.loads(next(tmp_path.glob(f"*/{CELL_FILE}")).read_text())
    assert set(about["sessions"][0]["model"]) == {"weights", "tokenizer"}
    assert "structkv" in capsys.readouterr().out


def test_a_group_predicts_what_each_cell_does_alone(model_folder: Path, tmp_path: Path) -> None:
    """Rows of three cells run together equal the rows of each run in a store of its own.

    But for the fidelity to a pass that keeps all, which runs beside it in the group alone.
    """
    assert main(overrides(model_folder, tmp_path / "group")) == 0
    for name in ("snapkv", "structkv"):
        assert main(overrides(model_folder, tmp_path / "alone", f"method={name}")) == 0
    group, alone = rows_of(tmp_path / "group"), rows_of(tmp_path / "alone")
    assert len(alone) == 2
    for folder, rows in alone.items():
        assert [_own(row) for row in rows] == [_own(row) for row in group[folder]]


def _own(row: dict[str, Any]) -> dict[str, Any]:
    """Without what a group adds: a batch of another size rounds the logits otherwise in the last digit."""
    return {key: value for key, value in row.items() if key not in ("tie_margin", "fidelity")}


def test_a_second_run_computes_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are resumed by key and sample id; more samples add only the new ones."""
    main(overrides(model_folder, tmp_path))
    before = rows_of(tmp_path)
    calls: list[str] = []
    run_batch = runner.run_batch

    def noting(model: Model, orders: list[Order]) -> Any:
        calls.extend(order.sample.id for order in orders)
        return run_batch(model, orders)

    monkeypatch.setattr(runner, "run_batch", noting)
    assert main(overrides(model_folder, tmp_path)) == 0
    assert calls == []
    assert rows_of(tmp_path) == before
    assert main(overrides(model_folder, tmp_path, "task.samples=7")) == 0
    assert len(calls) == 2
    assert {len(rows) for rows in rows_of(tmp_path).values()} == {7}
    assert main(overrides(model_folder, tmp_path, "method=snapkv", "method.kernel=5")) == 0
    assert len(calls) == 2 + 5  # another config reuses nothing


def test_kill_9_in_the_middle_of_a_line_loses_that_line_alone(model_folder: Path, tmp_path: Path) -> None:
    """Case 11: rows after resume equal an undisturbed run's; those that were there are not computed again."""
    arguments = overrides(model_folder, tmp_path / "killed", "method=snapkv", "task.samples=10")
    code = "import sys; from structkv_bench.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    lines = _wait_for_rows(tmp_path / "killed", 3, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    [file] = (tmp_path / "killed").glob(f"*/{ROWS_FILE}")
    with file.open("ab") as torn:
        torn.write(b'{"sample": "0009", "sta')
    kept = file.read_bytes().rpartition(b"\n")[0]
    assert main(arguments) == 0
    assert main(overrides(model_folder, tmp_path / "whole", "method=snapkv", "task.samples=10")) == 0
    assert file.read_bytes().startswith(kept)
    assert lines >= 3
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")


def _wait_for_rows(results: Path, count: int, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        lines = sum(file.read_bytes().count(b"\n") for file in results.glob(f"*/{ROWS_FILE}"))
        if lines >= count:
            return lines
        time.sleep(0.005)
    pytest.fail("the run ended, or wrote no rows")


def test_ctrl_c_leaves_a_state_that_resumes(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Exit code 130 and a line that says so; the same command goes on."""
    run_batch, calls = runner.run_batch, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return run_batch(*args)

    monkeypatch.setattr(runner, "run_batch", interrupted)
    assert main(overrides(model_folder, tmp_path)) == 130
    assert "goes on where this stopped" in capsys.readouterr().err
    assert {len(rows) for rows in rows_of(tmp_path).values()} == {2}
    assert main(overrides(model_folder, tmp_path)) == 0
    assert {len(rows) for rows in rows_of(tmp_path).values()} == {5}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["task.lengths=[9000]"], "model tiny has 8192 positions"),
        (["model.max_positions=650"], "has 650 positions"),
        (["method.kv_ratio=0.01"], "keeps 6 of 694 prompt tokens, not more than the 8"),
        (["method.budget=8"], "budget=8 keeps 8 of 694"),
        (["task.lengths=[40]"], "40"),
        (["model.path=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_can_be_refused_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path, capsys: Any, wrong: list[str], says: str
) -> None:
    """One clear line, exit code 2, and no row of any cell, also not of those that would have worked."""
    assert main(overrides(model_folder, tmp_path, *wrong)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert says in error
    assert list(tmp_path.iterdir()) == []


def test_other_weights_in_the_same_place_are_refused(tmp_path: Path, capsys: Any) -> None:
    """A model folder whose weights changed never adds to the old ones' rows, nor passes them for its own."""
    model = save_tiny(tmp_path / "model")
    assert main(overrides(model, tmp_path / "results", "method=full")) == 0
    tiny(seed=1).stock.save_pretrained(model)
    for samples in ("5", "6"):
        chosen = overrides(model, tmp_path / "results", "method=full", f"task.samples={samples}")
        assert main(chosen) == 2
        assert "its rows are of another model" in capsys.readouterr().err


def test_a_lost_cell_json_is_written_anew(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Rows are never orphaned: the next run of the cell gives them their config back, damage is named."""
    chosen = overrides(model_folder, tmp_path, "method=full")
    main(chosen)
    [file] = tmp_path.glob(f"*/{CELL_FILE}")
    config = json.loads(file.read_text())["config"]
    file.write_text("{")
    assert main(chosen) == 2
    assert "damaged; delete it" in capsys.readouterr().err
    file.unlink()
    assert main(chosen) == 0
    assert json.loads(file.read_text())["config"] == config
    assert "full" in capsys.readouterr().out


def test_two_runs_never_add_rows_to_one_cell(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """The second one is told so at once, and other cells of the folder are free."""
    chosen = overrides(model_folder, tmp_path, "method=snapkv")
    code = (
        "import sys; from structkv_bench.config import compose; from structkv_bench.plan import plan; "
        "from structkv_bench.store import Store; setups = compose(sys.argv[2:]); "
        "store = Store(setups[0].results_dir); store.check_writable(); "
        "held = store.locked(plan(setups)[0].cells); held.__enter__(); print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, *chosen], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    assert main(chosen) == 2
    assert "another run is adding rows" in capsys.readouterr().err
    assert main(overrides(model_folder, tmp_path, "method=full")) == 0
    holder.communicate(b"\n")
    assert main(chosen) == 0


def test_rows_of_another_prompt_are_refused(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Essays or a tokenizer that changed under the same config never mix with earlier rows."""
    main(overrides(model_folder, tmp_path, "method=snapkv"))
    [file] = tmp_path.glob(f"*/{ROWS_FILE}")
    file.write_text(file.read_text().replace('"prompt_sha256": "', '"prompt_sha256": "x'))
    assert main(overrides(model_folder, tmp_path, "method=snapkv")) == 2
    assert "was run with another prompt" in capsys.readouterr().err


def test_show_prints_prompt_budgets_and_work(model_folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Settings, head and tail of one real prompt, tokens, entries per layer and estimates."""
    arguments = overrides(model_folder, tmp_path, "method=snapkv,structkv")
    assert main(["show", *arguments[1:]]) == 0
    out = capsys.readouterr().out
    assert "694 prompt tokens, 0 cut out, up to 6 generated" in out
    assert "The grass is green." in out
    assert "138 in layers 0-3" in out
    assert "694 in layers 0-2, 138 in layer 3" in out
    assert "0.1 MiB, 19.9 % of full" in out
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_in_the_shared_pass_is_tried_method_by_method(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample that can't be run at all is failed rows with the traceback, and the next samples go on."""
    parts, prompts = TokenizerPrompts.parts, []

    def second_too_large(self: TokenizerPrompts, sample: Any) -> Any:
        prompts.append(sample.id)
        return parts(self, sample)

    embed = Model.embed

    def embedding(self: Model, ids: Any) -> Any:
        if prompts and prompts[-1] == "0001" and ids.shape[1] == 694:
            raise MemoryError("694 tokens")
        return embed(self, ids)

    monkeypatch.setattr(TokenizerPrompts, "parts", second_too_large)
    monkeypatch.setattr(Model, "embed", embedding)
    assert main(overrides(model_folder, tmp_path)) == 1
    for rows in rows_of(tmp_path).values():
        assert [row["status"] for row in rows] == ["ok", "failed", "ok", "ok", "ok"]
        assert "MemoryError: 694 tokens" in rows[1]["error"]
