"""Shards as a Slurm array, through submitit: what is submitted, and what is still in the queue."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Collection
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.helpers import Checkpointable

from structkv_bench.errors import UserError, one_line
from structkv_bench.launch.settings import SlurmLauncher
from structkv_bench.launch.shards import Plan

JOBS_FILE = "jobs.jsonl"


class Task(Checkpointable):
    """What an array task runs. Checkpointable for a signal in the moment before `work` minds them itself."""

    def __call__(self, plan_file: str, number: int) -> int:
        """Do a shard; how many rows failed."""
        from structkv_bench.launch.worker import work

        return work(plan_file, number)


def submit(plan: Plan, numbers: list[int], launcher: SlurmLauncher) -> str:
    """Hand shards to Slurm; the number of the job.

    Raises:
        UserError: there is no Slurm here, or it refuses, in its own words.
    """
    try:
        executor = SlurmExecutor(plan.folder, max_num_timeout=1000)
        executor.update_parameters(**parameters(plan, launcher))
        with redirect_stderr(io.StringIO()):  # submitit prints what it raises
            task = Task()  # type: ignore[no-untyped-call]
            tasks = executor.map_array(task, [str(plan.file)] * len(numbers), numbers)
    except RuntimeError as error:
        if isinstance(error, FailedJobError | FailedSubmissionError):
            raise UserError(f"launcher=slurm: {one_line(error)}") from error
        raise UserError("launcher=slurm: no srun on this machine's PATH: is it a cluster's?") from error
    job = tasks[0].job_id.partition("_")[0]
    with open(plan.folder / JOBS_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps({"job": job, "shards": numbers}) + "\n")
    return job


def parameters(plan: Plan, launcher: SlurmLauncher) -> dict[str, Any]:
    """The launcher's settings as submitit calls them."""
    own: dict[str, Any] = {"requeue": True}
    for argument in launcher.sbatch:
        name, _, value = argument.removeprefix("--").partition("=")
        own[name] = value or True
    if launcher.mem is not None:
        own["mem"] = launcher.mem
    return {
        "job_name": f"structkv-{plan.file.stem}",
        "partition": launcher.partition,
        "account": launcher.account,
        "time": launcher.time_limit,
        "cpus_per_task": launcher.cpus,
        "gpus_per_node": launcher.gpus or None,
        "array_parallelism": launcher.max_parallel,
        "signal_delay_s": launcher.notice,
        "wckey": None,  # submitit's own default is refused where wckeys are accounted
        "srun_args": ["--cpus-per-task", str(launcher.cpus)],  # which srun no longer takes from sbatch
        "setup": [f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{launcher.cpus}}}"],
        "additional_parameters": own,
    }


def by_hand(plan: Plan, numbers: Collection[int], launcher: SlurmLauncher) -> str:
    """The command that hands shards to Slurm without submitit."""
    array = ",".join(map(str, sorted(numbers)))
    return f"sbatch --array={array}%{launcher.max_parallel} scripts/slurm_array.sbatch {_short(plan.file)}"


def in_queue(plan: Plan) -> dict[int, str] | None:
    """Shards that Slurm has yet to do or is doing, each with its job; None: Slurm does not answer."""
    file = plan.folder / JOBS_FILE
    submitted = map(json.loads, file.read_text(encoding="utf-8").splitlines()) if file.exists() else ()
    jobs = {line["job"]: line["shards"] for line in submitted}
    if not jobs:
        return {}
    command = ["squeue", "--noheader", "--array", "--format", "%F %K", "--jobs", ",".join(jobs)]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    if asked.returncode and "Invalid job id" not in asked.stderr:
        return None
    found = {}
    for job, task in (line.split() for line in asked.stdout.splitlines()):
        found[jobs[job][int(task) if task.isdigit() else 0]] = job  # one shard alone is no array
    return found


def _short(file: Path) -> str:
    """Relative to the working directory where that is shorter."""
    return min(str(file), os.path.relpath(file), key=len)
