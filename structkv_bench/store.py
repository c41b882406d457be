"""Results on disk: a folder per cell with cell.json (what ran) and rows.jsonl (a line per sample).

Rows are only ever appended, each in one write that is synced: a run that is killed loses at most the
line it was writing, and the next run cuts that line off before it goes on. A shard of a run has files of
its own beside these, rows.SHARD.jsonl and cell.SHARD.json (its sessions), so that no two machines ever
write to the same file; readers merge them.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.paths import expanded, replace_whole
from structkv_bench.plan import Cell
from structkv_bench.sessions import note_end

CELL_FILE, ROWS_FILE, LOCK_FILE = "cell.json", "rows.jsonl", ".lock"
ABOUT = {"key", "names", "config", "sessions"}
"""What a cell.json holds."""

Row = dict[str, Any]


class Store:
    """A results folder, as a whole run or one of its shards writes to it."""

    def __init__(self, results_dir: str | Path, shard: str = "") -> None:
        self.path, self.shard = expanded(results_dir), shard

    def check_writable(self) -> None:
        """Create the folder and try a write there.

        Raises:
            UserError: the folder can't be created, is read-only or full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as probe:
                probe.write(bytes(4096))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            raise UserError(f"results_dir={self.path}: can't be written to ({_reason(error)})") from error

    @contextmanager
    def locked(self, cells: Collection[Cell]) -> Iterator[None]:
        """Keep other runs on this machine from adding rows to the same cells; shards may share one.

        A lock never outlives its process. Before it goes, the session's end is noted.

        Raises:
            UserError: another run holds one of them.
        """
        kind = fcntl.LOCK_SH if self.shard else fcntl.LOCK_EX
        with open(self.path / LOCK_FILE, "a+b") as file:
            for cell in cells:
                try:
                    fcntl.lockf(file, kind | fcntl.LOCK_NB, 1, lock_place(cell.key))
                except OSError as error:
                    raise UserError(
                        f"{self.path / cell.folder}: another run is adding rows to it; when that has ended, "
                        "the same command does what is left"
                    ) from error
            try:
                yield
            finally:
                for cell in cells:
                    self.cell(cell).end()

    def cell(self, cell: Cell) -> CellStore:
        """Where the rows of a cell are kept."""
        return CellStore(self.path / cell.folder, cell, self.shard)


@dataclass(frozen=True)
class CellStore:
    """The folder of one cell."""

    path: Path
    cell: Cell
    shard: str = ""

    def rows(self) -> dict[str, Row]:
        """Rows by sample id; see `read_rows`."""
        return read_rows(self.path)[0]

    def check(self, model: dict[str, str]) -> None:
        """Make sure that rows of this model may be added to those there are.

        Rows whose cell.json was lost get a new one: its config is known, for it is hashed in the name.

        Raises:
            UserError: cell.json is damaged, or other weights or another tokenizer made the rows.
        """
        file = self.path / CELL_FILE
        if not file.exists():
            if not self.rows():
                return
            self.describe()
        sessions = read_about(file)["sessions"]
        for session in sessions:
            known = session.get("model", model)
            if known != model:
                raise UserError(
                    f"{self.path}: its rows are of another model than {self.cell.model.path} is now "
                    f"({known}, not {model}); give another results_dir"
                )
        if not sessions and self.rows():
            self.begin({"model": model})

    def begin(self, provenance: Row) -> None:
        """Note that a session starts to add rows: what it runs, and on what.

        Raises:
            UserError: the folder can't be written to, or its cell.json is damaged.
        """
        about, file = self.describe(), self.path / _named(CELL_FILE, self.shard)
        if self.shard:
            about = _read(file, {"sessions"}) if file.exists() else {"sessions": []}
        note_end(about["sessions"], self._rows_file)
        about["sessions"].append(provenance)
        self._write(file, about)

    def end(self) -> None:
        """Note when the latest session ended; if that can't be done, the next `begin` does it."""
        file = self.path / _named(CELL_FILE, self.shard)
        with suppress(UserError):
            about = _read(file, {"sessions"})
            if note_end(about["sessions"], self._rows_file):
                self._write(file, about)

    def describe(self) -> Row:
        """The cell.json that there is; where there is none it is written, without a session.

        Raises:
            UserError: as for `begin`.
        """
        file = self.path / CELL_FILE
        if file.exists():
            return _read(file, ABOUT)
        about = {"key": self.cell.key, "names": self.cell.names, "config": self.cell.config, "sessions": []}
        self._write(file, about)
        return about

    def append(self, row: Row) -> None:
        """Add a row, on disk when this returns. Not before `begin`.

        Raises:
            UserError: the line can't be written; the rows before it are as they were.
        """
        text = json.dumps(row, ensure_ascii=False, sort_keys=True, allow_nan=False)
        # JSON's own escape for half a surrogate pair, which UTF-8 has no bytes for
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            fd = os.open(self._rows_file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._unwritten(error) from error
        try:
            _append(fd, line)
        except OSError as error:
            raise self._unwritten(error) from error
        finally:
            os.close(fd)

    @property
    def _rows_file(self) -> Path:
        return self.path / _named(ROWS_FILE, self.shard)

    def _write(self, file: Path, about: Row) -> None:
        try:
            replace_whole(file, json.dumps(about, ensure_ascii=False, indent=2) + "\n")
        except OSError as error:
            raise self._unwritten(error) from error

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: can't write results ({_reason(error)}); all rows so far are safe: "
            "free some space or mend the folder, and the same command goes on from here"
        )


def cell_folders(results_dir: str | Path) -> list[Path]:
    """The folders of a results folder's cells, by name."""
    return [folder for folder in sorted(expanded(results_dir).glob("*")) if (folder / CELL_FILE).exists()]


def read_cells(results_dir: str | Path) -> Iterator[tuple[Row, list[Row], int]]:
    """What ran, the rows, and how many lines were damaged, for each cell of a results folder.

    Args:
        results_dir: where `structkv-bench run` put them.

    Raises:
        UserError: there are no results, or a cell.json is damaged.
    """
    found = cell_folders(results_dir)
    if not found:
        raise UserError(f"{results_dir}: no results there; `structkv-bench run` makes them")
    for folder in found:
        rows, torn = read_rows(folder)
        yield read_about(folder / CELL_FILE), list(rows.values()), torn


def read_rows(folder: Path) -> tuple[dict[str, Row], int]:
    """Rows by sample id, and how many lines were damaged; a line without its end is one.

    Of a sample run twice counts the row that worked; of two such the later one, shards before whole runs.
    """
    rows: dict[str, Row] = {}
    torn = 0
    for file in rows_files(folder):
        *lines, rest = file.read_bytes().split(b"\n")
        torn += bool(rest)
        for line in lines:
            try:
                row = json.loads(line)
                if not (0 <= row.get("score", 0) <= 1 and row.get("kv_bytes_full", 1) > 0):
                    raise ValueError
                ok = {"ok": True, "failed": False}[row["status"]]
                if ok or rows.get(row["sample"], row)["status"] != "ok":
                    rows[row["sample"]] = row
            except (ValueError, KeyError, TypeError, AttributeError):
                torn += 1
    return rows, torn


def rows_files(folder: Path) -> list[Path]:
    """The files with a cell's rows: those of its shards by name, then that of whole runs."""
    return sorted(folder.glob("rows.*jsonl"))  # a shard's name is hexadecimal, so before "jsonl"


def read_about(file: Path) -> Row:
    """The content of a cell.json, the sessions of shards beside it included.

    Raises:
        UserError: it is damaged, or can't be read.
    """
    about = _read(file, ABOUT)
    for shard in sorted(file.parent.glob("cell.*.json")):
        about["sessions"] += _read(shard, {"sessions"})["sessions"]
    return about


def _read(file: Path, keys: set[str]) -> Row:
    try:
        about: Row = json.loads(file.read_bytes())
        if about.keys() >= keys and about.get("config", True) and isinstance(about["sessions"], list):
            return about
    except OSError as error:
        raise UserError(f"{file}: can't be read ({_reason(error)})") from error
    except (ValueError, AttributeError):
        pass  # no JSON, or no object
    raise UserError(
        f"{file}: damaged; delete it, and the next run of this cell keeps the rows and writes it anew"
    )


def _named(file: str, shard: str) -> str:
    """A shard's own file beside one of whole runs: rows.SHARD.jsonl beside rows.jsonl."""
    stem, _, suffix = file.partition(".")
    return f"{stem}.{shard}.{suffix}" if shard else file


def lock_place(key: str) -> int:
    """One byte of one lock file stands for each cell."""
    return int(key[:12], 16)


def _append(fd: int, line: bytes) -> None:
    size = _whole(fd)
    try:
        if os.write(fd, line) != len(line):
            raise OSError("the disk took part of a line only")
        os.fsync(fd)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, size)
        raise


def _whole(fd: int) -> int:
    """Size of the file, after a line that a crash tore is cut off."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        size = os.pread(fd, size, 0).rfind(b"\n") + 1
        os.ftruncate(fd, size)
    return size


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
