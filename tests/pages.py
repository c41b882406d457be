"""Results folders for the tests of the report: rows as a run leaves them, in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from structkv_bench.config import compose
from structkv_bench.manifest import Manifest, read_manifest, write_manifest
from structkv_bench.plan import Cell, plan

N = 20
LENGTHS = "task.lengths=[8192,16384]"
TABLE2 = (
    "method=full,streaming_llm,snapkv,structkv",
    *("method.kv_ratio=0.1", "task=ruler", "task.subset=[vt,fwe]", LENGTHS, "model=llama3_1_8b"),
)
FIG8 = (*TABLE2[:2], "task=niah", LENGTHS, "model=llama3_1_8b")
TABLE3 = ("method=structkv", "method.decay=0.5,0.9,1.0", *TABLE2[1:])
PRIVATE = "the text of a data set"
SESSION = {
    "started": "2026-01-01T00:00:00+00:00",
    "command": ["structkv-bench", "run", "results_dir=/home/someone/runs"],
    "git": {"commit": "a" * 40, "dirty": True},
    "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    "platform": "Linux",
    "host": "a-host-name",
    "cpus": 2,
    "device": "NVIDIA H200",
    "model": {"weights": "b1c5b552321151dc", "tokenizer": "4936d6579510d0ed"},
    "sources": {"/home/someone/squad.json": "5" * 16},
}


@cache
def cells(overrides: tuple[str, ...]) -> list[Cell]:
    """The cells of a run."""
    return [cell for group in plan(compose(list(overrides))) for cell in group.cells]


def row(cell: Cell, sample: int, **values: Any) -> dict[str, Any]:
    """full is always right, streaming_llm once, snapkv and structkv nearly as often as each other."""
    right = {"full": N, "streaming_llm": 1, "snapkv": 12}.get(cell.method_name, 11)
    aware = cell.method_name == "structkv"
    return {
        "sample": f"{sample:04d}",
        "status": "ok",
        "score": float(sample < right) * (1.0 if cell.subtask != "fwe" else 0.8),
        "prompt_sha256": f"{cell.subtask}{cell.length}{sample}",
        "prediction": PRIVATE,
        "references": [PRIVATE],
        "truncated_tokens": 0,
        "kv_bytes": 1000 if cell.method_name == "full" else 99,
        "kv_bytes_full": 1000,
        "prefill_pct": 57.33 if aware else 100.0,
        "prefill_s": 1.5,
        "decode_s": 0.5,
        "pivot": 13 if aware else None,
        "fields": {"depth": 10 * (sample % 10)},
        **values,
    }


def failed(cell: Cell, sample: int, error: str) -> dict[str, Any]:
    """A row of a sample that failed."""
    kept = row(cell, sample)
    about = {key: kept[key] for key in ("sample", "prompt_sha256", "truncated_tokens", "fields")}
    return about | {"status": "failed", "pivot": None, "error": error}


def lay(
    place: Path,
    experiment: str,
    overrides: tuple[str, ...],
    make: Callable[[Cell, int], dict[str, Any] | None] = row,
    session: dict[str, Any] = SESSION,
    names: dict[str, str] | None = None,
    left_out: dict[str, str] | None = None,
) -> None:
    """Store an experiment.

    `make` gives None where a sample was not run; `names` are what cells call themselves.
    """
    manifest = read_manifest(place, experiment) or Manifest(experiment)
    asked = {
        c.folder: {"samples": N, "names": c.names | (names or {}), "config": c.config}
        for c in cells(overrides)
    }
    manifest.add(asked, left_out or {}, [])
    write_manifest(place, manifest)
    for cell in cells(overrides):
        rows = [made for sample in range(N) if (made := make(cell, sample)) is not None]
        if rows:
            folder = place / cell.folder
            folder.mkdir(exist_ok=True)
            about = {key: asked[cell.folder][key] for key in ("names", "config")}
            about |= {"key": cell.key, "sessions": [session]}
            (folder / "cell.json").write_text(json.dumps(about), encoding="utf-8")
            text = "".join(json.dumps(one) + "\n" for one in rows)
            (folder / "rows.jsonl").write_text(text, encoding="utf-8")
