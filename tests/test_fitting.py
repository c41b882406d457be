"""Memory is bounded: what goes together is chosen by its estimate, and what is split is said.

Rules protected here:
- Every cell of every job runs once, in order; neither the number of samples nor the bytes are exceeded, but
  for a cell that is too large by itself.
- A group that is split says so in one line; predictions do not change.
- Where memory does not suffice even so, the failed row names the sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from structkv_bench import batches as running
from structkv_bench import bounds, runner
from structkv_bench.bench.peak import peak_memory
from structkv_bench.bounds import Bounds
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.engine.model import Model
from structkv_bench.errors import UserError
from structkv_bench.fitting import Part, batches, peak_bytes
from structkv_bench.jobs import Job, prepare
from structkv_bench.plan import plan
from structkv_bench.store import Store
from tests.tiny import save_tiny, tiny

PLENTY = 10**12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def command(folder: Path, *more: str) -> list[str]:
    chosen = {
        "model": "custom", "model.path": str(folder), "model.name": "tiny", "method": "full,snapkv,h2o",
        "method.kv_ratio": "0.2", "task": "niah", "task.haystack": "noise", "task.lengths": "[400,1500]",
        "task.samples": "5", "task.max_new_tokens": "6",
    }  # fmt: skip
    chosen |= dict(item.split("=", 1) for item in more)
    return [f"{key}={value}" for key, value in chosen.items()]


@pytest.fixture(scope="module")
def jobs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Job]:
    store = Store(tmp_path_factory.mktemp("results"))
    return prepare(plan(compose(command(folder))), store).jobs


def peaks(jobs: list[Job]) -> list[int]:
    """Of each job by itself."""
    return [peak_bytes([Part.of(job, job.cells)]) for job in jobs]


@pytest.mark.parametrize("most", [1, 2, 4, 100])
@pytest.mark.parametrize("share", [0.5, 1.0, 1.1, 1.5, 3.0, 100.0])
def test_every_cell_runs_once_within_the_bounds(
    jobs: list[Job], capsys: Any, most: int, share: float
) -> None:
    """`share` of what the largest job needs beside the weights."""
    weights = jobs[0].model.shape.weight_bytes
    allowed = int(weights + share * (max(peaks(jobs)) - weights))
    found = list(batches(jobs, most, allowed))
    parts = list(chain.from_iterable(found))
    assert [(part.job.prompt.sample.id, cell.key) for part in parts for cell in part.cells] == [
        (job.prompt.sample.id, cell.key) for job in jobs for cell in job.cells
    ]
    assert [part.job for part in parts if part.ends_job] == jobs
    for batch in found:
        assert len(batch) <= most
        assert peak_bytes(batch) <= allowed or len(batch) == len(batch[0].cells) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == sum(peak > allowed for peak in (peaks(jobs)[0], peaks(jobs)[-1]))


def test_batches_are_as_large_as_they_may_be(jobs: list[Job]) -> None:
    """With memory for all, the number of samples decides; else the bytes do."""
    assert [len(batch) for batch in batches(jobs, 4, PLENTY)] == [4, 4, 2]
    one = jobs[:1] * 6
    allowed = peak_bytes([Part.of(job, job.cells) for job in one[:3]])
    assert [len(batch) for batch in batches(one, 100, allowed)] == [3, 3]
    assert [len(batch) for batch in batches(one, 100, allowed - 1)] == [2, 2, 2]


def test_a_batchs_estimate_is_a_bound_on_its_measured_memory(jobs: list[Job]) -> None:
    """Prefills one after another while caches wait, then one decode for all."""
    model = tiny().model
    model.stop_ids = frozenset()
    parts = [Part.of(job, job.cells) for job in [*jobs[:3], *jobs[-3:]]]
    orders = [
        running.Order(part.job.prompt.sample, part.cells, [cell.method for cell in part.cells])
        for part in parts
    ]
    with peak_memory(torch.device("cpu"), model.weight_bytes) as measured:
        found = running.run_batch(model, orders)
    assert {len(row["generated_ids"]) for rows in found for row in rows} == {6}
    beside = measured.bytes - model.weight_bytes
    assert 1 <= (peak_bytes(parts) - model.weight_bytes) / beside < 1.3


def rows(results: Path) -> dict[str, list[Any]]:
    return {
        file.parent.name: [
            (row["sample"], row["status"], row.get("generated_ids"), row.get("kept_entries"))
            for row in map(json.loads, file.read_text().splitlines())
        ]
        for file in results.glob("*/rows.jsonl")
    }


def test_a_group_that_is_split_says_so_once_and_predicts_the_same(
    folder: Path, tmp_path: Path, jobs: list[Job], capsys: Any
) -> None:
    allowed = max(peaks(jobs)) - 1
    assert main(["run", *command(folder, f"results_dir={tmp_path / 'whole'}", "group.max_bytes=9e9")]) == 0
    assert "group.max_bytes" not in capsys.readouterr().err
    split = [f"results_dir={tmp_path / 'split'}", f"group.max_bytes={allowed}", "decode.batch=3"]
    assert main(["run", *command(folder, *split)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "group.max_bytes" in line]
    assert len(lines) == 1
    assert lines[0].startswith("tiny on niah_noise at 1500: 3 cells take ")
    assert lines[0].endswith("are allowed (group.max_bytes): in 2 groups")
    assert rows(tmp_path / "whole") == rows(tmp_path / "split")


def test_a_cell_too_large_alone_is_tried_and_its_failure_names_the_sizes(
    folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other samples, and the other cells of the sample, are as they would be."""
    embed = Model.embed

    def too_small(self: Model, ids: Any) -> Any:
        if ids.shape[1] > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTry less")
        return embed(self, ids)

    monkeypatch.setattr(Model, "embed", too_small)
    chosen = command(folder, f"results_dir={tmp_path}", "group.max_bytes=1MiB", "method=full,snapkv")
    assert main(["run", *chosen]) == 1
    err = capsys.readouterr().err
    assert "in 2 groups; tried although too large alone: full, snapkv" in err
    found = rows(tmp_path)
    assert {(len(its), its[0][1]) for name, its in found.items() if ".400." in name} == {(5, "ok")}
    assert {(len(its), its[0][1]) for name, its in found.items() if ".1500." in name} == {(5, "failed")}
    [row, *_] = map(json.loads, next(tmp_path.glob("tiny.full*.1500.*/rows.jsonl")).read_text().splitlines())
    *_, before, last = row["error"].splitlines()
    assert before == "Try less"
    assert last.startswith(f"out of memory: {row['prompt_tokens']} prompt tokens take about ")
    assert last.endswith("MiB, 1.0 MiB were allowed")


def test_a_bound_that_the_weights_alone_exceed_is_refused(folder: Path, tmp_path: Path, capsys: Any) -> None:
    chosen = command(folder, f"results_dir={tmp_path}", "group.max_bytes=100KiB")
    for launcher in ([], ["launcher.processes=2"]):
        assert main(["run", *chosen, *launcher]) == 2
        err = capsys.readouterr().err
        assert "group.max_bytes: 0.1 MiB are given, and the weights of tiny alone take 0.6 MiB" in err
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize(
    ("given", "size"),
    [("2e9", 2 * 10**9), ("2000000000", 2 * 10**9), ("2GiB", 2 * 2**30), ("1.5GB", 15 * 10**8), ("7", 7)],
)
def test_bytes_are_a_number_or_a_size(given: str, size: int) -> None:
    assert compose([f"group.max_bytes={given}"])[0].bounds == Bounds(1, size)
    assert Bounds(1, size).allowed(None) == size


@pytest.mark.parametrize("processes", [1, 3])
def test_without_a_limit_nine_tenths_of_what_is_free_is_for_all_processes(
    monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(bounds, "free_bytes", lambda device_map: 1000)
    assert Bounds(processes=processes).allowed(None) == 900 // processes
    monkeypatch.setattr(bounds, "free_bytes", lambda device_map: None)
    assert Bounds().allowed(None) > PLENTY


def test_a_control_group_that_is_smaller_than_the_machine_limits_it(tmp_path: Path) -> None:
    """Its own limit, or that of one around it; pages of files count as free; no limit is none."""
    inner = tmp_path / "slurm" / "job_1"
    inner.mkdir(parents=True)
    for group, limit in ((tmp_path, "max"), (tmp_path / "slurm", "5000"), (inner, "4000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("1000\n")
        (group / "memory.stat").write_text("anon 700\ninactive_file 300\nactive_file 0\n")

    def left(path: str) -> list[int]:
        return list(bounds._left(tmp_path, path, "memory.max", "memory.current"))

    assert left("/slurm/job_1") == [3300, 4300]
    assert left("/not/seen/from/here") == left("/") == []


def test_what_is_free_here_is_found() -> None:
    free: Iterator[int] = bounds._cpu_bytes()
    assert 2**20 < min(free) < 2**50


def test_the_bounds_reach_the_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As typed, or from an experiment's file; and they are no part of a cell."""
    found = []

    def execute(jobs: list[Job], store: Store, bounds: Bounds) -> Iterator[Any]:
        found.append((bounds, jobs[0].cells[0].key))
        yield from ()

    monkeypatch.setattr(runner, "execute", execute)
    for more in (["decode.batch=16", "group.max_bytes=1GB"], []):
        runner.run(compose(command(folder, f"results_dir={tmp_path}", *more)))
    assert [one for one, _ in found] == [Bounds(16, 10**9), Bounds()]
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        *((f"decode.batch={value}", "a whole number of samples, at least 1")
          for value in ("0", "-2", "1.5", "many", "true", "null", "[4]")),
        *((f"group.max_bytes={value}", "such as 2e9 or 2GiB")
          for value in ("0", "-1", "2.3.4", "many", "true", "[4]", "inf", "2PiB")),
        ("decode.batch=1,2", "give one number"),
        ("decode.bach=2", "did you mean decode.batch?"),
        ("decode=2", "decode.batch"),
        ("group=2", "group.max_bytes"),
    ],
)  # fmt: skip
def test_no_such_bound_is_one_line(wrong: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        compose([wrong])
    assert says in str(refused.value)
    assert wrong.partition("=")[0] in str(refused.value)
