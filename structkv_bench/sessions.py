"""When a session of a cell ended: told by its rows, so that one that was killed tells it too."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def note_end(sessions: list[dict[str, Any]], rows_file: Path) -> bool:
    """Give the latest session the time of the last row that it wrote, as `ended`; whether that was news.

    A row's own time would make two runs of the same thing differ. The file has it, until it is copied or
    added to; so it is noted when a session ends and, of one that was killed, before the next one writes.
    Without a row there is no end.
    """
    if not sessions or "ended" in sessions[-1] or "started" not in sessions[-1]:
        return False
    with suppress(OSError):
        written = datetime.fromtimestamp(rows_file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        if written >= sessions[-1]["started"]:
            sessions[-1]["ended"] = written
            return True
    return False
