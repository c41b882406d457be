"""How long `table` and `report` take over 100,000 stored rows: whole commands, the start of Python included.

    python scripts/bench_report.py

The cells are those of Table 2 on five tasks; their rows have the fields, and within a few bytes the size, of
the rows that a run of SmolLM2 stores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from structkv_bench.config import compose
from structkv_bench.manifest import Manifest, write_manifest
from structkv_bench.plan import Cell, plan
from structkv_bench.provenance import provenance

TASKS = "[niah_single_1,niah_multikey_2,vt,cwe,fwe]"
LAYERS, PIVOT, SEARCHED = 30, 13, 14
TRUE_FROM = {"gemfilter": 12, "fastkv": 14, "structkv": PIVOT, "pyramidinfer": 1}
"""Layers whose hidden states are compared with the full cache's, from this one on."""
TRUTH = {"full": 0.9, "snapkv": 0.8, "fastkv": 0.78, "structkv": 0.77, "gemfilter": 0.6}
"""How often a method is right, so that the statistics have something to do; others 0.3."""


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=500, help="of each of the 200 cells")
    parser.add_argument("--out", type=Path, default=Path("results/bench_report.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = lay(Path(folder), options.samples)
        page = Path(folder) / "report.html"
        commands = {
            "table 2": ["table", "2", "--results", folder],
            "table 2 --compare --intervals": ["table", "2", "--compare", "--intervals", "--results", folder],
            "report": ["report", "--results", folder, "--out", str(page)],
        }
        measured = {
            "rows": 200 * options.samples,
            "bytes of rows": size,
            **{name: seconds(arguments) for name, arguments in commands.items()},
            "bytes of the report": page.stat().st_size,
            "largest memory in MB": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
            "provenance": {key: value for key, value in provenance("cpu").items() if key != "host"},
        }
    text = json.dumps(measured, indent=2)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n", encoding="utf-8")


def lay(folder: Path, samples: int) -> int:
    """Write the cells, their rows and the manifest; returns the bytes of the rows."""
    asked = ["experiment=table2", f"task.subset={TASKS}", f"task.samples={samples}"]
    cells = [cell for group in plan(compose(asked)) for cell in group.cells]
    session = provenance("cpu") | {"model": {"weights": "0" * 16, "tokenizer": "0" * 16}, "sources": {}}
    rng, size = Random(0), 0
    for cell in cells:
        place = folder / cell.folder
        place.mkdir()
        about = {"key": cell.key, "names": cell.names, "config": cell.config, "sessions": [session]}
        (place / "cell.json").write_text(json.dumps(about), encoding="utf-8")
        lines = [json.dumps(row(cell, number, rng), sort_keys=True) for number in range(samples)]
        text = "".join(line + "\n" for line in lines)
        (place / "rows.jsonl").write_text(text, encoding="utf-8")
        size += len(text)
    manifest = Manifest("table2")
    asked_for = {c.folder: {"samples": samples, "names": c.names, "config": c.config} for c in cells}
    manifest.add(asked_for, {}, TASKS)
    write_manifest(folder, manifest)
    return size


def row(cell: Cell, number: int, rng: Random) -> dict[str, Any]:
    """One row as the runner would write it."""
    method, tokens = cell.method_name, cell.length - number % 128
    kept = tokens if method == "full" else tokens // 10
    signals = ("entropy", "sparsity", "transition", "variance")
    facts = {"signals": {name: numbers(rng, SEARCHED, 4) for name in signals}} if method == "structkv" else {}
    return facts | {
        "decode_s": round(rng.random(), 4),
        "error": None,
        "extra_scores": {},
        "fidelity": numbers(rng, LAYERS - TRUE_FROM.get(method, LAYERS), 6),
        "fields": {"depth": number % 100},
        "generated_ids": [rng.randrange(49152) for _ in range(8)],
        "kept_entries": [3 * kept] * LAYERS,
        "kv_bytes": 46080 * kept,
        "kv_bytes_full": 46080 * tokens,
        "pivot": TRUE_FROM.get(method),
        "prediction": f" {rng.randrange(10**7)}.",
        "prefill_parts_s": dict(
            zip(("attention", "detection", "mlp", "scoring", "selection"), numbers(rng, 5, 5), strict=True)
        ),
        "prefill_pct": 57.3333 if method in TRUE_FROM else 100.0,
        "prefill_s": round(rng.random(), 4),
        "prompt_sha256": f"{cell.length}{cell.subtask}"[:8] + f"{number:08}",
        "prompt_tokens": tokens,
        "references": [str(rng.randrange(10**7))],
        "sample": f"{number:04}",
        "score": score(cell, rng),
        "status": "ok",
        "tie_margin": round(rng.random(), 6),
        "truncated_tokens": 0,
    }


def score(cell: Cell, rng: Random) -> float:
    """Right or wrong, or of a task with several answers a share of them."""
    right = TRUTH.get(cell.method_name, 0.3)
    if cell.subtask in ("vt", "cwe", "fwe"):
        return sum(rng.random() < right for _ in range(5)) / 5
    return float(rng.random() < right)


def numbers(rng: Random, count: int, digits: int) -> list[float]:
    """Random shares with so many digits."""
    return [round(rng.random(), digits) for _ in range(count)]


def seconds(arguments: list[str]) -> dict[str, float]:
    """Wall and processor time of a whole command; where the machine is busy only the second tells much.

    Raises:
        CalledProcessError: it failed.
    """
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "structkv_bench", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(wall, 2), "processor seconds": round(used, 2)}


if __name__ == "__main__":
    main()
