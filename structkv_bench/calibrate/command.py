"""The command that calibrates methods, and writes what it finds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from structkv_bench.errors import UserError, offer
from structkv_bench.paths import check_writable, expanded, write_whole
from structkv_bench.starting import uncollected

if TYPE_CHECKING:
    from structkv_bench.calibrate.file import Calibration
    from structkv_bench.calibrate.method import Calibrated
    from structkv_bench.config import Setup
    from structkv_bench.engine.model import Model
    from structkv_bench.model_spec import ModelSpec

OWN_KEY = "calibration"


def calibrate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="model and method as for run; calibration=own or a file of texts, and calibration.SETTING.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file; else results/calibration/<model>.<method>.json.")
    ] = None,
) -> None:
    """Measure what a method needs to know of a model, on texts of our own, and write it to a small file.

    The method then loads it by itself. The same inputs give the same file.
    """
    given = overrides or []
    own = [text for text in given if text.partition("=")[0].partition(".")[0] == OWN_KEY]
    with uncollected():
        from structkv_bench.config import compose

        asked = _asked(compose([text for text in given if text not in own]), out)
        texts = {place: _texts(method, own) for place, (_, method) in asked.items()}
        from structkv_bench import models

    loaded: tuple[ModelSpec, Model] | None = None
    for place, (spec, method) in asked.items():
        if loaded is None or loaded[0] != spec:
            loaded = spec, models.load(spec)
        print(f"{method.name} on {spec.name}: measuring", file=sys.stderr)
        found = measured(method, loaded[1], spec.name, texts[place])
        write_whole(place, found.text())
        prompts = found.content["prompts"]
        print(f"{place}: {found}, from {prompts['counted']} of {prompts['count']} prompts")


def _asked(setups: Sequence[Setup], out: Path | None) -> dict[Path, tuple[ModelSpec, Calibrated]]:
    """What is to be measured, by the file that it goes into."""
    from structkv_bench.calibrate.file import FOLDER, file_name

    asked: dict[Path, tuple[ModelSpec, Calibrated]] = {}
    for setup in setups:
        method = _checked(setup.method_name, setup.method)
        place = expanded(str(out)) if out else FOLDER / file_name(setup.model.name, method.name)
        check_writable(place)
        known = asked.setdefault(place, (setup.model, method))
        told = (setup.model, type(method), method.measured_settings())
        if (known[0], type(known[1]), known[1].measured_settings()) != told:
            raise UserError(f"{place}: is for one calibration; ask for one at a time, each with its --out")
    return asked


def measured(method: Calibrated, model: Model, name: str, texts: Any) -> Calibration:
    """A method's calibration on a model.

    Args:
        method: its settings count where they say how is measured.
        model: to measure on.
        name: what the model is called.
        texts: settings of the class `method.texts`.

    Raises:
        UserError: as for Calibrated.measure.
    """
    from structkv_bench.calibrate.file import VERSION, Calibration
    from structkv_bench.calibrate.prompts import digest

    values, prompts, counted = method.measure(model, texts)
    asked = asdict(texts)
    asked["source"] = Path(asked["source"]).name  # where it lies changes nothing
    return Calibration(
        {
            "version": VERSION,
            "method": method.name,
            "model": {
                "name": name,
                "weights": model.fingerprint,
                "tokenizer": model.prompts.fingerprint,
                "layers": model.shape.layers,
            },
            "settings": {"calibration": asked, "method": method.measured_settings()},
            "prompts": {"count": len(prompts), "counted": counted, "sha256": digest(prompts)},
            "values": values,
        }
    )


def _checked(name: str, method: Any) -> Calibrated:
    from structkv_bench.calibrate.method import Calibrated

    if not isinstance(method, Calibrated):
        raise UserError(f"method={name}: has nothing to calibrate; {offer(name, _calibrated())}")
    return method


def _calibrated() -> list[str]:
    """Names of the methods that need a calibration."""
    from structkv_bench.calibrate.method import Calibrated
    from structkv_bench.catalog import choices
    from structkv_bench.config import compose

    setups = compose([f"method={','.join(choices('method'))}"])
    return [setup.method_name for setup in setups if isinstance(setup.method, Calibrated)]


def _texts(method: Calibrated, own: Sequence[str]) -> Any:
    """The settings of a method's texts, as typed."""
    import yaml

    from structkv_bench.choice import Choice, build

    known = [field.name for field in fields(method.texts)]
    point: dict[str, Any] = {}
    for text in own:
        key, _, value = text.partition("=")
        name = key.partition(".")[2] or "source"
        if name not in known:
            raise UserError(f"{key}: no such setting of {method.name}; {offer(name, known)}")
        try:
            point[name] = yaml.safe_load(value) if name != "source" else value
        except yaml.YAMLError as error:
            raise UserError(f"{text}: not a value; lists are written [512,1024]") from error
    return build(Choice(OWN_KEY, method.name, {}, method.texts), point)
