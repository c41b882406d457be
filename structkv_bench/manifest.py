"""What a results folder was asked to hold: a file per experiment, with its cells and their samples.

Rows alone can't tell a run that is whole from one that has hardly begun; tables and `status` read it here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.paths import expanded, write_whole

FOLDER = "manifests"
CELL = {"samples", "names", "config"}
"""What a manifest says of each cell."""
UNNAMED = "run"
"""Stands for the experiment of a run that names none."""


@dataclass
class Manifest:
    """One experiment's cells; a later run of it adds its own."""

    experiment: str
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By the cell's folder: `samples` asked for, and `names` and `config` as in its cell.json."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Subtasks whose texts were not there, each with the reason."""

    def add(self, cells: dict[str, dict[str, Any]], left_out: dict[str, str], asked: Iterable[str]) -> None:
        """Take in a further run, which asked for the subtasks `asked`."""
        for folder, cell in cells.items():
            known = self.cells.get(folder, cell)
            self.cells[folder] = cell | {"samples": max(cell["samples"], known["samples"])}
        self.left_out = {name: why for name, why in self.left_out.items() if name not in set(asked)}
        self.left_out |= left_out


def read_manifest(results_dir: str | Path, experiment: str) -> Manifest | None:
    """What was asked for under this name; None: nothing.

    Raises:
        UserError: the file is damaged or can't be read.
    """
    file = _file(results_dir, experiment)
    try:
        manifest = Manifest(**json.loads(file.read_bytes()))
        if not isinstance(manifest.experiment, str):
            raise TypeError
        if not all(cell.keys() >= CELL for cell in manifest.cells.values()):
            raise ValueError
        return manifest
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{file}: can't be read ({error.strerror})") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: damaged; delete it, and the same run command writes it anew") from error


def read_manifests(results_dir: str | Path) -> list[Manifest]:
    """Every experiment of a results folder, by name."""
    names = sorted(file.stem for file in (expanded(results_dir) / FOLDER).glob("*.json"))
    return [found for name in names if (found := read_manifest(results_dir, name)) is not None]


def write_manifest(results_dir: str | Path, manifest: Manifest) -> None:
    """Put it in its place, whole.

    Raises:
        UserError: it can't be written.
    """
    text = json.dumps(vars(manifest), ensure_ascii=False, indent=1) + "\n"
    write_whole(_file(results_dir, manifest.experiment), text)


def _file(results_dir: str | Path, experiment: str) -> Path:
    return expanded(results_dir) / FOLDER / f"{experiment}.json"
