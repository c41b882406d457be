"""A run's shards, handed to processes of this machine or to Slurm, and followed until they are done."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from structkv_bench.config import Setup
from structkv_bench.errors import UserError
from structkv_bench.fitting import check_weights
from structkv_bench.jobs import available, note_in_manifests, prepare
from structkv_bench.launch.claim import State, is_live, read_state
from structkv_bench.launch.settings import LocalLauncher, SlurmLauncher
from structkv_bench.launch.shards import Plan, costs, cut, make_plan, shard_count
from structkv_bench.launch.status import reason
from structkv_bench.plan import plan
from structkv_bench.runner import progress_bar
from structkv_bench.store import CELL_FILE, Store

POLL_LOCAL, POLL_SLURM = 0.5, 5.0
"""Seconds between two looks at the shards' states."""

Left = Mapping[int, int]
"""Samples that are left to do in each shard that has any."""


def run(setups: Sequence[Setup], overrides: Sequence[str]) -> int | None:
    """Do what is left in shards, as the setups' launcher says.

    Args:
        setups: what to run.
        overrides: the command that they come from; each shard composes it again.

    Returns:
        How many rows failed and shards are not done; None: nobody waited for them.

    Raises:
        UserError: as for a run in this process, or Slurm refuses.
    """
    launcher = setups[0].launcher
    store = Store(setups[0].results_dir)
    store.check_writable()
    groups, left_out = available(plan(setups))
    work = prepare(groups, store)
    check_weights(work.jobs, setups[0].bounds)
    cost = costs(work.asked)
    if isinstance(launcher, SlurmLauncher):
        together = setups[0].bounds.decode_batch
        longest = max(sum(cost[first : first + together]) for first in range(len(cost)))
        _check_time(longest / launcher.flops, launcher)
        count = launcher.shards or shard_count(cost, 60 * launcher.minutes, launcher.flops)
    else:
        count = launcher.processes if isinstance(launcher, LocalLauncher) else 1
    shards = cut(work.asked, cost, count)
    left = {number: n for number, jobs in enumerate(shards) if (n := sum(bool(job.cells) for job in jobs))}
    note_in_manifests(setups, work, left_out, store)
    if not left:
        return 0
    the_plan = make_plan(shards, overrides, store.path)
    the_plan.folder.mkdir(exist_ok=True)
    if isinstance(launcher, SlurmLauncher):
        return _slurm(the_plan, left, launcher)
    return _local(the_plan, left)


def _check_time(longest: float, launcher: SlurmLauncher) -> None:
    room = 60 * launcher.time_limit - launcher.notice
    if longest > room:
        raise UserError(
            f"launcher.time_limit={launcher.time_limit}: the longest batch is estimated at {longest:.0f} s, "
            f"and {room} s are left before the notice; raise it, or launcher.tflops if a task does more than "
            f"{launcher.flops / 1e12:g}"
        )


def _local(the_plan: Plan, left: Left) -> int:
    live = [number for number in left if _is_live(the_plan, number)]
    if live:
        raise UserError(
            f"{the_plan.results_dir}: another run is adding rows, shards {', '.join(map(str, live))} of "
            f"{the_plan.file.stem}; when that has ended, the same command does what is left"
        )
    _forget(the_plan, left)
    processes = [_process(the_plan, number, place, len(left)) for place, number in enumerate(left)]
    try:
        _follow(the_plan, left, POLL_LOCAL, lambda: any(process.poll() is None for process in processes))
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)  # where it still runs: it finishes its batch
            process.wait()
    return _outcome(the_plan, left)


def _process(the_plan: Plan, number: int, place: int, processes: int) -> subprocess.Popen[bytes]:
    """A shard in a process with a GPU of its own, or a share of the CPUs."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = said.split(",") if said else [str(device) for device in range(torch.cuda.device_count())]
    cpus = len(os.sched_getaffinity(0))
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cpus // processes)))}
    if devices:
        own["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    sharing = math.ceil(processes / max(1, len(devices)))
    command = [sys.executable, "-m", "structkv_bench", "work", str(the_plan.file), str(number)]
    command += ["--processes", str(sharing)]
    with open(the_plan.folder / f"{number:04d}.log", "ab") as log:
        return subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)


def _slurm(the_plan: Plan, left: Left, launcher: SlurmLauncher) -> int | None:
    from structkv_bench.launch import slurm  # only now: submitit is needed here alone

    queued = slurm.in_queue(the_plan) or {}
    new = [number for number in left if number not in queued and not _is_live(the_plan, number)]
    if not launcher.submit:
        print(slurm.by_hand(the_plan, new, launcher))
        return None
    jobs = set(queued.values())
    if new:
        _forget(the_plan, new)
        jobs.add(slurm.submit(the_plan, new, launcher))
    note = f", {len(left) - len(new)} more were there already" if len(new) < len(left) else ""
    print(f"job {', '.join(sorted(jobs))}: {len(new)} shards submitted{note}; logs in {the_plan.folder}")
    if not launcher.wait:
        return None

    def is_waiting() -> bool:
        there = slurm.in_queue(the_plan)
        if there is None or there.keys() & left.keys():
            return True
        return any(_is_live(the_plan, number) for number in left)

    try:
        _follow(the_plan, left, POLL_SLURM, is_waiting)
    except KeyboardInterrupt:
        print(f"the job goes on; to end it: scancel {' '.join(sorted(jobs))}", file=sys.stderr)
        raise
    return _outcome(the_plan, left)


def _follow(the_plan: Plan, left: Left, seconds: float, is_alive: Callable[[], bool]) -> None:
    """Show how far the shards are, by their states alone, until all have ended."""
    with progress_bar() as progress:
        bar = progress.add_task("", total=sum(left.values()))
        done = 0
        while True:
            ending = not is_alive()  # asked first: what ends meanwhile has written its state
            states = [read_state(the_plan.state_file(number)) for number in left]
            done = max(done, sum(map(_done, left.values(), states)))
            counts = [sum(s is not None and s.state == kind for s in states) for kind in ("running", "done")]
            text = f"samples, {counts[0]} of {len(left)} shards running, {counts[1]} done"
            progress.update(bar, completed=done, description=text)
            if ending or counts[1] == len(left):
                return
            time.sleep(seconds)


def _done(left: int, state: State | None) -> int:
    """Samples done of those that were left, also where the shard has begun anew since."""
    if state is None or (state.state == "running" and not state.of):
        return 0
    return left - (state.of - state.done)


def _outcome(the_plan: Plan, left: Left) -> int:
    """How many rows failed and shards are not done; stderr is told why.

    Raises:
        UserError: there is not a single row to show.
    """
    bad = 0
    for number in left:
        state = read_state(the_plan.state_file(number))
        if state is None or state.state != "done":
            print(f"shard {the_plan.name(number)}: {reason(state)}", file=sys.stderr)
            bad += 1
        bad += state.failed if state else 0
    if bad:
        print("the same command does what is left; structkv-bench status shows it", file=sys.stderr)
    cells = {cell for shard in the_plan.shards for piece in shard for cell in piece.cells}
    if not any((the_plan.results_dir / cell / CELL_FILE).exists() for cell in cells):
        raise UserError("nothing was done: see what became of the shards above")
    return bad


def _is_live(the_plan: Plan, number: int) -> bool:
    file = the_plan.state_file(number)
    state = read_state(file)
    return state is not None and is_live(file, state)


def _forget(the_plan: Plan, numbers: Sequence[int] | Left) -> None:
    """Drop the states of earlier attempts."""
    for number in numbers:
        the_plan.state_file(number).unlink(missing_ok=True)
