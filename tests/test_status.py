"""How far runs are, told from the results folder alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.launch.claim import State, claimed
from structkv_bench.launch.status import CellStatus, as_text, outcomes, reason, status
from structkv_bench.manifest import Manifest, write_manifest
from structkv_bench.plan import Cell, plan
from structkv_bench.store import Store, read_rows
from tests.test_cli import LIGHT, command

CELLS = plan(compose(["method=full,snapkv", "task.lengths=[64]"]))[0].cells
TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: too deep\n'


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Five samples asked for of each of two cells; three of the first are there, one of them failed."""
    asked = {cell.folder: {"samples": 5, "names": cell.names, "config": cell.config} for cell in CELLS}
    manifest = Manifest("table9")
    manifest.add(asked, {"qa_1": "no texts"}, ["qa_1"])
    write_manifest(tmp_path, manifest)
    store = Store(tmp_path).cell(CELLS[0])
    store.begin({})
    for number in range(2):
        store.append(row(number))
    store.append(row(2, TRACE))
    return tmp_path


def row(number: int, error: str | None = None) -> dict[str, Any]:
    ok = {} if error else {"score": 0.5}
    return {"sample": f"{number:04d}", "status": "failed" if error else "ok", "error": error, **ok}


def counts(cell: CellStatus) -> tuple[int, int, int, int, int]:
    return cell.done, cell.running, cell.failed, cell.missing, cell.of


@contextmanager
def shard(results: Path, cells: tuple[Cell, ...], samples: list[str]) -> Iterator[Any]:
    """One that another process is at."""
    pieces = [[{"cells": [cell.folder for cell in cells], "samples": samples}]]
    (results / "shards").mkdir(exist_ok=True)
    (results / "shards" / "ab.json").write_text(json.dumps({"overrides": [], "shards": pieces}))
    code = (
        "import sys; from pathlib import Path; from structkv_bench.launch.claim import claimed\n"
        "with claimed(Path(sys.argv[1]), 'ab.0000'): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(results / "shards" / "ab" / "0000.json")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_every_sample_is_done_running_failed_or_missing(results: Path) -> None:
    first, second = status(results).experiments["table9"]
    assert counts(first) == (2, 0, 1, 2, 5)
    assert counts(second) == (0, 0, 0, 5, 5)
    assert first.errors == {"0002": TRACE}
    with shard(results, CELLS, ["0001", "0002", "0003"]) as process:
        found = status(results)
        first, second = found.experiments["table9"]
        assert counts(first) == (2, 2, 0, 1, 5)  # the failed one is tried again
        assert counts(second) == (0, 3, 0, 2, 5)
        assert found.shards[0].live
        process.kill()
        process.wait()
        found = status(results)
        assert counts(found.experiments["table9"][0]) == (2, 0, 1, 2, 5)
        assert not found.shards[0].live
        assert "ended without a word" in found.shards[0].reason


def test_a_run_in_a_single_process_is_running_too(results: Path) -> None:
    code = (
        "import sys; from structkv_bench.store import Store; from tests.test_status import CELLS\n"
        "with Store(sys.argv[1]).locked(CELLS[:1]): print('held', flush=True); input()"
    )
    root = Path(__file__).parents[1]
    command = [sys.executable, "-c", code, str(results)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        first, second = status(results).experiments["table9"]
        assert counts(first) == (2, 3, 0, 0, 5)
        assert counts(second) == (0, 0, 0, 5, 5)
        process.communicate(b"\n")


def test_a_dead_shard_is_no_news_once_others_have_done_its_work(results: Path) -> None:
    with shard(results, CELLS[:1], ["0003"]):
        pass
    assert len(status(results).shards) == 1
    for number in range(2, 5):
        Store(results, "cd.0000").cell(CELLS[0]).append(row(number))
    assert status(results).shards == []
    assert counts(status(results).experiments["table9"][0]) == (5, 0, 0, 0, 5)


def test_more_samples_than_were_asked_for_are_no_more_than_all(results: Path) -> None:
    for number in range(9):
        Store(results, "ab.0000").cell(CELLS[0]).append(row(number))
    assert counts(status(results).experiments["table9"][0]) == (5, 0, 0, 0, 5)


def test_the_text_has_the_last_line_of_a_traceback_and_the_whole_if_wanted(results: Path) -> None:
    found = as_text(status(results))
    assert found.startswith("table9: 2 of 10 done, 1 failed, 7 missing, 0 of 2 cells whole\n")
    assert "0002: ValueError: too deep" in found
    assert "x.py" not in found
    assert "left out: qa_1: no texts" in found
    assert 'File "x.py", line 1' in as_text(status(results), verbose=True)


def test_the_command_prints_text_and_json_and_imports_no_torch(results: Path, capsys: Any) -> None:
    done = command("status", "--results", str(results), code=LIGHT)
    assert (done.returncode, done.stderr) == (0, "False False\n")
    assert "too deep" in done.stdout
    assert main(["status", "--results", str(results), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [cell["done"] for cell in told["experiments"]["table9"]] == [2, 0]
    assert told["left_out"] == {"table9": {"qa_1": "no texts"}}


def test_no_runs_is_one_line(tmp_path: Path, capsys: Any) -> None:
    assert main(["status", "--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: no runs there")


@given(
    rows=st.lists(
        st.fixed_dictionaries(
            {"sample": st.text(st.characters()), "status": st.sampled_from(["ok", "failed"])},
            optional={
                "score": st.floats(0, 1),
                "prediction": st.sampled_from(['"sample": "x", "status": "ok"', "\\", '"', "}\n"]),
                "fields": st.just({"sample": "nested", "status": "ok"}),
                "zeta": st.just([{"sample": "nested", "status": "failed"}]),
                "settings": st.just(1),
            },
        ),
        max_size=4,
    ),
    torn=st.sampled_from([b"", b"{", b'{"sample": "0001", "status": "ok", "tie\n', b"\xff\n", b"[]\n"]),
)
def test_outcomes_are_those_of_the_rows_whatever_stands_in_them(
    rows: list[dict[str, Any]], torn: bytes
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder).cell(CELLS[0])
        store.begin({})
        for one in rows:
            store.append(one)
        with open(store.path / "rows.jsonl", "ab") as file:
            file.write(torn)
        known = {sample: found["status"] for sample, found in read_rows(store.path)[0].items()}
        seen = {sample: "ok" if error is None else "failed" for sample, error in outcomes(store.path).items()}
        assert seen == known


def test_a_reason_is_one_line() -> None:
    assert reason(None) == "not begun"
    assert reason(State("x", state="died", host="n1", error=TRACE)) == "died on n1: ValueError: too deep"
    assert reason(State("x", state="requeued", host="n1")) == "requeued on n1"


def test_a_plan_that_is_gone_takes_its_shards_with_it(results: Path) -> None:
    with claimed(results / "shards" / "gone" / "0000.json", "gone.0000"):
        assert status(results).shards == []
    (results / "manifests" / "table9.json").write_text("{")
    with pytest.raises(UserError, match="damaged"):
        status(results)
