"""The suite runs unplugged and leaves the user's cache alone: any connection attempt is a failure."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from structkv_bench.paths import cache_folder

os.environ["HF_HUB_OFFLINE"] = "1"

# A cache of the session's own, but for the converted model, which takes a while to make.
_converted = cache_folder() / "models"
_cache = tempfile.TemporaryDirectory(prefix="structkv-bench-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
_own = Path(_cache.name) / "structkv-bench"
_own.mkdir()
if _converted.is_dir():
    (_own / "models").symlink_to(_converted)


@pytest.fixture(autouse=True)
def _unplugged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(f"the tests tried to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk, to be read and not to be changed."""
    from tests.tiny import save_tiny  # only now: it imports transformers

    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def essays(tmp_path: Path) -> Path:
    """A text whose sentences differ, so that each repeat of a bench has prompts of its own."""
    file = tmp_path / "essays.txt"
    file.write_text("".join(f"The {n}th sentence of them all is not the one before. " for n in range(400)))
    return file
