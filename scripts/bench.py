"""The figures that the README and issue 6 state, in medians with quartiles; needs an idle machine.

make bench                                  # every part, 40 minutes on 2 cores
python scripts/bench.py decode_batch h2o    # these parts alone; the file's other sections stay
python scripts/bench.py --quick             # a trial at an eighth of the length, one repeat, not written

Each part is a section of bench.json, written as soon as it is measured, with the time its run began: the
parts of one run have the same. bench.md has what was asked for beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench_engine import PARTS as ENGINE
from bench_setup import Scale, Section, spread
from bench_table import table

from structkv_bench.paths import write_whole
from structkv_bench.provenance import provenance

OUT = Path("results/smollm2_135m/bench.json")
NIAH = "task=niah task.lengths=[2048,4096]"
NINE = "method=full,streaming_llm,snapkv,h2o,structkv method.kv_ratio=0.1,0.2"
COMMAND = [sys.executable, "-m", "structkv_bench"]
OVERHEAD = [sys.executable, str(Path(__file__).with_name("bench_overhead.py"))]


def start(scale: Scale) -> Section:
    """How long the front door takes."""
    found = {
        name: [seconds([*COMMAND, *name.split()]) for _ in range(7)] for name in ("--help", "list methods")
    }
    return {f"seconds of {name}": spread(times) for name, times in found.items()}


def nine_cells(scale: Scale) -> Section:
    """Whole commands: nine cells as a group beside full alone, on the same samples."""
    samples = max(1, 20 // scale.divisor)
    where = f"{' '.join(scale.overrides)} {NIAH} task.samples={samples}"
    if scale.divisor > 1:
        where = where.replace("[2048,4096]", f"[{2048 // scale.divisor},{4096 // scale.divisor}]")
    times = {
        name: run_seconds(f"{which} {where}") for name, which in (("full", "method=full"), ("nine", NINE))
    }
    return {
        "definition": f"wall time of a whole run command, {samples} samples at each of two lengths; once",
        "seconds of method=full alone": round(times["full"], 1),
        "seconds of nine cells on the same samples": round(times["nine"], 1),
        "nine cells over full": round(times["nine"] / times["full"], 3),
    }


def overhead(scale: Scale) -> Section:
    """What runs do beside the model, phase by phase, and how long until the first prefill."""
    niah = ["method=full", "task=niah", "task.lengths=[2048]", *scale.overrides]
    short = [watched_run([*niah, "task.samples=1"]) for _ in range(scale.repeats + 1)][1:]  # one fills caches
    quickstart = ["experiment=quickstart", *scale.overrides]
    if scale.divisor > 1:
        quickstart += ["task.samples=1", "task.lengths=[1024]"]
    return {
        "definition": "overhead: all of the command but the calls of prefill and decode, start and load "
        "included; phases in percent of it; once. To the first prefill: from the start of "
        "the process, with warm caches",
        "to_first_prefill_s (under 4)": spread(sum(run["to_first_prefill"].values()) for run in short),
        "to_first_prefill": shares(short[-1]["to_first_prefill"]),
        "quickstart (overhead_pct under 5)": shares(watched_run(quickstart)["whole"]),
        "full on 50 samples of 2,048 tokens": shares(
            watched_run([*niah, f"task.samples={50 // scale.divisor}"])["whole"]
        ),
    }


def shares(spent: dict[str, float]) -> Section:
    """Seconds, and how they divide into phases, the largest first."""
    whole = sum(spent.values())
    phases = sorted(spent.items(), key=lambda its: -its[1])
    overhead = whole - spent.get("prefill", 0) - spent.get("decode", 0)
    return {
        "seconds": round(whole, 2),
        "overhead_pct": round(100 * overhead / whole, 2),
        "phases_pct": {phase: round(100 * seconds / whole, 3) for phase, seconds in phases},
    }


PARTS: dict[str, Callable[[Scale], Section]] = {
    "start": start, **ENGINE, "overhead": overhead, "nine_cells": nine_cells,
}  # fmt: skip


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all of them if none")
    parser.add_argument("--repeats", type=int, default=3, help="of each figure, after one to warm up")
    parser.add_argument("--quick", action="store_true", help="a trial: short prompts, once")
    parser.add_argument("--overrides", default="model=smollm2_135m", help="of the model and its texts")
    parser.add_argument("--out", type=Path, help=f"where to; {OUT} unless --quick")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: choose from {', '.join(PARTS)}")
    given = tuple(shlex.split(options.overrides))
    scale = Scale(1 if options.quick else options.repeats, 8 if options.quick else 1, given)
    out = options.out or (None if options.quick else OUT)
    session = {key: value for key, value in provenance().items() if key != "host"}
    for name in options.parts or PARTS:
        section = PARTS[name](scale) | {"repeats": scale.repeats, "run": session["started"]}
        print(json.dumps({name: section}, indent=2), flush=True)
        if out:
            store(out, name, section, session)


def store(out: Path, name: str, section: Section, session: dict[str, Any]) -> None:
    """Put a section into the file; sections of other runs stay, and so does what those runs were."""
    content: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        content = json.loads(out.read_text(encoding="utf-8"))
    sections = {part: content[part] for part in PARTS if isinstance(content.get(part), dict)}
    sections[name] = section
    needed = {part["run"] for part in sections.values()}
    runs = [run for run in content.get("runs", []) if run["started"] in needed - {session["started"]}]
    ordered = {part: sections[part] for part in PARTS if part in sections}
    write_whole(out, json.dumps({"runs": [*runs, session], **ordered}, indent=2) + "\n")
    write_whole(out.with_suffix(".md"), table(ordered) + "\n")


def run_seconds(overrides: str) -> float:
    """Wall time of a run into an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds([*COMMAND, "run", *shlex.split(overrides), f"results_dir={folder}"])


def watched_run(overrides: list[str]) -> dict[str, dict[str, float]]:
    """What bench_overhead.py tells of a run into an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*OVERHEAD, *overrides, f"results_dir={folder}"]
        environment = os.environ | {"BENCH_STARTED": str(time.time())}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    told: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return told


def seconds(command: list[str]) -> float:
    """Wall time of a whole command.

    Raises:
        CalledProcessError: it failed.
    """
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
