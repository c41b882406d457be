"""What planning and status of 10,000 cells cost, and the smoke gate.

    python scripts/bench_launch.py            # needs an idle machine; some minutes, 2 GB of disk
    python scripts/bench_launch.py --quick    # a trial at a tenth of the size; not written

Whole commands, the start of Python included, but for the first figure, which begins where the overrides are
read: what a command takes until then is in results/smollm2_135m/bench.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

from bench_report import row

from structkv_bench.config import compose
from structkv_bench.launch import start as launch
from structkv_bench.manifest import Manifest, write_manifest
from structkv_bench.paths import write_whole
from structkv_bench.plan import Cell, plan
from structkv_bench.provenance import provenance

OUT = Path("results/bench_launch.json")
BASELINE = Path("results/baselines/smoke.json")
COMMAND = """
import sys
from structkv_bench.cli import main
code = main()
print(open("/proc/self/status").read(), file=sys.stderr)
sys.exit(code)
"""
"""`structkv-bench`, and then what the kernel says of the process itself: wait4's largest memory counts in the
process that forked it."""
METHODS = "streaming_llm,snapkv,h2o,structkv,fastkv,gemfilter,adakv,pyramidkv"
"""Those with a KV ratio."""
RATIOS, LENGTHS, ROWS = 25, 50, 100
"""8 x 25 x 50 cells with 100 rows each are 10,000 and 1,000,000."""
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1\nValueError: no luck\n'


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a trial")
    options = parser.parse_args()
    lengths = LENGTHS // 10 if options.quick else LENGTHS
    measured: dict[str, Any] = {
        "planned": planned(lengths),
        "status": told(lengths),
        "smoke gate": gated(options.quick),
        "provenance": {key: value for key, value in provenance("cpu").items() if key != "host"},
    }
    text = json.dumps(measured, indent=2)
    print(text)
    if not options.quick:
        write_whole(OUT, text + "\n")


def overrides(lengths: int) -> list[str]:
    """A grid of so many lengths."""
    ratios = ",".join(f"{0.1 + 0.01 * step:.2f}" for step in range(RATIOS))
    tokens = ",".join(str(512 + 16 * step) for step in range(lengths))
    niah = ["task=niah", "task.haystack=noise", f"task.lengths=[{tokens}]", "task.samples=1"]
    return [f"method={METHODS}", f"method.kv_ratio={ratios}", *niah]


def planned(lengths: int) -> dict[str, Any]:
    """From overrides to the shards of an array on disk: composed, checked, costed and cut."""
    with tempfile.TemporaryDirectory() as folder:
        slurm = ["launcher=slurm", "launcher.gpus=0", "launcher.shards=100", "launcher.submit=false"]
        asked = [*overrides(lengths), *slurm, f"results_dir={folder}"]
        whole = watched(["run", *asked])
        [file] = Path(folder).glob("shards/*.json")
        shards = len(json.loads(file.read_text(encoding="utf-8"))["shards"])
    with tempfile.TemporaryDirectory() as folder:
        asked[-1] = f"results_dir={folder}"
        began = time.perf_counter()
        setups = compose(asked)
        with redirect_stdout(StringIO()):
            launch.run(setups, asked)
        seconds = time.perf_counter() - began
    cells = sum(len(group.cells) for group in plan(setups))
    return {"cells": cells, "shards": shards, "seconds (under 5 for 10,000 cells)": round(seconds, 2),
            "whole command": whole}  # fmt: skip


def told(lengths: int) -> dict[str, Any]:
    """`status` over as many cells, each with 100 rows of which one has failed."""
    cells = [cell for group in plan(compose(overrides(lengths))) for cell in group.cells]
    with tempfile.TemporaryDirectory() as folder:
        size = lay(Path(folder), cells)
        found = watched(["status", "--results", folder])
    limits = "(under 20 seconds and 2048 MB for 10,000 cells of 1,000,000 rows)"
    return {"cells": len(cells), "rows": ROWS * len(cells), "bytes of rows": size, f"status {limits}": found}


def lay(folder: Path, cells: list[Cell]) -> int:
    """Write the cells' rows, those of a method the same, and their manifest; the bytes of the rows."""
    blocks: dict[str, str] = {}
    for cell in cells:
        if cell.method_name not in blocks:
            rows = [row(cell, number, Random(number)) for number in range(ROWS)]
            rows[0] |= {"status": "failed", "error": TRACEBACK}
            blocks[cell.method_name] = "".join(json.dumps(one, sort_keys=True) + "\n" for one in rows)
        place = folder / cell.folder
        place.mkdir()
        about = {"key": cell.key, "names": cell.names, "config": cell.config, "sessions": []}
        (place / "cell.json").write_text(json.dumps(about), encoding="utf-8")
        (place / "rows.jsonl").write_text(blocks[cell.method_name], encoding="utf-8")
    manifest = Manifest("run")
    asked = {c.folder: {"samples": ROWS, "names": c.names, "config": c.config} for c in cells}
    manifest.add(asked, {}, [])
    write_manifest(folder, manifest)
    return sum(len(blocks[cell.method_name]) for cell in cells)


def gated(quick: bool) -> dict[str, Any]:
    """The smoke experiment, and its comparison with the baseline of this repository."""
    with tempfile.TemporaryDirectory() as folder:
        few = ["task.samples=1"] if quick else []
        run = watched(["run", "experiment=smoke", *few, f"results_dir={folder}/runs"])
        baseline = BASELINE
        if quick:
            baseline = Path(folder) / "baseline.json"
            watched(
                ["regress", "--baseline", str(baseline), "--current", f"{folder}/runs", "--update-baseline"]
            )
        regress = watched(["regress", "--baseline", str(baseline), "--current", f"{folder}/runs"], (0, 1))
    whole = round(run["seconds"] + regress["seconds"], 1)
    return {"cores": len(os.sched_getaffinity(0)), "run": run, "regress": regress,
            "seconds of both (under 360 on 2 cores)": whole}  # fmt: skip


def watched(arguments: list[str], codes: tuple[int, ...] = (0,)) -> dict[str, float]:
    """Exit code, wall time, processor time and largest memory of a whole command.

    Raises:
        RuntimeError: it ends with none of these codes.
    """
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in codes:
        raise RuntimeError(f"{' '.join(arguments)[:200]}: {done.stderr[:2000]}")
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)
    return {
        "exit code": done.returncode,
        "seconds": round(seconds, 2),
        "processor seconds": round(sum(after[:2]) - sum(before[:2]), 2),
        "largest memory in MB": int(peak) // 1024,
    }


if __name__ == "__main__":
    main()
