"""What fault_drills.py stands on: runs as processes that can be killed, and what is left of them.

A run is forked from a process that has imported everything and computed nothing, so that fifty of them can be
killed in minutes: it composes, loads the model, computes and writes by itself, as `structkv-bench` does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from structkv_bench.cli import main

MEASURED = {"prefill_s", "prefill_parts_s", "decode_s"}
"""Of a row: what two runs of the same thing never have in common."""
PATIENCE = 600.0
"""Seconds after which a drill is given up."""

Rows = dict[str, dict[str, bytes]]
"""By cell and sample, as they stand in a file, without what is measured."""


class DrillError(Exception):
    """A drill went otherwise than it must."""


@dataclass(frozen=True)
class Drill:
    """What all drills run, and how hard they try."""

    overrides: Sequence[str]
    expected: Rows
    """Of the undisturbed run."""
    first_row_s: float
    """Until it wrote its first row,"""
    row_s: float
    """and from one sample to the next."""
    kills: int = 1
    samples: int = 1
    """Unless a drill says otherwise; they are the first ones of the undisturbed run."""
    seed: int = 0

    def run(self, results: Path, *more: str) -> list[str]:
        """The arguments of a run."""
        own = {"task.samples": str(self.samples), "results_dir": str(results)}
        own |= dict(text.split("=", 1) for text in (*self.overrides, *more))
        return ["run", *(f"{key}={value}" for key, value in own.items())]

    def check(self, results: Path, samples: int) -> int:
        """How many rows there are, after making sure that they are the undisturbed run's.

        Raises:
            DrillError: a row is missing, is there twice, or differs.
        """
        wanted = {cell: dict(sorted(rows.items())[:samples]) for cell, rows in self.expected.items()}
        found = rows_of(results)
        twice = [place for place, count in lines_of(results).items() if count > 1]
        if twice:
            raise DrillError(f"{len(twice)} rows are there twice, such as {twice[0]}")
        for cell, rows in wanted.items():
            if lost := rows.keys() - found.get(cell, {}).keys():
                raise DrillError(f"{cell}: {len(lost)} rows are lost, such as {min(lost)}")
            for sample, row in rows.items():
                if found[cell][sample] != row:
                    raise DrillError(f"{cell}, sample {sample}: {found[cell][sample]!r}, not {row!r}")
        if extra := found.keys() - wanted.keys():
            raise DrillError(f"cells that nobody asked for: {', '.join(sorted(extra))}")
        return sum(map(len, wanted.values()))


def undisturbed(overrides: Sequence[str], place: Path, samples: int) -> Drill:
    """The run that all drills are held to.

    Raises:
        DrillError: it fails.
    """
    place.mkdir()
    drill = Drill(overrides, {}, 0, 0)
    began, results, log = time.monotonic(), place / "results", place / "log"
    child = start(drill.run(results, f"task.samples={samples}"), log)
    wait_for_rows(results, 1, child)
    first = time.monotonic()
    must_work(child, log)
    return replace(
        drill,
        expected=rows_of(results),
        first_row_s=first - began,
        row_s=(time.monotonic() - first) / samples,
    )


def start(arguments: Sequence[str], log: Path, before: Callable[[], Any] = lambda: None) -> int:
    """Begin a command in a process of its own; its number.

    Args:
        arguments: of the command.
        log: what it prints is added there.
        before: called in the new process before the command.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        said = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(said, 1)
        os.dup2(said, 2)
        before()
        code = main(list(arguments))
        sys.stdout.flush()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        os._exit(code)


def ended(child: int) -> int | None:
    """Exit code of a process, negative if a signal ended it; None: it is still at work."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def end_of(child: int) -> int:
    """Exit code of a process, once it has one."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child: int) -> None:
    """Kill -9, now."""
    os.kill(child, signal.SIGKILL)
    end_of(child)


def must_end(
    arguments: Sequence[str], log: Path, code: int = 0, before: Callable[[], Any] = lambda: None
) -> None:
    """Run a command to its end.

    Raises:
        DrillError: it ends with another code.
    """
    must_work(start(arguments, log, before), log, code)


def must_work(child: int, log: Path, code: int = 0) -> None:
    """Wait for the end of a process.

    Raises:
        DrillError: it ends with another code.
    """
    found = end_of(child)
    if found != code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise DrillError(f"ended with {found}, not {code}: {' '.join(last)}")


def wait_for_rows(results: Path, count: int, child: int, files: str = "rows*.jsonl") -> None:
    """Wait until a process has written so many rows.

    Raises:
        DrillError: it ended before, or it takes for ever.
    """
    until = time.monotonic() + PATIENCE
    while line_count(results, files) < count:
        if (code := ended(child)) is not None:
            raise DrillError(f"ended with {code} before row {count}")
        if time.monotonic() > until:
            kill(child)
            raise DrillError(f"no row {count} within {PATIENCE:g} s")
        time.sleep(0.002)


def line_count(results: Path, files: str = "rows*.jsonl") -> int:
    """Whole lines in the rows files of all cells."""
    count = 0
    for file in results.glob(f"*/{files}"):
        with suppress(OSError):
            count += file.read_bytes().count(b"\n")
    return count


def torn_files(results: Path) -> int:
    """Rows files that end within a line."""
    ends = [file.read_bytes()[-1:] for file in results.glob("*/rows*.jsonl")]
    return sum(end not in (b"", b"\n") for end in ends)


def rows_of(results: Path) -> Rows:
    """All rows that worked."""
    found: Rows = {}
    for file in sorted(results.glob("*/rows*.jsonl")):
        for row in _rows(file):
            plain = {key: value for key, value in row.items() if key not in MEASURED}
            line = json.dumps(plain, sort_keys=True, ensure_ascii=False).encode()
            found.setdefault(file.parent.name, {})[row["sample"]] = line
    return found


def lines_of(results: Path) -> Counter[str]:
    """How often each row is there, in whichever file."""
    return Counter(
        f"{file.parent.name}, sample {row['sample']}"
        for file in results.glob("*/rows*.jsonl")
        for row in _rows(file)
    )


def _rows(file: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, file.read_bytes().splitlines()) if row["status"] == "ok"]
