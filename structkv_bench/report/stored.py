"""Cells as they lie in one or several results folders, for tables and figures: no model, no torch."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.manifest import read_manifest
from structkv_bench.paths import expanded
from structkv_bench.store import CELL_FILE, Row, cell_folders, read_about, read_rows


@dataclass(frozen=True)
class Stored:
    """One cell: what ran, what came of it, and how much was asked for."""

    about: Row
    """`names` and `config`, as in cell.json."""
    rows: dict[str, Row]
    """By sample id."""
    asked: int
    """Samples that an experiment wanted; where none did, those there are."""

    @cached_property
    def ok(self) -> dict[str, Row]:
        """Rows of the samples that worked."""
        return {sample: row for sample, row in self.rows.items() if row["status"] == "ok"}

    @cached_property
    def scores(self) -> dict[str, float]:
        """From 0 to 1, by sample, of those that worked."""
        return {sample: row["score"] for sample, row in self.ok.items()}

    @cached_property
    def kv_pct(self) -> float:
        """Bytes held after the prompt, in percent of the full cache's; their mean."""
        return fmean(100 * row["kv_bytes"] / row["kv_bytes_full"] for row in self.ok.values())

    @cached_property
    def prefill_pct(self) -> float:
        """Tokens that the layers processed, in percent of the prompt's; their mean."""
        return fmean(row["prefill_pct"] for row in self.ok.values())

    @property
    def failed(self) -> int:
        """How many samples failed."""
        return len(self.rows) - len(self.ok)

    @property
    def model(self) -> str:
        """The model's name."""
        return str(self.about["names"]["model"])

    @property
    def subtask(self) -> str:
        """The task within its suite."""
        return str(self.about["config"]["subtask"])

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer."""
        return int(self.about["config"]["length"])


@dataclass
class Evidence:
    """All that was stored for one experiment, or at all."""

    cells: list[Stored]
    left_out: dict[str, str] = field(default_factory=dict)
    """Subtasks whose texts were not there, with the reason."""
    notes: list[str] = field(default_factory=list)
    """Damaged lines, samples found twice."""


@contextmanager
def _without_collector() -> Iterator[None]:
    """Rows hold no cycles, and looking for some while they grow takes longer than reading them.

    What was read is never looked at again; it goes when nothing refers to it, as everything does.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


@_without_collector()
def load(
    results_dirs: Sequence[str | Path], experiment: str | None = None, keys: Collection[str] | None = None
) -> Evidence:
    """The cells of the folders, merged where several have the same.

    Args:
        results_dirs: where `structkv-bench run` put them.
        experiment: only what was asked for under this name, begun or not.
        keys: only these cells, in this order; None: all.

    Raises:
        UserError: there is nothing, a file is damaged, or two folders have rows of different models or
            prompts for the same cell.
    """
    evidence = Evidence([])
    wanted = None if experiment is None else _wanted(results_dirs, experiment, evidence)
    found: dict[str, Stored] = {}
    counts = {"damaged lines were skipped; those samples run again": 0, _TWICE: 0, _CONFLICT: 0}
    for folder in _folders(results_dirs):
        key = folder.name.rpartition(".")[2]
        if (wanted is not None and key not in wanted) or (keys is not None and key not in keys):
            continue
        rows, torn = read_rows(folder)
        counts["damaged lines were skipped; those samples run again"] += torn
        about = read_about(folder / CELL_FILE)
        if key in found:
            _check_same(found[key].about, about, folder)
            rows = _merged(found[key].rows, rows, folder, counts)
        found[key] = Stored(about, rows, 0)
    if wanted is not None:  # in the order of the experiment, begun or not
        found = {key: found.get(key, Stored(asked, {}, 0)) for key, asked in wanted.items()}
    evidence.cells = [
        Stored(cell.about, cell.rows, wanted[key]["samples"] if wanted else len(cell.rows))
        for key, cell in found.items()
    ]
    if keys is not None:
        evidence.cells.sort(key=lambda cell: list(keys).index(cell.about["key"]))
    if not evidence.cells:
        raise UserError(f"{_places(results_dirs)}: no results there; `structkv-bench run` makes them")
    evidence.notes = [f"{count} {what}" for what, count in counts.items() if count]
    return evidence


_TWICE = "samples are in several of the results folders; each counts once"
_CONFLICT = "of them have different predictions there; the first folder's count"


def _wanted(results_dirs: Sequence[str | Path], experiment: str, evidence: Evidence) -> dict[str, Any]:
    """What the folders' manifests ask for under this name, by key."""
    manifests = [found for place in results_dirs if (found := read_manifest(place, experiment))]
    if not manifests:
        raise UserError(
            f"{_places(results_dirs)}: nothing of {experiment} there; "
            f"`structkv-bench run experiment={experiment}` makes it (a copy needs the folder manifests/ too)"
        )
    wanted: dict[str, Any] = {}
    for manifest in manifests:
        evidence.left_out |= manifest.left_out
        for folder, cell in manifest.cells.items():
            key = folder.rpartition(".")[2]
            samples = max(cell["samples"], wanted.get(key, cell)["samples"])
            wanted[key] = cell | {"samples": samples}
    return wanted


def _folders(results_dirs: Sequence[str | Path]) -> Iterator[Path]:
    for place in results_dirs:
        if len(results_dirs) > 1 and not expanded(place).is_dir():
            raise UserError(f"--results {place}: there is no such folder")
        yield from cell_folders(place)


def _check_same(about: Row, other: Row, folder: Path) -> None:
    protocols = about["names"]["protocol"], other["names"]["protocol"]
    if protocols[0] != protocols[1]:
        raise UserError(
            f"{folder}: its protocol is {protocols[1]}, that of the same cell in another results folder "
            f"{protocols[0]}; give folders of one protocol"
        )
    models = [session["model"] for session in about["sessions"] + other["sessions"] if session.get("model")]
    if any(model != models[0] for model in models):
        raise UserError(
            f"{folder}: another model made these rows than those of the same cell in another results folder "
            f"({models[0]} and {models[-1]}); give folders of one model"
        )


def _merged(
    first: dict[str, Row], then: dict[str, Row], folder: Path, counts: dict[str, int]
) -> dict[str, Row]:
    """Rows of both; the first has its say, unless its row failed and the other's did not."""
    merged = dict(first)
    for sample, row in then.items():
        known = first.get(sample)
        if known is None or (known["status"] != "ok" and row["status"] == "ok"):
            merged[sample] = row
            continue
        if known.get("prompt_sha256") != row.get("prompt_sha256"):
            raise UserError(
                f"{folder}: sample {sample} has another prompt than in another results folder "
                "(other texts?); give folders of the same texts"
            )
        counts[_TWICE] += 1
        counts[_CONFLICT] += known.get("prediction") != row.get("prediction")
    return merged


def _places(results_dirs: Sequence[str | Path]) -> str:
    return ", ".join(map(str, results_dirs))
