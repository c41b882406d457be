"""Puts what is tracked of a run into a folder: tables, figures, the data behind both, and their origin.

    python scripts/publish.py results/runs results/smollm2_135m table2 fig1 ...

Rows stay where they are: they hold texts of data sets and the name of the machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from structkv_bench.catalog import preset_values
from structkv_bench.report.drawn import save
from structkv_bench.report.figures import FIGURES
from structkv_bench.report.printed import Wish, print_table
from structkv_bench.report.render import Format
from structkv_bench.report.stored import Stored, load

PRIVATE = {"host", "command", "started", "ended"}
"""Of a session: what says nothing of the numbers, or too much of the machine."""


def publish(results_dir: Path, out: Path, experiment: str) -> None:
    """Write one experiment's files.

    Raises:
        UserError: it has no rows, or such as can't stand in one table.
    """
    wish = Wish(compare=True)
    has_table = preset_values(experiment).get("columns", "subtask") is not None
    for kind, format in (("csv", Format.CSV), ("md", Format.MARKDOWN)) if has_table else ():
        text = print_table(experiment, [results_dir], format, wish)
        (out / f"{experiment}.{kind}").write_text(text + "\n", encoding="utf-8")
    if any(name.startswith(experiment) for name in FIGURES):
        for file in save(experiment, [results_dir], out / "figures"):
            if file.suffix == ".svg":  # ten times the bytes of all the rest
                file.unlink()
    cells = load([results_dir], experiment).cells
    text = json.dumps(provenance(cells), ensure_ascii=False, indent=1) + "\n"
    (out / f"{experiment}.provenance.json").write_text(text, encoding="utf-8")


def provenance(cells: Iterable[Stored]) -> dict[str, Any]:
    """Sessions that made the rows, each once, and what was asked for of each cell."""
    sessions: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    for cell in cells:
        for session in cell.about.get("sessions", ()):
            kept = {key: value for key, value in session.items() if key not in PRIVATE | {"sources"}}
            sessions[json.dumps(kept, sort_keys=True)] = kept
        config = cell.about["config"]
        name = f"{config['subtask']} at {config['length']}"
        asked.setdefault(name, {"samples": cell.asked, "task": config["task"], "cells": 0})["cells"] += 1
    return {"sessions": list(sessions.values()), "prompts": asked}


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[3:]:
        publish(Path(sys.argv[1]), folder, name)
