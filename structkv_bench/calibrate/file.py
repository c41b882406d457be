"""A calibration file: what a method measured on one model, on which texts, and a hash over all of it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError, kind_and_line
from structkv_bench.model_spec import ModelSpec
from structkv_bench.overrides import typed

VERSION = 1
"""Of the format, and of the texts and measurements behind it: a file of another one is refused."""
FIELDS = {"version", "method", "model", "settings", "prompts", "values"}
FOLDER = Path("results") / "calibration"
"""Where files are written, and looked for first; then among those that come with the package."""


class Calibration(str):
    """A file's content hash, which as a method's setting is part of a cell's identity; it has the content."""

    content: dict[str, Any]
    file: Path | None
    """Where it was read from."""
    command: str
    """What makes one of the model at hand."""

    def __new__(cls, content: dict[str, Any], file: Path | None = None, command: str = "") -> Calibration:
        """The calibration that says `content`: version, method, model, settings, prompts, values."""
        self = super().__new__(cls, _hash(content))
        self.content, self.file, self.command = content, file, command
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies: a hash alone does not make one."""
        return Calibration, (self.content, self.file, self.command)

    def __deepcopy__(self, memo: dict[int, Any]) -> Calibration:
        """Itself: it never changes."""
        return self

    @property
    def values(self) -> dict[str, Any]:
        """What was measured, as the method itself has written it."""
        values: dict[str, Any] = self.content["values"]
        return values

    def text(self) -> str:
        """The file: the same bytes for the same content, a line for each row of numbers."""
        indented = json.dumps(
            self.content | {"sha256": str(self)}, indent=1, ensure_ascii=False, allow_nan=False
        )
        rows = re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), indented)
        return rows + "\n"

    def check_model(self, layers: int, weights: str | None = None, tokenizer: str | None = None) -> None:
        """Whether it is of a model with so many layers and, where they are known, these fingerprints.

        Raises:
            UserError: it is not.
        """
        its = self.content["model"]
        here = {"layers": layers, "weights": weights, "tokenizer": tokenizer}
        for what, value in here.items():
            if value is not None and value != its[what]:
                raise UserError(
                    f"{self.file}: is a calibration of {its['name']} with {what} {its[what]}, the model here "
                    f"has {value}; make one of it with: {self.command}"
                )


def read(file: Path, method: str, command: str) -> Calibration:
    """The calibration of `method` in a file, which `command` would make anew.

    Raises:
        UserError: there is no such file, or it is damaged, of another version or of another method.
    """
    try:
        return _read(file, method, command)
    except UserError as error:
        raise UserError(f"{file}: {error}; make it with: {command}") from error


def _read(file: Path, method: str, command: str) -> Calibration:
    content = _content(file)
    said = content.pop("sha256")
    if content["version"] != VERSION:
        raise UserError(f"has version {content['version']}, and version {VERSION} is read here")
    if content["method"] != method:
        raise UserError(f"is a calibration for {content['method']}, not for {method}")
    calibration = Calibration(content, file, command)
    if calibration != said:
        raise UserError(f"damaged or edited: its content has the hash {calibration}, it says {said}")
    return calibration


def _content(file: Path) -> dict[str, Any]:
    """What a file says, which has all fields of a calibration.

    Raises:
        UserError: it does not, or is no such file.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if missing := (FIELDS | {"sha256"}) - content.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except FileNotFoundError as error:
        raise UserError("no such file") from error
    except Exception as error:  # not text, not JSON, not a mapping
        raise UserError(f"not a calibration file ({kind_and_line(error)})") from error
    return content


def file_name(model: str, method: str) -> str:
    """What a model's file of a method is called."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', model)}.{method}.json"


def find(model: str, method: str) -> Path:
    """Where a model's file of a method lies; where there is none, where it would be written."""
    places = list(_places(file_name(model, method)))
    return next((place for place in places if place.is_file()), places[0])


def command(spec: ModelSpec, method: str) -> str:
    """The command line that makes a model's file of a method."""
    return shlex.join(["structkv-bench", "calibrate", f"method={method}", *_overrides(spec)])


def _places(name: str) -> Iterator[Path]:
    yield FOLDER / name
    yield Path(str(files("structkv_bench.calibrations"))) / name


def _overrides(spec: ModelSpec) -> Iterator[str]:
    """A model as it is typed: its config, and what it has otherwise."""
    import yaml

    from structkv_bench.catalog import choices, conf_dir

    config = spec.name if spec.name in choices("model") else "custom"
    text = (conf_dir() / "model" / f"{config}.yaml").read_text(encoding="utf-8")
    defaults = asdict(ModelSpec(spec.path, spec.path)) | yaml.safe_load(text)
    yield f"model={config}"
    for key, value in asdict(spec).items():
        if value != defaults[key] and not (key == "name" and value in (config, spec.path)):
            yield f"model.{key}={typed(value)}"


def _hash(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
