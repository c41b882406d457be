"""One choice of a config group -> a typed object; a value that doesn't fit is one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, cast, get_type_hints

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from structkv_bench.errors import UserError, offer
from structkv_bench.overrides import Grid, Setting

LISTS = {list[int]: "[2048,4096]", list[float]: "[0.1,0.2]", list[str]: "[vt,cwe]"}
"""Kinds of setting for which a single value stands for a list of one, each with an example."""


@dataclass(frozen=True)
class Choice:
    """One choice of a group: what its YAML says, and the dataclass that types it."""

    group: str
    name: str
    values: dict[str, Any]
    cls: type[Any]

    @property
    def keys(self) -> list[str]:
        """Settings that it has."""
        return [f.name for f in fields(self.cls) if f.init]

    def has(self, setting: Setting) -> bool:
        """Whether a setting is one of this choice's."""
        return setting.group == self.group and setting.name in self.keys

    def points(self, grid: Grid) -> Iterator[dict[str, Any]]:
        """Each point of the grid, as values for the settings that it has."""
        settings = [setting for setting in grid.values() if self.has(setting)]
        for values in product(*(setting.values for setting in settings)):
            yield {setting.name: value for setting, value in zip(settings, values, strict=True)}


def checked(choice: Choice) -> Choice:
    """The choice itself.

    Raises:
        UserError: its file has a setting that its class has not.
    """
    for key in choice.values:
        if key not in choice.keys:
            where = f"conf/{choice.group}/{choice.name}.yaml"
            raise UserError(f"{where}: {key}: unknown; {offer(key, choice.keys)}")
    return choice


def build(choice: Choice, point: dict[str, Any]) -> Any:
    """The choice as an object, with the point's values in place of its own.

    Raises:
        UserError: a value is missing, or not of the kind that the setting takes.
    """
    try:
        config = _typed(choice, point)
        for key in choice.keys:
            if OmegaConf.is_missing(config, key):
                raise UserError(f"{choice.group}.{key}: {choice.name} needs a value for it")
        return OmegaConf.to_object(config)
    except UserError as error:
        about = f"{choice.group}."
        raise UserError(f"{'' if str(error).startswith(about) else about}{error}") from error
    except Exception as error:  # whatever the class raises at a value that it does not like
        reason = str(error).partition("\n")[0]
        raise UserError(f"{choice.group}={choice.name}: {reason}") from error


def _typed(choice: Choice, point: dict[str, Any]) -> DictConfig:
    config: Any = OmegaConf.structured(choice.cls)
    OmegaConf.set_readonly(config, False)  # as it is for a frozen class; merging would take ten times as long
    hints, keys = get_type_hints(choice.cls), choice.keys
    if choice.group == "model" and "path" in point:  # another model than the one that gave its name
        point = {"name": point["path"], **point}
    for key, value in {**choice.values, **point}.items():
        if key not in keys:
            continue
        if key in point and value == MISSING:
            raise UserError(f"{choice.group}.{key}: give a value, not {MISSING}")
        try:
            is_single = hints[key] in LISTS and isinstance(value, str | int | float)
            config[key] = [value] if is_single else value  # task.subset=vt
        except OmegaConfBaseException as error:
            expected = _type_name(hints[key])
            raise UserError(f"{choice.group}.{key}={value}: expected {expected}") from error
    return cast(DictConfig, config)


def _type_name(hint: Any) -> str:
    """How an error names a type."""
    if hint in LISTS:
        return f"a list such as {LISTS[hint]}"
    return hint.__name__ if type(hint) is type else str(hint).replace("typing.", "")
