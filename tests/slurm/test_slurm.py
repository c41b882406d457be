"""Arrays on a real Slurm: whatever happens to a task, the merged rows equal those of a local run.

Rules protected here:
- A task that is killed costs its unfinished samples alone; the next run submits its shard alone.
- Time limit, preemption: the sample at hand is finished and the task queued again, by itself.
- `status` tells what became of a shard from the results folder.
- A plain sbatch script does the same shards.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from structkv_bench.cli import main
from structkv_bench.launch import start as launch
from tests.slurm.cluster import cluster, why_not
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
MEASURED = re.compile(rb'"(?:prefill_s|decode_s)": [-+.\deE]+, |"prefill_parts_s": {[^{}]*}, ')
Rows = dict[str, dict[str, bytes]]
SLURM = ["launcher=slurm", "launcher.gpus=0", "launcher.cpus=1"]
pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
    pytest.mark.xdist_group("slurm"),  # one cluster, whose jobs run side by side
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder)) as config:
        own = {"SLURM_CONF": str(config), "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
        own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with pytest.MonkeyPatch.context() as patch:
            for name, value in own.items():
                patch.setenv(name, value)
            patch.syspath_prepend(Path(__file__).parent)
            patch.setattr(launch, "POLL_SLURM", 0.5)
            yield


def arguments(model: Path, results: Path, *more: str) -> list[str]:
    return [
        "run", "model=custom", f"model.path={model}", "model.name=tiny", "method=full",
        "method._target_=slow_method.Slow", "method.keep=50,40", "task=niah", "task.haystack=noise",
        "task.lengths=[700]", "task.samples=12", "task.max_new_tokens=6", f"results_dir={results}", *more,
    ]  # fmt: skip


def on_slurm(model: Path, results: Path, shards: int, *more: str) -> list[str]:
    return arguments(model, results, *SLURM, f"launcher.shards={shards}", *more)


def rows(results: Path) -> Rows:
    """The lines on disk by cell and sample, each there once, without what is measured."""
    merged: Rows = {}
    for file in sorted(results.glob("tiny*/rows*.jsonl")):
        for line in file.read_bytes().splitlines():
            its = merged.setdefault(file.parent.name, {})
            sample = json.loads(line)["sample"]
            assert sample not in its
            its[sample], count = MEASURED.subn(b"", line)
            assert count == 3
    return merged


@pytest.fixture(scope="module")
def expected(slurm: None, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Rows of an undisturbed run in this process."""
    results = tmp_path_factory.mktemp("local")
    assert main(arguments(model, results)) == 0
    return rows(results)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 400) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := condition():
            return found
        time.sleep(0.1)
    pytest.fail(f"never came: {what}\n{squeue()}")


def squeue(*of: str) -> str:
    told = subprocess.run(
        ["squeue", "--noheader", "--array", *of], capture_output=True, text=True, check=False
    )
    return told.stdout


def states(results: Path) -> list[dict[str, Any]]:
    found = []
    for file in sorted(results.glob("shards/*/*.json")):
        found.append(json.loads(file.read_bytes()))
    return found


def written(results: Path, shard: int) -> int:
    """Lines in the files of a shard."""
    return sum(file.read_bytes().count(b"\n") for file in results.glob(f"*/rows.*.{shard:04d}.jsonl"))


def job_of(out: str) -> str:
    return out.partition("job ")[2].partition(":")[0]


def status(results: Path, capsys: Any) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", "--results", str(results), "--format", "json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


@pytest.fixture(scope="module")
def timed_out(slurm: None, expected: Rows, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a job that needs more than its minute; it has that while the other tests go on."""
    results = tmp_path_factory.mktemp("timed_out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW_S", "2.5")
        more = ["launcher.time_limit=1", "launcher.notice=50", "launcher.wait=false"]
        assert main(on_slurm(model, results, 1, *more)) == 0
    return results


def test_whatever_happens_to_tasks_of_an_array(
    timed_out: Path, expected: Rows, model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four shards one is killed (as for want of memory), one cancelled, one preempted, one left alone."""
    monkeypatch.setenv("SLOW_S", "1")
    assert main(on_slurm(model, tmp_path, 4, "launcher.wait=false")) == 0
    out = capsys.readouterr().out
    assert "4 shards submitted" in out
    job = job_of(out)
    assert main(on_slurm(model, tmp_path, 4, "launcher.wait=false")) == 0
    assert capsys.readouterr().out.startswith(f"job {job}: 0 shards submitted, 4 more were there already")
    wait_for(lambda: written(tmp_path, 1), "a row of shard 1")
    os.kill(states(tmp_path)[1]["pid"], signal.SIGKILL)
    wait_for(lambda: written(tmp_path, 2), "a row of shard 2")
    assert sum(cell["running"] for cell in status(tmp_path, capsys)["experiments"]["run"]) > 0
    subprocess.run(["scancel", f"{job}_2"], check=True)
    wait_for(lambda: written(tmp_path, 3), "a row of shard 3")
    subprocess.run(["scancel", "--signal=USR1", f"{job}_3"], check=True)
    wait_for(lambda: states(tmp_path)[3]["state"] == "requeued", "the requeue")
    assert 0 < states(tmp_path)[3]["done"] < 3
    wait_for(lambda: not squeue("--jobs", job), "the end of the job")

    ended = status(tmp_path, capsys)
    killed, cancelled = (shard["reason"] for shard in ended["shards"])
    assert killed.startswith("ended without a word")
    assert cancelled.startswith("stopped on ")
    for cell in ended["experiments"]["run"]:
        assert (cell["of"], cell["running"], cell["failed"]) == (12, 0, 0)
        assert 6 + 1 <= cell["done"] < 12
    kept = {file: file.read_bytes() for file in tmp_path.glob("*/rows.*.jsonl")}

    monkeypatch.setenv("SLOW_S", "0")
    capsys.readouterr()
    assert main(on_slurm(model, tmp_path, 4)) == 0
    assert "2 shards submitted" in capsys.readouterr().out
    assert rows(tmp_path) == expected
    assert all(file.read_bytes().startswith(content) for file, content in kept.items())
    assert all(cell["done"] == 12 for cell in status(tmp_path, capsys)["experiments"]["run"])


def test_a_shard_that_dies_leaves_its_traceback(
    timed_out: Path, model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_DIES", "1")
    assert main(on_slurm(model, tmp_path, 1)) == 2
    err = capsys.readouterr().err
    assert "can't be calibrated: ZeroDivisionError: told to die" in err
    assert main(["status", "--results", str(tmp_path), "--verbose"]) == 0
    out = capsys.readouterr().out
    assert "0 of 24 done, 24 missing, 0 of 2 cells whole" in out
    assert "Traceback (most recent call last)" in out


def test_the_plain_sbatch_script_does_the_same_shards(
    timed_out: Path, expected: Rows, model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    assert main(on_slurm(model, tmp_path, 2, "launcher.submit=false")) == 0
    command = shlex.split(capsys.readouterr().out)
    assert command[:2] == ["sbatch", "--array=0,1%32"]
    command[1:1] = ["--wait", "--time=5", "--cpus-per-task=1", f"--output={tmp_path}/%a.log"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    assert rows(tmp_path) == expected
    assert main(on_slurm(model, tmp_path, 2)) == 0
    assert "job" not in capsys.readouterr().out  # nothing is missing


def test_what_slurm_refuses_is_one_line_in_its_own_words(
    slurm: None, model: Path, tmp_path: Path, capsys: Any
) -> None:
    capsys.readouterr()
    assert main(on_slurm(model, tmp_path, 1, "launcher.partition=nowhere")) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "invalid partition specified: nowhere" in err


def test_a_task_that_times_out_goes_on_by_itself(timed_out: Path, expected: Rows, capsys: Any) -> None:
    """A sample took four seconds, the job had one minute; it was told to stop and came back."""
    wait_for(lambda: states(timed_out)[0]["state"] == "done", "the end")
    [log] = timed_out.glob("shards/*/*_log.err")
    assert "DUE TO JOB REQUEUE" in log.read_text() or states(timed_out)[0]["of"] < 12
    assert states(timed_out)[0]["of"] < 12
    assert rows(timed_out) == expected
