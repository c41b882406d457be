"""Where the reference data of the project's developers lies, beside the checkout; absent elsewhere."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared(path: str) -> Path:
    """A file or folder of the reference data; skips the test without it."""
    found = SHARED / path
    if not found.exists():
        pytest.skip(f"reference data {path} is not beside this checkout")
    return found
