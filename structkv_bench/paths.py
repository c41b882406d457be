"""Where things lie that outlive a run."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_path


def cache_folder() -> Path:
    """The user's cache folder for converted models and calibration (follows XDG_CACHE_HOME)."""
    return user_cache_path("structkv-bench")
