"""Where things lie that outlive a run."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from platformdirs import user_cache_path

from structkv_bench.errors import UserError


def expanded(path: str | Path) -> Path:
    """A path as the user means it: ~ is a home folder.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(f"{path}: {error}") from error


def write_whole(file: Path, text: str) -> None:
    """Write a text file that appears whole or not at all; its folder is made.

    Raises:
        UserError: the place is no file's (a folder, a device), or can't be written to.
    """
    with _written_to(file) as place:
        replace_whole(place, text)


def check_writable(file: Path) -> None:
    """Whether a file that long work is going to write can be written; nothing is left there.

    Raises:
        UserError: as `write_whole` would when the work is done.
    """
    with _written_to(file) as place:
        nearest = next(folder for folder in place.parents if folder.exists())
        draft = _draft(nearest / place.name)
        draft.touch()
        draft.unlink()


@contextmanager
def _written_to(file: Path) -> Iterator[Path]:
    """Where a file really lies; that it can't be written there is one line."""
    try:
        place = file.resolve()  # through a link to what it points to, not in its place
        if not file.name or (place.exists() and not place.is_file()):
            raise UserError(f"{file}: not a file that can be written; give a file's name")
        yield place
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file}: can't be written ({reason})") from error


def _draft(file: Path) -> Path:
    """Beside it; process ids recur on other machines."""
    return file.with_name(f".{file.name}.{secrets.token_hex(4)}")


def replace_whole(file: Path, text: str) -> None:
    """Write a text file that readers find either old or new, on disk when this returns; its folder is made.

    Raises:
        OSError: it can't be written; what was there is as it was.
    """
    draft = _draft(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("w", encoding="utf-8", newline="") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(file)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def cache_folder() -> Path:
    """The user's cache folder for converted models and calibration (follows XDG_CACHE_HOME)."""
    return user_cache_path("structkv-bench")
