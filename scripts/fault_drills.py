"""Faults made on purpose, each followed by the same command again: are the rows those of an undisturbed run?

    python scripts/fault_drills.py                  # all drills, some minutes
    python scripts/fault_drills.py kills full_disk  # these alone; not written
    python scripts/fault_drills.py --quick          # a trial: few kills, short waits; not written

The model is a random one of four layers: what is drilled is that no row is lost, there twice or another one,
not what it says. Kill moments are drawn from a seed. A line per drill; the exit code is 1 if one went wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from drill_runs import (
    Drill,
    DrillError,
    end_of,
    ended,
    kill,
    line_count,
    must_end,
    must_work,
    start,
    torn_files,
    undisturbed,
    wait_for_rows,
)
from drill_surroundings import BACK, clock_late, on_another_node, small_disk
from random_model import write

from structkv_bench import models, provenance, tracking
from structkv_bench.config import compose
from structkv_bench.launch import claim
from structkv_bench.paths import write_whole
from structkv_bench.shape import BYTES, ModelShape
from structkv_bench.store import read_about

OUT = Path("results/fault_drills.json")
WHAT = ["method=full,snapkv,structkv", "method.kv_ratio=0.2", "task=niah", "task.haystack=noise",
        "task.lengths=[512]", "task.max_new_tokens=4"]  # fmt: skip
SHARDS = ["launcher=slurm", "launcher.gpus=0", "launcher.shards=2", "launcher.submit=false"]
"""The plan is written, and its tasks are started by hand."""
MOST_ROWS = 7
"""That a run may write before it is killed."""
FEW = 24
"""Samples of all drills but the first."""
DEFINITION = (
    "each run is a process of its own that is killed, or whose surroundings fail; afterwards the same "
    "command runs again, and all rows, without measured seconds, must be the bytes of an undisturbed run's, "
    "each once"
)

Facts = dict[str, Any]


def kills(drill: Drill, place: Path) -> Facts:
    """One run killed at random moments, half of them while it starts and half among its rows."""
    rng, results, log = Random(drill.seed), place / "results", place / "log"
    samples = _of_kills(drill.kills)
    arguments = drill.run(results, f"task.samples={samples}")
    among_rows = torn = 0
    for _ in range(drill.kills):
        before, child = line_count(results), start(arguments, log)
        if rng.random() < 0.5:
            _pause(rng.uniform(0, drill.first_row_s), results, before + MOST_ROWS)
        else:
            wait_for_rows(results, before + rng.randrange(1, MOST_ROWS), child)
            _pause(rng.uniform(0, drill.row_s), results, before + MOST_ROWS)
        if (code := ended(child)) is not None:
            raise DrillError(f"ended with {code} after {line_count(results)} rows, before all kills")
        kill(child)
        among_rows += line_count(results) > before
        torn += torn_files(results)
    left = samples * len(drill.expected) - line_count(results)
    must_end(arguments, log)
    return {"kills": drill.kills, "after a row of their session": among_rows, "torn lines": torn,
            "rows left after the last": left, "rows": drill.check(results, samples)}  # fmt: skip


def _pause(seconds: float, results: Path, most: int) -> None:
    """Let time pass, but no more than so many rows: how fast they come depends on what else runs here."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and line_count(results) < most:
        time.sleep(0.002)


def _of_kills(count: int) -> int:
    """Samples that outlive so many kills: each lets at most seven rows of three cells by, and a little."""
    return 20 + 5 * count


def torn_line(drill: Drill, place: Path) -> Facts:
    """Killed, with half a row at the end of each file."""
    results, log = place / "results", place / "log"
    child = start(drill.run(results), log)
    wait_for_rows(results, 4, child)
    kill(child)
    files = list(results.glob("*/rows.jsonl"))
    for file in files:
        with file.open("ab") as opened:
            opened.write(file.read_bytes().splitlines()[0][:99])
    must_end(drill.run(results), log)
    return {"torn lines": len(files), "rows": drill.check(results, FEW)}


def full_disk(drill: Drill, place: Path) -> Facts:
    """A run whose disk fills up while it writes rows; then there is room again."""
    return _on_small_disk(drill, place, ["rows.jsonl"], lambda results: [drill.run(results)])


def full_disk_under_shards(drill: Drill, place: Path) -> Facts:
    """The same for two shards side by side, whose plan and states are on that disk too."""
    files = ["rows.*.0000.jsonl", "rows.*.0001.jsonl"]
    return _on_small_disk(drill, place, files, lambda results: _tasks(drill, results, place / "log"))


def _on_small_disk(
    drill: Drill, place: Path, files: Sequence[str], commands: Callable[[Path], list[list[str]]]
) -> Facts:
    """All of the commands are held up within their rows while the disk fills."""
    log = place / "log"
    with small_disk(place / "disk") as disk:
        results = disk.folder / "results"
        arguments = commands(results)
        children = [start(command, log) for command in arguments]
        for child, its in zip(children, files, strict=True):
            wait_for_rows(results, 4, child, its)
            os.kill(child, signal.SIGSTOP)
        disk.fill(children)
        for child in children:
            os.kill(child, signal.SIGCONT)
        codes = [end_of(child) for child in children]
        said = log.read_text(encoding="utf-8").count("can't write results")
        written = line_count(results)
        if set(codes) != {2} or said != len(codes):
            raise DrillError(f"ended with {codes}, and {said} of them said what is wrong")
        disk.free()
        for command in arguments:
            must_end(command, log)
        return {"disk": disk.kind, "rows when it was full": written, "rows": drill.check(results, FEW)}


def two_writers(drill: Drill, place: Path) -> Facts:
    """A second run of the same cells while the first one is at work (and held up, to be sure of it)."""
    results, log = place / "results", place / "log"
    first = start(drill.run(results), log)
    wait_for_rows(results, 1, first)
    os.kill(first, signal.SIGSTOP)
    must_end(drill.run(results), place / "second", code=2)
    os.kill(first, signal.SIGCONT)
    must_work(first, log)
    return {"the second": _last(place / "second"), "rows": drill.check(results, FEW)}


def clock_set_back(drill: Drill, place: Path) -> Facts:
    """Two shards: the clock goes back by two hours between sessions and again while they are at work."""
    results, log = place / "results", place / "log"
    first, second = _tasks(drill, results, log)
    for before in (lambda: None, clock_late):
        there, child = line_count(results), start(first, log, before)
        wait_for_rows(results, there + 4, child)
        kill(child)
        for file in results.rglob("*.json*"):  # as that clock would have had it
            os.utime(file, (time.time() - BACK.total_seconds(),) * 2)
    for task in (first, second):
        must_end(task, log, before=clock_late)
    sessions = [s for file in results.glob("*/cell.json") for s in read_about(file)["sessions"]]
    if any(session.get("ended", "~") < session["started"] for session in sessions):
        raise DrillError("a session ended before it began")
    return {"sessions": len(sessions), "rows": drill.check(results, FEW)}


def no_wandb(drill: Drill, place: Path) -> Facts:
    """W&B online, at an address where nobody listens."""
    results, log = place / "results", place / "log"
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "a" * 40}
    must_end([*drill.run(results), "--wandb", "online"], log, before=lambda: os.environ.update(address))
    if "warning: W&B has not got all" not in log.read_text(encoding="utf-8"):
        raise DrillError("nothing was said of W&B")
    return {"said": _last(log), "rows": drill.check(results, FEW)}


def lost_node(drill: Drill, place: Path) -> Facts:
    """An array of two tasks: the node of one is gone, without a signal, its claim left behind."""
    results, log = place / "results", place / "log"
    first, second = _tasks(drill, results, log)
    child = start(first, log, on_another_node)
    other = start(second, log)
    wait_for_rows(results, 4, child, "rows.*.0000.jsonl")
    kill(child)
    must_work(other, log)
    [state] = [file for file in results.glob("shards/*/0000.json")]
    left = claim.read_state(state)
    if left is None or (left.state, left.host) != ("running", "node-17"):
        raise DrillError(f"the claim that was left behind says {left}")
    began = time.monotonic()
    must_end(first, log)
    waited = round(time.monotonic() - began, 1)
    return {"seconds until its shard was done": waited, "rows": drill.check(results, FEW)}


def _tasks(drill: Drill, results: Path, log: Path) -> list[list[str]]:
    """The commands of an array's two tasks."""
    must_end(drill.run(results, *SHARDS), log)
    [plan] = results.glob("shards/*.json")
    return [["work", str(plan), str(number)] for number in range(2)]


def _last(log: Path) -> str:
    """The last line, without the folder of the drill."""
    return log.read_text(encoding="utf-8").strip().splitlines()[-1].replace(f"{log.parent}/", "")


DRILLS: dict[str, Callable[[Drill, Path], Facts]] = {
    drill.__name__: drill
    for drill in (
        kills,
        torn_line,
        full_disk,
        full_disk_under_shards,
        two_writers,
        clock_set_back,
        no_wandb,
        lost_node,
    )
}


def main() -> int:
    """Drill, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("drills", nargs="*", metavar="DRILL", help=f"{', '.join(DRILLS)}; all if none")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--quick", action="store_true", help="a trial: 4 kills, short waits")
    parser.add_argument("--model", default="", help="overrides for another one than the random one")
    options = parser.parse_args()
    if unknown := set(options.drills) - DRILLS.keys():
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(DRILLS)}")
    if options.quick:
        options.kills, claim.BEAT, claim.LEASE, tracking.INIT_S = 4, 0.1, 3.0, 1.0
    torch.set_num_threads(1)  # a process that has computed with several can't be forked
    session = {key: value for key, value in provenance.provenance("cpu").items() if key != "host"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model = shlex.split(options.model) or random_model(place / "model")
        models.inspect(compose([*model, "method=full"])[0].model)  # what it imports, no fork needs to
        begun = undisturbed([*model, *WHAT], place / "undisturbed", max(FEW, _of_kills(options.kills)))
        drill = replace(begun, kills=options.kills, samples=FEW, seed=options.seed)
        found = {name: drilled(name, drill, place / name) for name in options.drills or DRILLS}
    if not options.drills and not options.quick:
        told = {"definition": DEFINITION, **found, "provenance": session}
        write_whole(OUT, json.dumps(told, indent=2) + "\n")
    return int(any("wrong" in facts for facts in found.values()))


def drilled(name: str, drill: Drill, place: Path) -> Facts:
    """Do one drill, and say in a line what came of it."""
    place.mkdir()
    began = time.monotonic()
    try:
        facts = DRILLS[name](drill, place)
    except DrillError as error:
        facts = {"wrong": str(error)}
    facts["seconds"] = round(time.monotonic() - began, 1)
    outcome = "WRONG" if "wrong" in facts else "equal rows"
    print(f"{name}: {outcome}; {', '.join(f'{key} {value}' for key, value in facts.items())}", flush=True)
    return facts


def random_model(folder: Path) -> list[str]:
    """A random Llama with the embedded model's tokenizer, on disk; the overrides that choose it."""
    prompts = models.inspect(compose(["model=smollm2_135m", "method=full"])[0].model).prompts
    vocabulary = len(prompts.tokenizer)
    shape = ModelShape(4, 8, 2, 8, 64, 96, vocabulary, max_positions=4096, itemsize=BYTES["float32"])
    write(shape, "float32", prompts.tokenizer, folder)
    return ["model=custom", f"model.path={folder}", "model.name=random"]


if __name__ == "__main__":
    sys.exit(main())
