"""Models and their tokenizers: fetched, inspected and loaded, from the hub, a folder or a GGUF file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from structkv_bench import gguf
from structkv_bench.catalog import choices
from structkv_bench.engine.model import Model
from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.model_spec import ModelSpec
from structkv_bench.paths import expanded
from structkv_bench.prompts import TokenizerPrompts
from structkv_bench.selfcheck import checked
from structkv_bench.shape import ModelShape

SAMPLED_PLACES, SAMPLED_BYTES = 256, 4096
"""Of each weight file, for its hash."""
NOT_NEEDED = ["original/*", "consolidated*", "*.pth", "*.bin", "*.gguf"]
"""Copies of the weights in other formats that some hub repositories carry beside the safetensors."""


def fetch(spec: ModelSpec) -> Path:
    """Put a model into the local caches, so that later runs need no network; where it lies.

    Raises:
        UserError: it is not to be had.
    """
    local = _local(spec)
    if local is not None:
        return local
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(spec.path, revision=spec.revision, ignore_patterns=NOT_NEEDED))
    except Exception as error:  # the hub's client raises many kinds, some of them its transport's
        raise UserError(
            f"model {spec.name}: {spec.path} can't be fetched: is there network, and access to it? "
            f"({kind_and_line(error)})"
        ) from error


@dataclass(frozen=True)
class Inspected:
    """What is known of a model without its weights in memory."""

    prompts: TokenizerPrompts
    shape: ModelShape
    identity: dict[str, str]
    """Hashes that change when weights, config or tokenizer do."""


def inspect(spec: ModelSpec) -> Inspected:
    """A model's tokenizer, sizes and identity.

    Raises:
        UserError: as for `load`.
    """
    from transformers import AutoConfig, AutoTokenizer

    tokenizer, config = _from_pretrained(AutoTokenizer, spec), _from_pretrained(AutoConfig, spec)
    try:
        shape = ModelShape.of(config, spec.dtype, spec.max_positions)
    except AttributeError as error:
        raise UserError(f"model {spec.name}: {config.model_type} is not of the Llama family") from error
    prompts = TokenizerPrompts(tokenizer, spec.chat_template)
    local = _local(spec)
    weights = file_hash(local) if local is not None else str(config._commit_hash)
    return Inspected(prompts, shape, {"weights": weights, "tokenizer": prompts.fingerprint})


def file_hash(folder: Path) -> str:
    """Hash of a model folder's config and of samples of its weight files: a moment at any size."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(0, size, max(size // SAMPLED_PLACES, SAMPLED_BYTES)):
                opened.seek(place)
                digest.update(opened.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]


def load(spec: ModelSpec, inspected: Inspected | None = None) -> Model:
    """Load a model and check it; about a second for the embedded one.

    Args:
        spec: which model.
        inspected: what `inspect` found, where it has been asked before.

    Raises:
        UserError: the model is missing, damaged, or not one that the engine drives exactly.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    inspected = inspected or inspect(spec)
    device_map = spec.device_map or ("cuda" if torch.cuda.is_available() else None)
    module = _from_pretrained(
        AutoModelForCausalLM,
        spec,
        dtype=getattr(torch, spec.dtype),
        device_map=device_map,
        attn_implementation="sdpa",
    )
    return checked(module, inspected.prompts, inspected.shape)


def _local(spec: ModelSpec) -> Path | None:
    """The folder of a model that is no hub id."""
    file = gguf.locate(spec.path)
    if file is not None:
        return gguf.converted(file, spec.dtype, spec.sha256)
    folder = expanded(spec.path)
    if folder.is_dir() and spec.sha256 is not None:
        raise UserError(f"model {spec.name}: sha256 is that of a single file, and {spec.path} is a folder")
    return folder if folder.is_dir() else None


def _from_pretrained(kind: Any, spec: ModelSpec, **settings: Any) -> Any:
    """One of transformers' Auto classes, loaded from where the model lies.

    Raises:
        UserError: it can't be found, or not be read.
    """
    local = _local(spec)
    try:
        if local is not None:
            return kind.from_pretrained(local, **settings)
        return kind.from_pretrained(spec.path, revision=spec.revision, local_files_only=True, **settings)
    except Exception as error:  # a damaged file surfaces as whatever its parser raises
        if local is None:
            raise _not_cached(spec) from error
        raise UserError(f"model {spec.name}: {local} can't be loaded: {kind_and_line(error)}") from error


def _not_cached(spec: ModelSpec) -> UserError:
    how = f"model={spec.name}" if spec.name in choices("model") else f"model=custom model.path={spec.path}"
    return UserError(
        f"model {spec.name}: {spec.path} is no local folder, and not whole in the hub's cache; "
        f"where there is network, run: structkv-bench fetch {how}"
    )


def too_long(spec: ModelSpec, shape: ModelShape, length: int) -> str:
    """What to say of a length above the model's positions."""
    return f"task.lengths={length}: model {spec.name} has {shape.max_positions} positions, so at most that"
