"""Which model, from where, and how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from structkv_bench.errors import UserError

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelSpec:
    """Settings of one model; all but the name belong to what a prediction depends on."""

    name: str
    """What tables call it: the name of its config, unless that says otherwise."""
    path: str
    """Hub id, local folder, .gguf file, or package://<package>/<file>: a file of an installed package."""
    revision: str | None = None
    dtype: str = "float32"
    device_map: str | None = None
    """As in transformers; None: one CUDA device if there is one, else the CPU."""
    sha256: str | None = None
    """Checked against a single-file model."""
    chat_template: bool = True
    max_positions: int | None = None
    """Longest prompt plus answer; None: what the model's own config says."""

    def __post_init__(self) -> None:
        """Check what can be checked without the model."""
        if not self.name or not self.path:
            raise UserError("model.name and model.path: give a name and a path that are not empty")
        if self.dtype not in DTYPES:
            raise UserError(f"model.dtype={self.dtype}: choose one of {', '.join(DTYPES)}")
        if self.max_positions is not None and self.max_positions < 1:
            raise UserError(f"model.max_positions={self.max_positions}: give at least 1")
