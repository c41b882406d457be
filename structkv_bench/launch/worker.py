"""One shard, done by this process: here, in a Slurm task, or by hand."""

from __future__ import annotations

import re
import signal
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from structkv_bench.config import Setup, compose
from structkv_bench.errors import UserError
from structkv_bench.launch.claim import Claim, claimed, slurm_job
from structkv_bench.launch.shards import Plan, read_plan
from structkv_bench.plan import plan
from structkv_bench.starting import uncollected
from structkv_bench.store import Store

if TYPE_CHECKING:
    from structkv_bench.jobs import Job

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Preemption and scancel; an sbatch script's notice of the time limit; submitit's notice of it."""
REQUEUED = 75
"""Exit code: stopped half-way (EX_TEMPFAIL)."""


def work(plan_file: str, number: int, processes: int = 1) -> int:
    """Do what is left of a shard; how many rows failed.

    A signal ends it after the batch at hand; within Slurm it is then queued again, unless it was cancelled.
    What goes wrong is written into the shard's state before it is raised.

    Args:
        plan_file: of the plan.
        number: of the shard, from 0.
        processes: how many of this run share this one's memory, itself included.

    Raises:
        UserError: as for a run, or there is no such shard, or another process is at it.
        SystemExit: it was stopped by a signal.
    """
    the_plan = read_plan(Path(plan_file))
    if not 0 <= number < len(the_plan.shards):
        raise UserError(f"shard {number}: {plan_file} has shards 0 to {len(the_plan.shards) - 1}")
    with claimed(the_plan.state_file(number), the_plan.name(number)) as claim, _signals() as caught:
        try:
            _do(the_plan, number, processes, claim, caught)
            claim.state.state = "done"
            return claim.state.failed
        except _StoppedError:
            _stop(claim)
        except KeyboardInterrupt:
            claim.state.state = "stopped"
            raise
        except BaseException:
            claim.state.state, claim.state.error = "died", traceback.format_exc()
            raise
    if claim.state.state == "requeued" and claim.state.job:
        _requeue(claim, claim.state.job)  # only now: it may end this process at once
    raise SystemExit(REQUEUED)


class _StoppedError(Exception):
    """A signal came."""


def _do(the_plan: Plan, number: int, processes: int, claim: Claim, caught: list[int]) -> None:
    with uncollected():
        from structkv_bench import runner  # only now: it imports transformers

    store = Store(the_plan.results_dir, the_plan.name(number))
    store.check_writable()
    setups = compose(the_plan.overrides)
    bounds = replace(setups[0].bounds, processes=processes)
    jobs = _jobs(the_plan, number, setups, store)
    claim.state.of = len(jobs)
    claim.write()
    about = {
        "command": ["structkv-bench", "run", *the_plan.overrides],
        "shard": store.shard,
        "slurm_job": slurm_job(),
    }
    with store.locked({cell.key: cell for job in jobs for cell in job.cells}.values()):
        for _, failed in runner.execute(jobs, store, bounds, about, lambda: bool(caught or claim.lost)):
            claim.state.done += 1
            claim.state.failed += failed
        if claim.state.done < len(jobs):
            raise _StoppedError


def _jobs(the_plan: Plan, number: int, setups: list[Setup], store: Store) -> list[Job]:
    """What is left of a shard."""
    from structkv_bench.jobs import available, prepare

    groups = {tuple(cell.folder for cell in group.cells): group for group in plan(setups)}
    jobs: list[Job] = []
    for piece in the_plan.shards[number]:
        group = groups.get(tuple(piece.cells))
        if group is None:
            raise UserError(
                f"{the_plan.file}: configs or code have changed since, {piece.cells[0]} is no cell of its "
                "command any more; run the command again"
            )
        available([group])
        wanted = set(piece.samples)
        jobs += [job for job in prepare([group], store).jobs if job.prompt.sample.id in wanted]
    return jobs


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals caught so far; the batch at hand is finished first.

    submitit's own handler would leave in the middle of a sample, takes any task with less than ten minutes
    for one that has timed out, and gives up after a number of requeues, however much each got done.
    """
    caught: list[int] = []

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before: dict[int, Any] = {number: signal.signal(number, catch) for number in SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(claim: Claim) -> None:
    """Say what becomes of a shard that was stopped."""
    job = claim.state.job
    # one that was cancelled is completing, and queueing it again would bring it back
    goes_on = job and not claim.lost and _job_state(job) == "RUNNING"
    claim.state.state = "requeued" if goes_on else "stopped"


def _requeue(claim: Claim, job: str) -> None:
    done = _scontrol("requeue", job)
    if done.returncode and _job_state(job) == "RUNNING":  # else Slurm has done it by itself
        claim.state.state = "died"
        claim.state.error = f"job {job} can't be queued again: {done.stderr.strip()}"
        claim.write()


def _job_state(job: str) -> str:
    found = re.search(r"JobState=(\S+)", _scontrol("show", "job", job, "--oneliner").stdout)
    return found[1] if found else ""


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["scontrol", *arguments], capture_output=True, text=True, check=False)
