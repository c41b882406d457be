"""Where things lie that outlive a run."""

from __future__ import annotations

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


def cache_folder() -> Path:
    """The user's cache folder for converted models and calibration (follows XDG_CACHE_HOME)."""
    return user_cache_path("structkv-bench")
