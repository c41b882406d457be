"""After a fault the same command makes the rows of an undisturbed run: none twice, none lost, none another.

Rules protected here:
- Cells that share a prefill keep each other's company: a sample whose rows were torn apart by a kill runs
  again as it ran, and what is there is neither written nor counted again.
- The drills of scripts/fault_drills.py end well on a small scale, and notice what they are there for.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import runner
from structkv_bench.batches import Order
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.engine.model import Model
from structkv_bench.jobs import prepare
from structkv_bench.plan import plan
from structkv_bench.store import ROWS_FILE, Store
from tests.runs import overrides, rows_of

ROOT = Path(__file__).resolve().parents[1]
DRILLS = ["kills", "full_disk_under_shards", "clock_set_back", "lost_node"]
"""Those without a test of their own elsewhere."""


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("whole")
    assert main(overrides(model_folder, results)) == 0
    return results


def cut(results: Path, method: str, rows: int) -> None:
    """As if the run had been killed before it wrote further rows of a cell."""
    [file] = results.glob(f"*.{method}*/{ROWS_FILE}")
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:rows]))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Samples that are computed, with the number of their cells."""
    seen: list[tuple[str, int]] = []
    run_batch = runner.run_batch

    def noting(model: Model, orders: list[Order]) -> Any:
        seen.extend((order.sample.id, len(order.cells)) for order in orders)
        return run_batch(model, orders)

    monkeypatch.setattr(runner, "run_batch", noting)
    return seen


@pytest.mark.parametrize(
    "kept", [{"full": 4, "snapkv": 3, "structkv": 3}, {"full": 1, "snapkv": 0, "structkv": 0}]
)
def test_a_kill_between_two_rows_of_a_sample_changes_neither(
    model_folder: Path, whole: Path, tmp_path: Path, computed: list[tuple[str, int]], kept: dict[str, int]
) -> None:
    assert main(overrides(model_folder, tmp_path)) == 0
    for method, rows in kept.items():
        cut(tmp_path, method, rows)
    computed.clear()
    assert main(overrides(model_folder, tmp_path)) == 0
    assert rows_of(tmp_path) == rows_of(whole)
    assert computed == [(f"{sample:04d}", 3) for sample in range(min(kept.values()), 5)]


def test_a_cell_that_is_asked_for_later_makes_no_other_run_again(
    model_folder: Path, tmp_path: Path, computed: list[tuple[str, int]]
) -> None:
    assert main(overrides(model_folder, tmp_path, "method=full")) == 0
    computed.clear()
    assert main(overrides(model_folder, tmp_path, "method=full,snapkv")) == 0
    assert computed == [(f"{sample:04d}", 1) for sample in range(5)]


def test_what_runs_for_the_others_sake_is_known_by_its_key(model_folder: Path, tmp_path: Path) -> None:
    assert main(overrides(model_folder, tmp_path)) == 0
    cut(tmp_path, "snapkv", 4)
    work = prepare(plan(compose(overrides(model_folder, tmp_path)[1:])), Store(tmp_path))
    [job] = work.jobs
    assert [cell.method_name for cell in job.cells] == ["full", "snapkv", "structkv"]
    assert job.there == {cell.key for cell in job.cells if cell.method_name != "snapkv"}


def test_the_drills_end_well(model_folder: Path, tmp_path: Path) -> None:
    """Real processes, killed; a disk that is really full."""
    model = f"model=custom model.path={model_folder} model.name=tiny"
    command = [
        sys.executable,
        str(ROOT / "scripts" / "fault_drills.py"),
        *DRILLS,
        "--quick",
        "--model",
        model,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(";")[0] for line in done.stdout.splitlines()] == [
        f"{drill}: equal rows" for drill in DRILLS
    ]


CHANGES = {
    "are lost": lambda lines: lines[:-1],
    "are there twice": lambda lines: [*lines, lines[0]],
    "sample 0000: ": lambda lines: [
        lines[0].replace(b'"kept_entries": [', b'"kept_entries": [1, '),
        *lines[1:],
    ],
    "": lambda lines: [lines[0].replace(b'"decode_s": ', b'"decode_s": 1'), *lines[1:]],
}


@pytest.mark.parametrize("says", CHANGES)
def test_a_drill_notices_a_row_that_is_lost_there_twice_or_another(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from drill_runs import Drill, DrillError, rows_of

    drill = Drill([], rows_of(whole), 0, 0)
    for file in whole.glob(f"*/{ROWS_FILE}"):
        lines = file.read_bytes().splitlines(keepends=True)
        (tmp_path / file.parent.name).mkdir()
        changed = CHANGES[says](lines) if ".snapkv" in file.parent.name else lines
        (tmp_path / file.parent.name / ROWS_FILE).write_bytes(b"".join(changed))
    if says:
        with pytest.raises(DrillError, match=says):
            drill.check(tmp_path, 5)
    else:
        assert drill.check(tmp_path, 5) == 15
