"""Timings that the README states: whole commands, alternating, medians; needs an idle machine.

make bench                                   # about half an hour on 2 cores
python scripts/bench.py --samples 2          # a few minutes
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from structkv_bench.provenance import provenance

NIAH = "task=niah task.lengths=[2048,4096]"
NINE = "method=full,streaming_llm,snapkv,h2o,structkv method.kv_ratio=0.1,0.2"
COMMAND = [sys.executable, "-m", "structkv_bench"]


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=20, help="per length")
    parser.add_argument("--repeats", type=int, default=1, help="of the two runs, in turn")
    parser.add_argument("--out", type=Path, default=Path("results/smollm2_135m/bench.json"))
    options = parser.parse_args()
    measured: dict[str, object] = {"provenance": provenance("cpu"), "samples_per_length": options.samples}
    for arguments in ("--help", "list methods"):
        times = [seconds(arguments) for _ in range(7)]
        measured[f"seconds of {arguments}"] = round(statistics.median(times), 3)
    pairs = [
        [run_seconds(f"{methods} {NIAH} task.samples={options.samples}") for methods in ("method=full", NINE)]
        for _ in range(options.repeats)
    ]
    full, nine = (round(statistics.median(times), 1) for times in zip(*pairs, strict=True))
    measured |= {
        "seconds of method=full alone": full,
        "seconds of nine cells on the same samples": nine,
        "nine cells over full": round(statistics.median(b / a for a, b in pairs), 3),
    }
    text = json.dumps(measured, indent=2)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n", encoding="utf-8")


def run_seconds(overrides: str) -> float:
    """Wall time of a run into an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds(f"run {overrides} results_dir={folder}")


def seconds(arguments: str) -> float:
    """Wall time of a whole command."""
    started = time.perf_counter()
    subprocess.run([*COMMAND, *shlex.split(arguments)], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
