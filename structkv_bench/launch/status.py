"""How far the experiments of a results folder are: from its files alone, no torch and no Slurm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from textwrap import indent

from structkv_bench.errors import UserError
from structkv_bench.launch.claim import State, is_live, read_state
from structkv_bench.launch.shards import FOLDER, Piece, Plan, read_plan
from structkv_bench.locks import is_held
from structkv_bench.manifest import read_manifests
from structkv_bench.paths import expanded
from structkv_bench.store import LOCK_FILE, Row, lock_place, rows_files

COUNTS = ("done", "running", "failed", "missing")
OUTCOME = re.compile(rb'"sample": "((?:[^"\\]|\\.)*)", (?:"score": [-+.\deE]+, )?"status": "(ok|failed)"')
"""In a row as the store writes it, keys in order; a row with others between is parsed."""


@dataclass
class CellStatus:
    """The samples of one cell, by what has become of them: together they are `of`."""

    cell: str
    of: int
    done: int = 0
    running: int = 0
    failed: int = 0
    missing: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    """Traceback of each failed sample."""


@dataclass
class ShardStatus:
    """A shard that is at work, or that ended before it was done."""

    live: bool
    state: State
    reason: str
    plan: Path


@dataclass
class Status:
    """All that there is to tell of a results folder."""

    experiments: dict[str, list[CellStatus]]
    left_out: dict[str, dict[str, str]]
    """Subtasks without texts, by experiment."""
    shards: list[ShardStatus]


Outcomes = dict[str, str | None]
"""By sample: None where it worked, else the traceback."""


def status(results_dir: str | Path) -> Status:
    """How far each cell of each experiment is.

    Raises:
        UserError: nothing was ever asked for there, or a file is damaged.
    """
    root = expanded(results_dir)
    manifests = read_manifests(root)
    if not manifests:
        raise UserError(f"{results_dir}: no runs there; `structkv-bench run` makes them")
    shards = list(_shards(root))  # before the rows: what a shard does meanwhile is counted once
    running: dict[str, set[str]] = {}
    for shard in shards:
        for piece in _pieces(shard) if shard.live else ():
            for cell in piece.cells:
                running.setdefault(cell, set()).update(piece.samples)
    seen: dict[str, Outcomes] = {}
    experiments = {
        m.experiment: [_cell(root, *item, running, seen) for item in m.cells.items()] for m in manifests
    }
    open_cells = {cell.cell for cells in experiments.values() for cell in cells if cell.done < cell.of}
    shards = [
        shard for shard in shards if any(not open_cells.isdisjoint(piece.cells) for piece in _pieces(shard))
    ]
    return Status(experiments, {m.experiment: m.left_out for m in manifests if m.left_out}, shards)


def reason(state: State | None) -> str:
    """Why a shard is not done, in a line."""
    if state is None:
        return "not begun"
    if state.state == "running":
        return f"ended without a word on {state.host} (killed, or out of memory or time)"
    last = f": {state.error.strip().splitlines()[-1]}" if state.error else ""
    return f"{state.state} on {state.host}{last}"


def _shards(root: Path) -> Iterator[ShardStatus]:
    """Shards at work or ended half-way."""
    for file in sorted((root / FOLDER).glob("*/*.json")):
        state = read_state(file)
        if state is not None and state.state != "done" and file.parent.with_suffix(".json").exists():
            live = is_live(file, state)
            yield ShardStatus(
                live, state, "running" if live else reason(state), file.parent.with_suffix(".json")
            )


def _pieces(shard: ShardStatus) -> list[Piece]:
    return _plan(shard.plan).shards[int(shard.state.shard.rpartition(".")[2])]


@cache
def _plan(file: Path) -> Plan:
    return read_plan(file)


def _cell(
    root: Path, folder: str, asked: Row, running: dict[str, set[str]], seen: dict[str, Outcomes]
) -> CellStatus:
    if folder not in seen:
        seen[folder] = outcomes(root / folder)
    its, found = seen[folder], CellStatus(folder, asked["samples"])
    found.done = min(found.of, sum(error is None for error in its.values()))
    left = found.of - found.done
    at_work = {sample for sample in running.get(folder, ()) if its.get(sample, "") is not None}
    found.running = min(left, len(at_work))
    if folder not in running and left and _is_locked(root, folder):  # by a run in a single process
        found.running = left
    found.errors = {sample: error for sample, error in its.items() if error is not None}
    found.failed = min(left - found.running, len(found.errors.keys() - at_work))
    found.missing = left - found.running - found.failed
    return found


def outcomes(folder: Path) -> Outcomes:
    """What became of each sample of a cell, as `store.read_rows` has it, without reading all of each row.

    A score that can't be, which makes a damaged line there, is not seen here.
    """
    found: Outcomes = {}
    for file in rows_files(folder):
        for line in file.read_bytes().split(b"\n")[:-1]:
            outcome = _outcome(line)
            if outcome and (outcome[1] is None or found.get(outcome[0], "") is not None):
                found[outcome[0]] = outcome[1]
    return found


def _outcome(line: bytes) -> tuple[str, str | None] | None:
    """Sample and traceback of a row; None: a damaged line."""
    quick = OUTCOME.search(line, max(0, line.rfind(b'"sample": ')))
    if quick and quick[2] == b"ok" and b"\\" not in quick[1] and line.endswith(b"}"):
        return quick[1].decode(), None
    with suppress(ValueError, KeyError, TypeError):
        row = json.loads(line)
        return row["sample"], {"ok": None, "failed": row.get("error") or "no traceback"}[row["status"]]
    return None


def _is_locked(root: Path, folder: str) -> bool:
    with suppress(OSError, ValueError):
        return is_held(root / LOCK_FILE, lock_place(folder.rpartition(".")[2]))
    return False


def as_json(found: Status) -> str:
    """All of it, for programs."""
    plain = {
        "experiments": {name: [asdict(cell) for cell in cells] for name, cells in found.experiments.items()},
        "left_out": found.left_out,
        "shards": [asdict(s.state) | {"live": s.live, "reason": s.reason} for s in found.shards],
    }
    return json.dumps(plain, ensure_ascii=False, indent=1)


def as_text(found: Status, verbose: bool = False) -> str:
    """A block per experiment with its cells that are not done, then the shards; all cells and tracebacks
    if `verbose`."""
    lines: list[str] = []
    for name, cells in found.experiments.items():
        lines += [f"{name}: {_sums(cells)}", *_cells(cells, verbose)]
        lines += [f"  left out: {subtask}: {why}" for subtask, why in found.left_out.get(name, {}).items()]
    for shard in found.shards:
        state = shard.state
        job = f", job {state.job}" if state.job else ""
        since = f"since {state.started} on {state.host}{job}: {state.done} of {state.of} samples"
        lines.append(f"shard {state.shard}: {f'running {since}' if shard.live else shard.reason + job}")
        if verbose and state.error:
            lines.append(indent(state.error.rstrip(), "    "))
    return "\n".join(lines)


def _sums(cells: Sequence[CellStatus]) -> str:
    sums = {name: sum(getattr(cell, name) for cell in cells) for name in ("of", *COUNTS)}
    whole = sum(cell.done == cell.of for cell in cells)
    told = [f"{sums[name]} {name}" for name in COUNTS[1:] if sums[name]]
    return ", ".join([f"{sums['done']} of {sums['of']} done", *told, f"{whole} of {len(cells)} cells whole"])


def _cells(cells: Sequence[CellStatus], verbose: bool) -> Iterator[str]:
    shown = [cell for cell in cells if verbose or cell.done < cell.of]
    width = max((len(cell.cell) for cell in shown), default=0)
    if shown:
        yield f"  {'cell':<{width}}" + "".join(f"{name:>9}" for name in (*COUNTS, "of"))
    for cell in shown:
        yield f"  {cell.cell:<{width}}" + "".join(f"{getattr(cell, name):>9}" for name in (*COUNTS, "of"))
        for sample, error in cell.errors.items():
            yield f"    {sample}: {error.strip().splitlines()[-1]}"
            if verbose:
                yield indent(error.rstrip(), "      ")
