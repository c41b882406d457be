"""Whole runs of tests: what is typed, and the rows that come of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from structkv_bench.store import ROWS_FILE

MEASURED = {"prefill_s", "prefill_parts_s", "decode_s"}
"""What differs between two runs of the same thing."""


def overrides(model: Path, results: Path, *more: str) -> list[str]:
    chosen = {
        "model": "custom", "model.path": str(model), "model.name": "tiny", "method": "full,snapkv,structkv",
        "method.kv_ratio": "0.2", "task": "niah", "task.haystack": "noise", "task.lengths": "[700]",
        "task.samples": "5", "task.max_new_tokens": "6", "results_dir": str(results),
    }  # fmt: skip
    chosen |= dict(item.split("=", 1) for item in more)
    if chosen["method"] == "full":
        del chosen["method.kv_ratio"]
    return ["run", *(f"{key}={value}" for key, value in chosen.items())]


def rows_of(results: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows per cell folder, without what is measured."""
    return {
        file.parent.name: [
            {key: value for key, value in json.loads(line).items() if key not in MEASURED}
            for line in file.read_text().splitlines()
        ]
        for file in sorted(results.glob(f"*/{ROWS_FILE}"))
    }
