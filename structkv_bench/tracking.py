"""Results to W&B: a run per group of cells, and one per verdict of the regression gate.

W&B is told when all is evaluated, stored and printed, out of the store and by a process of its own
(wandb_child.py) that is given up after a while: whatever W&B does, no row is lost or late, no measured second
has an upload beside it, and the exit code stays. Each try logs all there is under the same W&B run id.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structkv_bench.errors import UserError, kind_and_line, one_line
from structkv_bench.paths import expanded
from structkv_bench.wandb_child import NO_KEY

if TYPE_CHECKING:
    from structkv_bench.config import Setup
    from structkv_bench.gate.regress import Verdict
    from structkv_bench.plan import Cell, Group
    from structkv_bench.store import Row, Store
    from structkv_bench.task import PromptFormat, Sample

INIT_S = 30.0
"""How long W&B may take to begin a run,"""
GIVE_UP_S = 120.0
"""to log one altogether,"""
CHECK_S = 15.0
"""and to say whether it has a key."""
HEAD = 300
"""Characters of a prompt in the table of samples."""
PROJECT = "structkv-bench"
FIGURES = "figures"
"""Folder of a results folder whose PNG files are logged too."""
SAMPLES = ("method", "sample", "status", "prompt", "prediction", "references", "score", "tie_margin", "error")


class Wandb(StrEnum):
    """What becomes of results beside the results folder."""

    DISABLED = "disabled"
    OFFLINE = "offline"
    ONLINE = "online"


@dataclass(frozen=True)
class Logged:
    """One W&B run, as plain JSON for the process that logs it."""

    init: dict[str, Any]
    """Arguments of wandb.init; an `id` of None is a new one."""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Columns and data of each."""
    images: dict[str, str] = field(default_factory=dict)
    """Files by name."""
    files: dict[str, str] = field(default_factory=dict)
    """Files of the artefact, by their name in it."""
    init_timeout: float = field(default_factory=lambda: INIT_S)


def check(mode: Wandb) -> None:
    """Refuse to go online without a key, before anything runs.

    Raises:
        UserError: W&B has no key, or one that can't be.
    """
    if mode is not Wandb.ONLINE:
        return
    with suppress(OSError):  # what else is amiss is told when there is something to log
        code, said = _child(["check"], "", CHECK_S)
        if code == NO_KEY:
            raise UserError(f"wandb online: {said}; or log offline, and `wandb sync` it later")


def log_results(setups: Sequence[Setup], mode: Wandb) -> None:
    """Log what the store holds of a run, group by group; a warning on stderr if that fails, once."""
    if mode is not Wandb.DISABLED:
        _log_all(_of_groups(setups, mode), "the results folder")


def log_verdict(verdict: Verdict, folder: Path, mode: Wandb) -> None:
    """Log what the gate found; a warning on stderr if that fails."""
    if mode is not Wandb.DISABLED:
        _log_all([_of_verdict(verdict, folder, mode)], "the verdict above")


def _log_all(runs: Iterable[Logged], kept: str) -> None:
    """Log one after the other, until one fails."""
    try:
        for logged in runs:
            # JSON's own escapes, so that half a surrogate pair passes too
            code, said = _child([], json.dumps(asdict(logged)), GIVE_UP_S)
            if code != 0:
                break
        else:
            return
    except Exception as error:  # of a plug-in's task, say: the results are there, that is what counts
        said = kind_and_line(error)
    print(f"warning: W&B has not got all: {said}; {kept} is complete", file=sys.stderr)


def _child(arguments: list[str], text: str, give_up_s: float) -> tuple[int | None, str]:
    """Exit code of the process that speaks to W&B, and its last words; code None: it was given up.

    Files, not pipes: neither a child that does not read nor one of its own children can hold us up.
    """
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+", errors="replace") as said:
        given.write(text)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "structkv_bench.wandb_child", *arguments],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(give_up_s)
        except BaseException as error:  # Ctrl-C too
            os.killpg(process.pid, signal.SIGKILL)  # with W&B's own service
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = None
        said.seek(0)
        lines = said.read().strip().splitlines()
    return code, f"no answer in {give_up_s:g} s" if code is None else one_line(lines[-1] if lines else code)


def _of_groups(setups: Sequence[Setup], mode: Wandb) -> Iterator[Logged]:
    """Of each group that has results; a task whose texts are not there has none."""
    from structkv_bench.plan import Group, plan
    from structkv_bench.store import CELL_FILE, Store

    store = Store(setups[0].results_dir)
    for group in plan(setups):
        stored = tuple(cell for cell in group.cells if (store.cell(cell).path / CELL_FILE).exists())
        if stored:
            yield _of_group(Group(stored), store, setups[0].experiment, mode)


def _of_group(group: Group, store: Store, experiment: str | None, mode: Wandb) -> Logged:
    """The results of one group's cells."""
    from structkv_bench.report.results import line
    from structkv_bench.store import CELL_FILE, read_about

    first = group.cells[0]
    heads = dict(_heads(group))
    about = {cell.key: read_about(store.cell(cell).path / CELL_FILE) for cell in group.cells}
    rows = {cell.key: list(store.cell(cell).rows().values()) for cell in group.cells}
    lines = {cell.key: line(about[cell.key], rows[cell.key]) for cell in group.cells}
    labels = {key: _label(one) for key, one in lines.items()}
    config = {name: value for name, value in first.config.items() if name != "method"}
    methods = {labels[cell.key]: {"key": cell.key, **cell.config["method"]} for cell in group.cells}
    names = {"names": {**about[first.key]["names"], "experiment": experiment}, "methods": methods}
    samples = [_sample(labels[key], row, heads) for key in rows for row in rows[key]]
    return Logged(
        _init(store.path, mode, _id(first), f"{first.model.name} {first.subtask} {first.length}", "run"),
        config | names,
        {f"{name}/{labels[key]}": value for key in lines for name, value in _numbers(lines[key])},
        {"cells": _table(list(lines[first.key]), [list(one.values()) for one in lines.values()]),
         "samples": _table(SAMPLES, samples)},
        {file.stem: str(file) for file in sorted((store.path / FIGURES).glob("*.png"))},
        dict(_files(store, group.cells)),
    )  # fmt: skip


def _init(folder: Path, mode: Wandb, id: str | None, name: str, kind: str) -> dict[str, Any]:
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    return {
        "dir": str(folder),
        "mode": str(mode),
        "id": id,
        "name": name,
        "project": project,
        "job_type": kind,
    }


def _id(cell: Cell) -> str:
    """Of the W&B run: whatever is measured on the same prompts and model stands in the same one."""
    return hashlib.sha256(cell.prompts_key.encode()).hexdigest()[:16]


def _label(line: dict[str, Any]) -> str:
    return f"{line['method']}{'' if line['kv_ratio'] is None else ' ' + str(line['kv_ratio'])}"


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("score", "n", "failed", "kv_bytes_pct", "prefill_pct", "pivot", "prefill_s", "decode_s"):
        if line[name] is not None:
            yield name, line[name]


def _heads(group: Group) -> Iterator[tuple[str, str]]:
    """How each sample's prompt begins; rows do not hold it."""
    from structkv_bench import models
    from structkv_bench.samples import prompts_of

    prompts = models.inspect(group.model).prompts
    for prompt in prompts_of(group, prompts):
        yield prompt.sample.id, _head(prompt.sample, prompts)


def _head(sample: Sample, prompts: PromptFormat) -> str:
    text = sample.prompt if isinstance(sample.prompt, str) else prompts.decode(list(sample.prompt[:HEAD]))
    return text[:HEAD]


def _sample(label: str, row: Row, heads: dict[str, str]) -> list[Any]:
    """A line of the table of samples."""
    told = {name: row.get(name) for name in SAMPLES}
    error = (row.get("error") or "").strip().splitlines()
    references = json.dumps(row.get("references"), ensure_ascii=False)
    told |= {"method": label, "prompt": heads.get(row["sample"]), "references": references}
    return list((told | {"error": error[-1] if error else None}).values())


def _table(columns: Sequence[str], data: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {"columns": list(columns), "data": [list(row) for row in data], "allow_mixed_types": True}


def _files(store: Store, cells: Sequence[Cell]) -> Iterator[tuple[str, str]]:
    """What is stored of the cells, by the name that it gets."""
    for cell in cells:
        for file in sorted(store.cell(cell).path.glob("*.json*")):
            yield f"{cell.folder}/{file.name}", str(file)


def _of_verdict(verdict: Verdict, folder: Path, mode: Wandb) -> Logged:
    from structkv_bench.gate.verdict import findings

    cells = [
        [c.label, c.samples, c.ties, c.score_before, c.score_after, len(c.faults)] for c in verdict.cells
    ]
    columns = ("cell", "samples", "near_ties", "score_before", "score_after", "faults")
    return Logged(
        _init(expanded(folder), mode, None, "regression gate", "regress"),
        {"baseline": verdict.baseline, "current": verdict.current},
        {"exit_code": verdict.exit_code, "verdict": verdict.headline, "regressed": len(verdict.regressed),
         "cells": len(verdict.cells), "near_ties": sum(cell.ties for cell in verdict.cells)},
        {"findings": _table(("cell", "check", "says"), findings(verdict)), "cells": _table(columns, cells)},
    )  # fmt: skip
