"""A result set as the regression gate compares it: from a results folder, or from a committed baseline file.

A baseline file has what a comparison needs and nothing else: hashes in place of prompts and answers, no host
names, and of an absolute path its last part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.paths import expanded, write_whole
from structkv_bench.report.naming import kv_ratio, method_label, task_label
from structkv_bench.store import Row, read_cells

SCHEMA = 1
"""Of the baseline file; another one's file is refused."""
MADE_BY = ("git", "versions", "cuda", "platform", "cpus", "device", "numerics")
"""What a baseline tells of the sessions behind it."""
KEPT = (
    *("sample", "status", "prompt_sha256", "score", "extra_scores", "tie_margin"),
    *("kept_entries", "kv_bytes", "prefill_pct", "prefill_s", "decode_s", "decode_rows"),
)
"""Of a row; and the hash of its generated ids."""


@dataclass(frozen=True)
class Cell:
    """One cell's rows, less their texts."""

    key: str
    names: dict[str, str]
    config: dict[str, Any]
    model: dict[str, str] | None
    """Hashes of weights and tokenizer; None: its sessions tell of none."""
    rows: list[Row]

    @property
    def label(self) -> str:
        """What it is, in the words of the tables."""
        about, ratio = {"names": self.names, "config": self.config}, kv_ratio(asdict(self))
        kv = "" if ratio is None else f" {ratio}"
        return f"{self.names['model']} {method_label(about)}{kv} {task_label(about)} {self.config['length']}"


@dataclass(frozen=True)
class ResultSet:
    """The cells of one results folder or baseline file."""

    place: str
    """As the user gave it."""
    cells: dict[str, Cell]
    """By key."""
    made_by: list[Row]
    """Code, versions and machine of the sessions, each once."""

    @property
    def samples(self) -> int:
        """Of all cells."""
        return sum(len(cell.rows) for cell in self.cells.values())


def read(place: Path) -> ResultSet:
    """A baseline file or a results folder.

    Raises:
        UserError: there is neither, it is damaged, or it is of another schema.
    """
    file = expanded(place)
    return _from_folder(place) if file.is_dir() else _from_file(place, file)


def write(place: Path, results: ResultSet) -> None:
    """Write a baseline file, a row per line.

    Raises:
        UserError: a sample failed, so that nothing could be held to it; or the file can't be written.
    """
    failed = sum(row["status"] != "ok" for cell in results.cells.values() for row in cell.rows)
    if failed:
        raise UserError(f"{results.place}: {failed} samples failed; a baseline needs them all")
    made = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"schema": SCHEMA, "made": made, "made_by": results.made_by}
    cells = sorted(results.cells.values(), key=lambda cell: cell.label)
    text = _with_list(
        head, "cells", (_with_list(_head(cell), "rows", map(_line, cell.rows)) for cell in cells)
    )
    write_whole(expanded(place), text + "\n")


def _from_folder(place: Path) -> ResultSet:
    cells, made_by = {}, []
    for about, rows, _ in read_cells(place):
        sessions = about["sessions"]
        model = next((session["model"] for session in reversed(sessions) if session.get("model")), None)
        names, config = _placeless(about["names"]), _placeless(about["config"])
        cells[about["key"]] = Cell(about["key"], names, config, model, [_reduced(row) for row in rows])
        made_by += [{name: session.get(name) for name in MADE_BY} for session in sessions]
    return ResultSet(str(place), cells, [by for i, by in enumerate(made_by) if by not in made_by[:i]])


def _from_file(place: Path, file: Path) -> ResultSet:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{place}: can't be read ({error.strerror}); --update-baseline makes one") from error
    except ValueError:
        content = None
    schema = content.get("schema") if isinstance(content, dict) else None
    if isinstance(schema, int) and schema != SCHEMA:
        raise UserError(
            f"{place}: a baseline of schema {schema}, not {SCHEMA}; make it anew with --update-baseline"
        )
    try:
        cells = [Cell(**cell) for cell in content["cells"]]
        if not cells:
            raise UserError(f"{place}: a baseline of no cells; make it anew with --update-baseline")
        return ResultSet(str(place), {cell.key: cell for cell in cells}, list(content["made_by"]))
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{place}: no baseline, or a damaged one; make it anew with --update-baseline"
        ) from error


def _reduced(row: Row) -> Row:
    """What is compared of a row."""
    answer = {"generated_sha256": _sha256(row["generated_ids"])} if "generated_ids" in row else {}
    return {name: row[name] for name in KEPT if name in row} | answer


def _sha256(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def _placeless(value: Any) -> Any:
    """JSON with the last part of each absolute path in its place: a baseline is not of one machine."""
    if isinstance(value, dict):
        return {key: _placeless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_placeless(item) for item in value]
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value


def _head(cell: Cell) -> Row:
    return {name: value for name, value in asdict(cell).items() if name != "rows"}


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _with_list(head: Row, name: str, lines: Iterable[str]) -> str:
    """A JSON object with a list at its end, each of whose items begins a line."""
    items = ",\n".join(lines)
    return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "{name}": [\n{items}\n]}}'
