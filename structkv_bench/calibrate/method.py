"""A method that needs a calibration file: bound to one before a model is loaded, held to the model after."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from structkv_bench.calibrate import file
from structkv_bench.calibrate.file import Calibration
from structkv_bench.engine.method import Budgeted, Method
from structkv_bench.errors import UserError
from structkv_bench.model_spec import ModelSpec
from structkv_bench.overrides import typed
from structkv_bench.paths import expanded

if TYPE_CHECKING:
    from structkv_bench.engine.model import Model


class Missing(str):
    """Stands where a calibration's hash would: why there is none, and the command that makes it."""


class Measured(NamedTuple):
    """What a calibration found."""

    values: dict[str, Any]
    """Plain JSON; what the method's compressors read."""
    prompts: list[list[int]]
    """All that the model was shown, as token ids."""
    counted: int
    """How many of them the values are means of."""


@dataclass(frozen=True)
class Calibrated(Budgeted):
    """A method with settings, a budget and a calibration file."""

    calibration: str | None = None
    """A file; None: results/calibration/<model>.<method>.json, here or of the package."""
    calibration_sha256: str | None = None
    """Filled in by `on`: the content, whose hash belongs to a cell's identity; or why it is missing."""

    name: ClassVar[str]
    """As its config and its files are called."""
    texts: ClassVar[type[Any]]
    """Dataclass of a calibration's own settings."""
    measured_with: ClassVar[tuple[str, ...]] = ()
    """The method's settings that it depends on."""

    @abstractmethod
    def measure(self, model: Model, texts: Any) -> Measured:
        """Calibrate: measure on the texts that the settings `texts` describe.

        Raises:
            UserError: the texts are not to be had, or tell nothing of this model.
        """

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if not isinstance(self.calibration_sha256, Calibration | Missing | None):
            raise UserError("calibration_sha256: is that of the file; give calibration=FILE")

    def on(self, spec: ModelSpec) -> Self:
        """This method with the file that it has for a model, which need not be loaded.

        That there is none, or no good one, is told when it is first needed: it may be made before.
        """
        path, command = file.find(spec.name, self.name), file.command(spec, self.name)
        if self.calibration is not None:
            path, command = expanded(self.calibration), f"{command} --out {quote(self.calibration)}"
        try:
            read = file.read(path, self.name, command)
            self._check_settings(read.content["settings"]["method"], path, command)
            found: str = read
        except UserError as error:
            found = Missing(error)
        return replace(self, calibration_sha256=found)

    def measured_settings(self) -> dict[str, Any]:
        """The settings that a calibration depends on."""
        return {name: getattr(self, name) for name in self.measured_with}

    def _check_settings(self, measured: dict[str, Any], path: Path, command: str) -> None:
        others = {name: one for name, one in self.measured_settings().items() if measured.get(name) != one}
        if others:
            was = ", ".join(f"{name}={measured.get(name)}" for name in others)
            asked = " ".join(f"method.{name}={typed(one)}" for name, one in others.items())
            elsewhere = "" if self.calibration else " --out FILE, and give method.calibration=FILE"
            raise UserError(
                f"{path}: was measured with {was}; for {asked} make one with: {command} {asked}{elsewhere}"
            )

    def calibrated(self, model: Model) -> Method:
        """Itself.

        Raises:
            UserError: the file is of other weights or of another tokenizer.
        """
        calibration = self._calibration()
        calibration.check_model(model.shape.layers, model.fingerprint, model.prompts.fingerprint)
        return self

    def learned(self, layers: int) -> dict[str, Any]:
        """The values of the calibration.

        Raises:
            UserError: there is none, or it is of a model with another number of layers.
        """
        calibration = self._calibration()
        calibration.check_model(layers)
        return calibration.values

    @property
    def is_calibrated(self) -> bool:
        """Whether it has a file's content."""
        return isinstance(self.calibration_sha256, Calibration)

    def _calibration(self) -> Calibration:
        if isinstance(self.calibration_sha256, Calibration):
            return self.calibration_sha256
        command = f"structkv-bench calibrate method={self.name} model=..."
        raise UserError(self.calibration_sha256 or f"no calibration; make it with: {command}")


def on_model(method: Method, spec: ModelSpec) -> Method:
    """The method with the calibration file that it has for a model, if it needs one."""
    return method.on(spec) if isinstance(method, Calibrated) else method
