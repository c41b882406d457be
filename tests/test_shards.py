"""Work in shards: the same cut every time, nothing twice or left out, and about equal parts."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.jobs import Job, Work, prepare
from structkv_bench.launch.shards import costs, cut, flops, make_plan, read_plan, shard_count
from structkv_bench.plan import Group, plan
from structkv_bench.shape import ModelShape
from structkv_bench.store import Store
from tests.tiny import save_tiny

SHAPE = ModelShape(
    layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336, vocabulary=128256,
    max_positions=131072, itemsize=2,
)  # fmt: skip


def group(*overrides: str) -> Group:
    [one] = plan(compose([*overrides, "task.lengths=[4096]"]))
    return one


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    model = save_tiny(tmp_path_factory.mktemp("model"))
    groups = plan(
        compose([
            "model=custom", f"model.path={model}", "method=full,snapkv", "method.kv_ratio=0.2,0.4",
            "task=niah", "task.haystack=noise", "task.lengths=[700,1400,2100]", "task.samples=7",
        ])
    )  # fmt: skip
    return prepare(groups, Store(tmp_path_factory.mktemp("results")))


def names(jobs: list[Job]) -> list[tuple[str, str]]:
    return [(cell.folder, job.prompt.sample.id) for job in jobs for cell in job.group.cells]


@pytest.mark.parametrize("count", [1, 2, 5, 21, 100])
def test_every_sample_of_every_cell_is_in_one_shard_in_order(work: Work, count: int) -> None:
    shards = cut(work.asked, costs(work.asked), count)
    assert [job for shard in shards for job in shard] == work.asked
    assert min(count, 10) <= len(shards) <= min(count, 21)
    assert all(shards)


@given(
    work=st.lists(st.floats(1, 100), min_size=1, max_size=60),
    count=st.integers(1, 70),
)
def test_shards_differ_from_an_equal_part_by_a_job_at_most(work: list[float], count: int) -> None:
    jobs = [object() for _ in work]
    cost = dict(zip(map(id, jobs), work, strict=True))
    shards = cut(jobs, work, count)  # type: ignore[arg-type]
    assert [job for shard in shards for job in shard] == jobs
    assert all(shards)
    for shard in shards:
        its = sum(cost[id(job)] for job in shard)
        assert its <= sum(work) / count + max(cost[id(job)] for job in shard) * (1 + 1e-9)


def test_the_cut_does_not_depend_on_what_is_done(work: Work, tmp_path: Path) -> None:
    done = [replace(job, cells=[]) for job in work.asked[:5]] + work.asked[5:]
    plans = [
        make_plan(cut(jobs, costs(jobs), 4), ["task=niah", "launcher=slurm", "launcher.cpus=2"], tmp_path)
        for jobs in (work.asked, done)
    ]
    assert plans[0] == plans[1]
    assert plans[0].overrides == ["task=niah"]


def test_bounds_are_carried_but_name_no_plan(work: Work, tmp_path: Path) -> None:
    """What is queued goes on with the bounds of the latest command; nothing is queued twice."""
    shards = cut(work.asked, costs(work.asked), 4)
    bounded = ["task=niah", "decode.batch=16", "group.max_bytes=2e9"]
    plans = [make_plan(shards, some, tmp_path) for some in (["task=niah"], bounded)]
    assert plans[0].file == plans[1].file
    assert read_plan(plans[0].file).overrides == bounded
    assert make_plan(shards, ["task=ruler"], tmp_path).file != plans[0].file


def test_a_plan_comes_back_as_it_was_and_holds_every_sample_once(work: Work, tmp_path: Path) -> None:
    made = make_plan(cut(work.asked, costs(work.asked), 4), ["task=niah"], tmp_path)
    assert read_plan(made.file) == made
    assert made.results_dir == tmp_path
    found = Counter(
        (cell, sample)
        for shard in made.shards
        for piece in shard
        for cell in piece.cells
        for sample in piece.samples
    )
    assert found == Counter(names(work.asked))
    assert len({made.name(number) for number in range(4)}) == 4


def test_no_plan_and_a_damaged_one_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no plan of shards there"):
        read_plan(tmp_path / "none.json")
    for text in ("{", "{}", json.dumps({"overrides": [], "shards": [[{"cells": []}]]})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match="damaged"):
            read_plan(tmp_path / "bad.json")


def test_longer_prompts_cost_more_and_a_second_method_little() -> None:
    full, snapkv, both = group("method=full"), group("method=snapkv"), group("method=full,snapkv")
    assert flops(full, SHAPE, 8192, 1) > 2 * flops(full, SHAPE, 4096, 1)
    assert flops(snapkv, SHAPE, 4096, 32) < flops(full, SHAPE, 4096, 32)
    assert flops(full, SHAPE, 4096, 32) < flops(both, SHAPE, 4096, 32) < 1.1 * flops(full, SHAPE, 4096, 32)


def test_a_method_that_drops_tokens_pays_for_its_own_way_beside_the_others() -> None:
    dropping = group("method=structkv", "method.pivot=13")
    both = group("method=full,structkv", "method.pivot=13")
    alone, full = flops(dropping, SHAPE, 4096, 1), flops(group("method=full"), SHAPE, 4096, 1)
    assert alone < full < flops(both, SHAPE, 4096, 1) < alone + full


def test_costs_grow_with_the_tokens_within_a_group(work: Work) -> None:
    found = costs(work.asked)
    assert found[0] < found[7] < found[14]
    assert found[7] > 1.9 * found[0]


@pytest.mark.parametrize(("seconds", "count"), [(1, 10), (2.5, 4), (3, 4), (100, 1), (0.01, 10)])
def test_shards_are_as_many_as_the_time_asks_for(seconds: float, count: int) -> None:
    assert shard_count([2e12] * 10, seconds, 2e12) == count
