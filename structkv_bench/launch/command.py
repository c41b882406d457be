"""The commands around runs in shards."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class StatusFormat(StrEnum):
    """How a status is printed."""

    TEXT = "text"
    JSON = "json"


def status(
    results_dir: Annotated[Path, typer.Option("--results", help="Results folder.")] = Path("results/runs"),
    format: Annotated[StatusFormat, typer.Option(help="How to print it.")] = StatusFormat.TEXT,
    verbose: Annotated[bool, typer.Option(help="Also cells that are done, and whole tracebacks.")] = False,
) -> None:
    """Print how far the runs are: what is done, running, failed and missing in each cell."""
    from structkv_bench.launch import status as told

    found = told.status(results_dir)
    print(told.as_json(found) if format is StatusFormat.JSON else told.as_text(found, verbose))


def work(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="A file of RESULTS/shards.")],
    shard: Annotated[int, typer.Argument(help="Its number, from 0.")],
    processes: Annotated[int, typer.Option(help="How many share the memory, this one included.", min=1)] = 1,
) -> None:
    """Do one shard of a run, as scripts/slurm_array.sbatch does."""
    from structkv_bench.launch.worker import work as do

    raise typer.Exit(1 if do(plan_file, shard, processes) else 0)
