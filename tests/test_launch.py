"""Runs in several processes on this machine: the rows of one process, whatever happens to some of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from structkv_bench import runner
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.launch import slurm, worker
from structkv_bench.launch import start as launch
from structkv_bench.launch.settings import LocalLauncher, SlurmLauncher
from structkv_bench.launch.shards import Plan
from structkv_bench.store import read_rows
from tests.runs import MEASURED, overrides

SLURM = ["launcher=slurm", "launcher.gpus=0"]


def rows(results: Path) -> dict[str, dict[str, Any]]:
    """Merged rows per cell and sample, without what is measured."""
    return {
        folder.name: {
            sample: {key: value for key, value in row.items() if key not in MEASURED}
            for sample, row in sorted(read_rows(folder)[0].items())
        }
        for folder in sorted(results.glob("tiny*"))
    }


@pytest.fixture(scope="module")
def expected(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("whole")
    assert main(overrides(model_folder, results)) == 0
    return rows(results)


def plan_of(results: Path) -> Path:
    [file] = results.glob("shards/*.json")
    return file


def test_processes_make_the_rows_of_one(
    model_folder: Path, tmp_path: Path, expected: dict[str, Any], capsys: Any
) -> None:
    capsys.readouterr()
    assert main(overrides(model_folder, tmp_path, "launcher.processes=2")) == 0
    assert "structkv" in capsys.readouterr().out
    assert rows(tmp_path) == expected
    assert len(list(tmp_path.glob("*/rows.*.jsonl"))) == 2 * 3
    assert main(["results", "--results", str(tmp_path)]) == 0
    assert main(overrides(model_folder, tmp_path)) == 0  # nothing is left for a whole run
    assert not list(tmp_path.glob("*/rows.jsonl"))


@pytest.fixture
def waiting(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plan of a run that has been cut into two shards and not begun."""
    monkeypatch.setattr(launch, "_local", lambda plan, left: 0)
    assert main([*overrides(model_folder, tmp_path, "launcher.processes=2")]) in (0, 2)
    return plan_of(tmp_path)


def test_any_shard_can_be_done_by_itself_and_again(waiting: Path, expected: dict[str, Any]) -> None:
    """The same command makes the same plan; a shard that is done is done."""
    results = waiting.parents[1]
    assert main(["work", str(waiting), "1"]) == 0
    half = rows(results)
    assert [len(cell) for cell in half.values()] == [3] * 3
    files = {file: file.read_bytes() for file in results.glob("*/rows.*.jsonl")}
    assert main(["work", str(waiting), "1"]) == 0
    assert {file: file.read_bytes() for file in results.glob("*/rows.*.jsonl")} == files
    assert main(["work", str(waiting), "0"]) == 0
    assert rows(results) == expected
    sessions = [json.loads(file.read_text())["sessions"] for file in results.glob("*/cell.*.0001.json")]
    assert all(session[0]["shard"] == f"{waiting.stem}.0001" for session in sessions)
    assert all("launcher.processes=2" not in session[0]["command"] for session in sessions)


@pytest.mark.parametrize(("number", "says"), [("2", "has shards 0 to 1"), ("-1", "has shards 0 to 1")])
def test_no_such_shard(waiting: Path, capsys: Any, number: str, says: str) -> None:
    assert main(["work", str(waiting), "--", number]) == 2
    assert says in capsys.readouterr().err


def test_a_signal_ends_a_shard_after_the_sample_at_hand(
    waiting: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batch = runner.run_batch

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return run_batch(*arguments)

    results = waiting.parents[1]
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_batch", interrupted)
        with pytest.raises(SystemExit) as stopped:
            worker.work(str(waiting), 0)
    assert stopped.value.code == worker.REQUEUED
    assert signal.getsignal(signal.SIGUSR1) == before
    assert [len(cell) for cell in rows(results).values()] == [1] * 3
    assert json.loads((waiting.with_suffix("") / "0000.json").read_text())["state"] == "stopped"
    for number in ("0", "1"):
        assert main(["work", str(waiting), number]) == 0
    assert rows(results) == expected


def test_a_signal_ends_a_shard_after_the_batch_at_hand(
    model_folder: Path, tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its rows are on disk; and a plan carries the bounds of its command."""
    monkeypatch.setattr(launch, "_local", lambda plan, left: 0)
    bounds = ["decode.batch=2", "group.max_bytes=1GB"]
    assert main([*overrides(model_folder, tmp_path, "launcher.processes=2"), *bounds]) in (0, 2)
    run_batch, file, sizes = runner.run_batch, plan_of(tmp_path), []

    def interrupted(model: Any, orders: list[Any]) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        sizes.append(len(orders))
        return run_batch(model, orders)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_batch", interrupted)
        with pytest.raises(SystemExit):
            worker.work(str(file), 1)
    assert sizes == [2]
    assert [len(cell) for cell in rows(tmp_path).values()] == [2] * 3
    state = json.loads((file.with_suffix("") / "0001.json").read_text())
    assert (state["state"], state["done"], state["of"]) == ("stopped", 2, 3)
    for number in ("0", "1"):
        assert main(["work", str(file), number]) == 0
    assert {name: set(its) for name, its in rows(tmp_path).items()} == {
        name: set(its) for name, its in expected.items()
    }


def test_a_shard_that_dies_leaves_its_traceback_and_its_siblings_alone(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    process = launch._process

    def sabotaged(plan: Plan, number: int, *more: int) -> Any:
        with monkeypatch.context() as patch:
            if number == 1:
                patch.setenv("SLOW_DIES", "1")
            return process(plan, number, *more)

    folder = str(Path(__file__).parent / "slurm")
    monkeypatch.setenv("PYTHONPATH", folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(launch, "_process", sabotaged)
    own = ["method=full", "method._target_=slow_method.Slow", "launcher.processes=2"]
    assert main(overrides(model_folder, tmp_path, *own)) == 1
    err = capsys.readouterr().err
    assert ".0001: died on " in err
    assert "ZeroDivisionError: told to die" in err
    assert main(["status", "--results", str(tmp_path), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "run: 2 of 5 done, 3 missing" in out
    assert "Traceback (most recent call last)" in out


def test_a_process_that_is_killed_costs_its_unfinished_samples_alone(
    model_folder: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    chosen = overrides(model_folder, tmp_path, "launcher.processes=2")
    command = [sys.executable, "-m", "structkv_bench", *chosen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        until = time.monotonic() + 60
        while not list(tmp_path.glob("*/rows.*.0000.jsonl")) and time.monotonic() < until:
            time.sleep(0.01)
        state = json.loads(next(tmp_path.glob("shards/*/0000.json")).read_text())
        os.kill(state["pid"], signal.SIGKILL)
        _, err = parent.communicate()
    if "ended without a word" in err:  # else it was quicker than the kill
        assert parent.returncode == 1
        assert main(chosen) == 0
    assert rows(tmp_path) == expected


def test_each_process_has_a_gpu_of_its_own_or_a_share_of_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan(tmp_path / "shards" / "ab.json", [], [[], [], []])
    plan.folder.mkdir(parents=True)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, env, **_: started.append(env))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    for place in range(3):
        launch._process(plan, place, place, 3)
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["4", "7", "4"]
    assert {env["OMP_NUM_THREADS"] for env in started} == {"3"}


def test_a_shard_that_is_being_run_is_not_started_again(
    waiting: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_is_live", lambda plan, number: number == 1)
    assert main(overrides(model_folder, waiting.parents[1], "launcher.processes=2")) == 2
    assert "another run is adding rows" in capsys.readouterr().err


def test_without_slurm_it_is_one_line(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(overrides(model_folder, tmp_path, *SLURM)) == 2
    err = capsys.readouterr().err
    assert "no srun on this machine's PATH" in err
    assert err.count("\n") == 1


def test_a_time_limit_too_small_for_one_sample_is_refused_before_anything_is_written(
    model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    slow = ["launcher.tflops=1e-9", "launcher.time_limit=3"]
    assert main(overrides(model_folder, tmp_path, *SLURM, *slow)) == 2
    err = capsys.readouterr().err
    assert "launcher.time_limit=3: the longest batch is estimated at" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_settings_become_arguments_of_sbatch(tmp_path: Path) -> None:
    given = ["launcher.mem=64G", 'launcher.sbatch=["--qos=high","--exclusive"]', "launcher.account=us"]
    launcher = compose(["method=full", "launcher=slurm", *given])[0].launcher
    assert isinstance(launcher, SlurmLauncher)
    found = slurm.parameters(Plan(tmp_path / "ab.json", [], []), launcher)
    own = {"requeue": True, "qos": "high", "exclusive": True, "mem": "64G"}
    assert found["additional_parameters"] == own
    assert (found["account"], found["gpus_per_node"], found["time"]) == ("us", 1, 120)


MISTAKES = {
    "launcher=slrm": "did you mean slurm?",
    "launcher=local,slurm": "launcher: give one",
    "launcher.processes=1,2": "launcher: give one",
    "launcher.processes=0": "launcher.processes=0: give at least 1",
    "launcher.partition=gpu": "launcher.partition: no such setting of local",
    "launcher=slurm launcher.cpus=0": "launcher.cpus=0: give at least 1",
    "launcher=slurm launcher.minutes=0": "launcher.minutes=0.0: give a number above 0",
    "launcher=slurm launcher.shards=0": "launcher.shards=0: give at least 1",
    "launcher=slurm launcher.time_limit=2 launcher.notice=120": "give fewer seconds than time_limit=2 has",
    "launcher=slurm launcher.sbatch=qos": "give arguments such as --qos=high",
}


@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_is_one_line(wrong: str, capsys: Any) -> None:
    assert main(["run", "method=full", *wrong.split()]) == 2
    err = capsys.readouterr().err
    assert MISTAKES[wrong] in err
    assert err.count("\n") == 1


def test_the_commands_of_the_page_about_slurm_compose() -> None:
    page = (Path(__file__).parents[1] / "docs" / "slurm.md").read_text()
    commands = re.findall(r"^structkv-bench run .*$", page, re.MULTILINE)
    assert len(commands) >= 4
    for command in commands:
        assert compose(shlex.split(command)[2:])


def test_a_launcher_is_no_part_of_a_cell() -> None:
    from structkv_bench.plan import plan

    here, there = (
        plan(compose(["method=full", *more])) for more in ([], ["launcher=slurm", "launcher.cpus=8"])
    )
    assert here == there
    assert compose(["method=full"])[0].launcher == LocalLauncher()


def test_launchers_are_listed(capsys: Any) -> None:
    assert main(["list", "launchers"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["local", "slurm"]
