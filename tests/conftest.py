"""The suite runs unplugged: any connection attempt is a failure."""

from __future__ import annotations

import os
import socket

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _unplugged(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(f"the tests tried to connect to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
