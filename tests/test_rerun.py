"""The commands that make stored cells again.

Rules protected here:
- They make exactly the same cells, whatever these were typed like, and equal rows.
- What the code here does not make any more, or other code has made, is said.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import rerun
from structkv_bench.catalog import choices
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.engine.method import Budgeted, Compressor
from structkv_bench.origin import Made
from structkv_bench.plan import Cell, plan
from structkv_bench.rerun import again, cautions
from tests.every_method import EVERY, but
from tests.runs import overrides, rows_of
from tests.tiny import save_tiny

PLUGIN = f"{__name__}.Plugin"


@dataclass(frozen=True)
class Plugin(Budgeted):
    """A method of the user's."""

    name: str = "a, b"
    parts: tuple[int, ...] = ()

    def compressor(self, prompt_tokens: int, layers: int) -> Compressor:
        return Compressor()


def made(*asked: str) -> list[Made]:
    """Cells as if they had been run."""
    return [_made(cell) for group in plan(compose(list(asked))) for cell in group.cells]


def _made(cell: Cell) -> Made:
    about = {"key": cell.key, "names": cell.names, "config": cell.config, "sessions": []}
    return Made(Path(cell.folder), json.loads(json.dumps(about)), cell.task.samples)


def made_by(commands: list[str]) -> dict[str, int]:
    """Cells of the commands, by folder, each with its samples."""
    found = [
        cell for line in commands for group in plan(compose(shlex.split(line)[2:])) for cell in group.cells
    ]
    assert len({cell.folder for cell in found}) == len(found)
    return {cell.folder: cell.task.samples for cell in found}


def check(cells: list[Made], commands: int | None = None) -> list[str]:
    """The commands, which make these cells and no others."""
    found = again(cells, "results/rerun")
    assert found.refused == []
    assert made_by(found.commands) == {cell.folder.name: cell.samples for cell in cells}
    assert commands is None or len(found.commands) == commands
    return found.commands


@pytest.mark.parametrize(
    ("protocol", "task"), [*(("official", task) for task in choices("task")), ("paper", "ruler")]
)
def test_every_method_on_every_task_is_one_command(protocol: str, task: str) -> None:
    methods = ",".join(EVERY)
    check(made(f"method={methods}", f"task={task}", f"protocol={protocol}", "task.samples=3"), commands=1)


@pytest.mark.parametrize("name", EVERY)
def test_every_method_alone_with_settings_of_its_own(name: str) -> None:
    changed = but(EVERY[name], kv_ratio=0.37, budget=99, struct_ratio=0.21, window=5)
    own = [f"method.{key}={value}" for key, value in vars(changed).items() if value != vars(EVERY[name])[key]]
    for cell in made(f"method={name}", *own, "task.lengths=[4096,128]"):
        check([cell], commands=1)


EXPERIMENTS = {"quickstart": 1, "table2": 1, "fig6": 1, "fig3": None}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_grids_of_an_experiment_are_found_again(experiment: str) -> None:
    check(made(f"experiment={experiment}"), EXPERIMENTS[experiment])


def test_cells_that_are_no_grid_take_several_commands() -> None:
    runs = (
        ("method=snapkv", "method.kv_ratio=0.1", "task.lengths=[1024]"),
        ("method=snapkv", "method.kv_ratio=0.2", "task.lengths=[2048]"),
        ("method=full", "task.lengths=[1024,2048]"),
        ("method=full", "task.lengths=[1024]", "task.samples=3", "task.seed=1"),
    )
    check([cell for asked in runs for cell in made(*asked)], commands=4)


ODD = [
    ("model=custom", 'model.path="/tmp/ünd \'so\', \\"x\\" {y} [1]"', "model.dtype=bfloat16", "method=full"),
    ("model=smollm2_135m", "model.path=null_of/me", "method=full"),
    ("model=llama3_1_8b", "model.device_map=null", "model.name=1e5", "method=full"),
    ("method=structkv", "method.pivot=13"),
    ("method=structkv", "method.pivot=13,online,calibrated", "method.struct_ratio=1"),
    ("method=full", "task.template='{context}, then: {question}'"),
    ("method=snapkv", f"method._target_={PLUGIN}", "method.kv_ratio=0.3", 'method.name="x: {y}, z"'),
    ("method=full", f"method._target_={PLUGIN}", "method.kv_ratio=0.3,0.4"),
    ("method=full", "task=ruler", "task.subset=[vt]", "task.samples=7"),
    ("method=full", "task=longbench", "task.subset=[e]", "task.source=some.zip", "task.truncation=ids"),
]


@pytest.mark.parametrize("asked", ODD, ids=range(len(ODD)))
def test_any_setting_survives(asked: tuple[str, ...]) -> None:
    check(made(*asked))


def test_what_conf_has_need_not_be_typed() -> None:
    [line] = check(made("method=snapkv", "task.lengths=[2048]", "task.samples=10"))
    assert line == (
        "structkv-bench run model=smollm2_135m method=snapkv task=niah 'task.lengths=[2048]' "
        "task.samples=10 protocol=official results_dir=results/rerun"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"method": {"_target_": "structkv_bench.methods.snapkv.SnapKV", "colour": 1}},
            "method.colour: no such",
        ),
        ({"method": {"_target_": "my_own.Mine"}}, "does not make this cell any more"),
        ({"protocol": "0"}, "does not make this cell any more: it makes one with another protocol"),
    ],
)
def test_a_cell_that_the_code_here_does_not_make_is_named_and_the_others_are_made(
    change: dict[str, Any], says: str
) -> None:
    cells = made("method=snapkv", "task.lengths=[64,128]")
    cells[0].about["config"].update(change)
    cells[0].about["key"] = "0" * 16
    found = again(cells, "results/rerun")
    [line] = found.refused
    assert line.startswith(f"{cells[0].folder.name}: ")
    assert says in line
    assert made_by(found.commands) == {cells[1].folder.name: 10}


def test_a_cell_of_another_calibration_is_said_to_be_one() -> None:
    cells = made("method=compresskv", "task.lengths=[64]")
    cells[0].about["config"]["method"]["calibration_sha256"] = "0" * 16
    cells[0].about["key"] = "0" * 16
    [line] = again(cells, "results/rerun").refused
    assert line.endswith("it makes one with another method.calibration_sha256")


HERE = {"commit": "c" * 40, "dirty": False, "diff": None}
OTHER = {"commit": "d" * 40, "dirty": False, "diff": None}
CHANGED = HERE | {"dirty": True, "diff": "0" * 16}


@pytest.mark.parametrize(
    ("git", "here", "says"),
    [
        (HERE, HERE, None),
        (CHANGED, CHANGED, None),
        ({"commit": "c" * 40, "dirty": False}, HERE, None),  # as it was recorded before there was a diff
        (OTHER, HERE, f"made by commit {'d' * 40}; git checkout {'d' * 40} first, and ask again there"),
        (OTHER, None, f"made by commit {'d' * 40}; git checkout {'d' * 40} first, and ask again there"),
        (OTHER | {"dirty": True}, HERE, "and changes to it, which are not stored; git checkout"),
        (CHANGED, HERE, f"made by commit {'c' * 40} and changes to it, which are not stored"),
        (HERE, CHANGED, "the source here has changes, git stash them first"),
        (None, HERE, "not run from a checkout: no commit is known that made the rows"),
        (None, None, "not run from a checkout: no commit is known that made the rows"),
    ],
)
def test_code_that_is_not_the_code_here_is_said(
    monkeypatch: pytest.MonkeyPatch, git: Any, here: Any, says: str | None
) -> None:
    monkeypatch.setattr(rerun, "source", lambda: here)
    said = cautions([by({"git": git}), by({"git": git}, {"git": git})])
    if says is None:
        assert said == []
        return
    [line] = said
    assert line.startswith("2 of 2 cells: ")
    assert says in line


def by(*sessions: dict[str, Any]) -> Made:
    [cell] = made("method=full", "task.lengths=[64]")
    cell.about["sessions"].extend(sessions)
    return cell


def test_each_state_of_the_code_is_said_once_with_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows whose cell.json was lost nothing is known."""
    monkeypatch.setattr(rerun, "source", lambda: HERE)
    said = cautions([by({"git": HERE}, {"git": OTHER}), by({"git": OTHER}), by({"model": {}})])
    assert [line.partition(" cells: ")[0] for line in said] == ["2 of 3", "1 of 3"]
    assert said[1].endswith("what made the rows was lost with their cell.json")


def test_the_command_makes_equal_rows(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where full runs beside a method, which its fidelity is measured against."""
    monkeypatch.chdir(tmp_path)
    save_tiny(tmp_path / "a model")
    asked = overrides(
        Path("./a model"), Path("first"), "method=snapkv,full,structkv", "method.kv_ratio=0.2,0.4"
    )
    assert main(asked) == 0
    capsys.readouterr()
    assert main(["provenance", "first", "--rerun", "--into", "se cond"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    for line in lines:
        assert main(shlex.split(line)[1:]) == 0
    assert rows_of(tmp_path / "se cond") == rows_of(tmp_path / "first")
    assert len(rows_of(tmp_path / "first")) == 5
