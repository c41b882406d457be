"""Where rows come from: code, versions, machine, arithmetic and command of a session."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structkv_bench

if TYPE_CHECKING:  # reports read provenance, and import no torch
    from structkv_bench.engine.model import Model

PACKAGES = ("structkv-bench", "torch", "transformers", "tokenizers", "numpy", "wonderwords", "nltk")
"""Whose versions a prediction may depend on."""
NO_COMMIT = "not run from a checkout"
DRIVER = Path("/sys/module/nvidia/version")
ENOUGH = 1 << 20
"""Bytes of a changed file that are read: no source is longer, but someone's rows may lie beside it."""


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
        "cuda": cuda(device),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "device": device_name(device),
        "numerics": numerics(),
    }


def of_model(model: Model) -> dict[str, Any]:
    """The dtype that a model was loaded in, and the hash of its chat template; None: it uses none."""
    prompts = model.prompts
    template = prompts.tokenizer.chat_template if prompts.chat_template else None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    hashed = hashlib.sha256(text.encode()).hexdigest()[:16] if template else None
    return {"dtype": str(model.dtype).removeprefix("torch."), "template": hashed}


def source() -> dict[str, Any] | None:
    """Commit of the source tree and how files differ from it; None outside a checkout of this project.

    `diff` is a hash of all files that git does not ignore and that are not as in the commit; None: there are
    none.
    """
    root = Path(structkv_bench.__file__).resolve().parents[1]
    if _git(root, "rev-parse", "--show-toplevel") != str(root):
        return None  # an installed copy may well lie inside some other repository
    listed = _git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames") or ""
    changed = sorted(entry[3:] for entry in listed.split("\0") if entry)
    return {
        "commit": _git(root, "rev-parse", "--verify", "--quiet", "HEAD"),
        "dirty": bool(changed),
        "diff": _hash_of(root, changed) if changed else None,
    }


def cuda(device: str | None) -> dict[str, str | None] | None:
    """Versions of the NVIDIA driver and of the CUDA that torch was built with; None: not on a GPU."""
    import torch

    if not _is_cuda(device):
        return None
    driver = None
    with suppress(OSError):
        driver = DRIVER.read_text(encoding="utf-8").strip()
    return {"driver": driver, "runtime": torch.version.cuda}


def device_name(device: str | None) -> str:
    """The GPU's name for a cuda device, else the processor's."""
    import torch

    if _is_cuda(device):
        return torch.cuda.get_device_name(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()


def numerics() -> dict[str, Any]:
    """What of this process may change the last digits of a number."""
    import torch

    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "reduced_bf16_sums": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "reduced_fp16_sums": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    }


def _is_cuda(device: str | None) -> bool:
    import torch

    return (device or "cuda").startswith("cuda") and torch.cuda.is_available()


def _hash_of(root: Path, files: list[str]) -> str:
    """Hash of files by name and content: unlike a diff's text it depends on nobody's git settings."""
    digest = hashlib.sha256()
    for name in files:
        file, own = root / name, hashlib.sha256()
        if file.is_symlink():
            own.update(os.fsencode(file.readlink()))
        elif file.is_file():
            with suppress(OSError), file.open("rb") as opened:
                own.update(f"{file.stat().st_size} ".encode() + opened.read(ENOUGH))
        digest.update(os.fsencode(name) + b"\0" + (own.digest() if os.path.lexists(file) else b"") + b"\0")
    return digest.hexdigest()[:16]


def _git(root: Path, *arguments: str) -> str | None:
    with suppress(OSError):
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
        if done.returncode == 0:
            return os.fsdecode(done.stdout).removesuffix("\n")
    return None


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None
