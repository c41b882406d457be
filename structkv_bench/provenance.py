"""Where rows come from: code, versions, machine and command of a session."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structkv_bench

PACKAGES = ("structkv-bench", "torch", "transformers", "tokenizers", "numpy", "wonderwords", "nltk")
"""Whose versions a prediction may depend on."""


def provenance(device: str | None = None) -> dict[str, Any]:
    """What a session's rows are made by, as plain JSON.

    Args:
        device: as torch names it; None: where a model goes if nothing else is said.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "git": source(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "device": device_name(device),
    }


def source() -> dict[str, Any] | None:
    """Commit of the source tree and whether files differ from it; None outside a checkout of this project."""
    root = Path(structkv_bench.__file__).resolve().parents[1]
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None  # an installed copy may well lie inside some other repository
    return {
        "commit": _git(root, "rev-parse", "--verify", "--quiet", "HEAD"),
        "dirty": _git(root, "status", "--porcelain") != "",
    }


def device_name(device: str | None) -> str:
    """The GPU's name for a cuda device, else the processor's."""
    import torch

    if (device or "cuda").startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def _git(root: Path, *arguments: str) -> str | None:
    with suppress(OSError):
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return None


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
