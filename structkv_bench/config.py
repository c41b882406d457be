"""Overrides as typed on a command line -> setups: Hydra composition of conf/, typed, one line per mistake.

A comma list makes a grid; a setting goes to each listed choice that has it. A protocol and an experiment
are files of overrides that stand before the user's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, cast, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from structkv_bench import catalog
from structkv_bench.errors import UserError, kind_and_line, one_line
from structkv_bench.model_spec import ModelSpec
from structkv_bench.overrides import GROUPS, Grid, Setting, offer, parse, under

if TYPE_CHECKING:
    from structkv_bench.engine.method import Method
    from structkv_bench.task import Task

BASES = {
    "model": "structkv_bench.model_spec.ModelSpec",
    "method": "structkv_bench.engine.method.Method",
    "task": "structkv_bench.task.Task",
}
"""What the class of a group's choice must be; by name, since importing Method imports torch."""


@dataclass(frozen=True)
class Setup:
    """One point of a grid, checked and typed."""

    model: ModelSpec
    method_name: str
    method: Method
    task_name: str
    task: Task
    protocol: str
    results_dir: str
    experiment: str | None = None
    """The file of conf/experiment/ that asked for it."""


@dataclass(frozen=True)
class Preset:
    """A file of conf/protocol/ or conf/experiment/."""

    description: str = ""
    overrides: list[str] = field(default_factory=list)
    """As typed on a command line."""
    grids: list[list[str]] = field(default_factory=list)
    """Further overrides, a list for each grid of a preset that has several."""
    title: str = ""
    """Of the experiment's table."""
    columns: str = "subtask"
    """What has a column of its own in that table: subtask, length, or a setting such as method.decay."""
    paper: str | None = None
    """Table of the paper whose numbers stand beside ours, as results/paper/ calls it."""


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


LISTS = (list[int], list[str])

Menu = dict[str, list[Choice]]
"""The listed choices of each group."""


def compose(overrides: list[str]) -> list[Setup]:
    """Every different setup that the overrides ask for, in the order typed.

    Raises:
        UserError: a key, choice or value is wrong, or a config file is broken.
    """
    with _hydra():
        config = _load("config")
        grids = _grids(parse(overrides), config.protocol)
        default = config.hydra.runtime.choices
        menus = [{group: list(_choices(group, grid, default[group])) for group in GROUPS} for grid in grids]
    _check_keys(grids, menus)
    results_dir = _results_dir(grids, config.results_dir)
    setups = [s for grid, menu in zip(grids, menus, strict=True) for s in _setups(grid, menu, results_dir)]
    return [setup for i, setup in enumerate(setups) if setup not in setups[:i]]


def _setups(grid: Grid, menu: Menu, results_dir: str) -> Iterator[Setup]:
    built = (
        [(choice.name, _build(choice, point)) for choice in menu[group] for point in _points(choice, grid)]
        for group in GROUPS
    )
    for (_, model), (method_name, method), (task_name, task) in product(*built):
        protocol = grid["protocol"].values[0]
        experiment = grid["experiment"].values[0] if "experiment" in grid else None
        yield Setup(model, method_name, method, task_name, task, protocol, results_dir, experiment)


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra's compose API over conf/, whatever Hydra the process had open before."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(catalog.conf_dir()), version_base=None):
        yield


def _load(name: str) -> DictConfig:
    try:
        return hydra.compose(name, return_hydra_config=True)
    except Exception as error:  # Hydra, OmegaConf, YAML and the codec each have their own kind
        raise UserError(f"conf/{name}.yaml: {one_line(error)}") from error


def _grids(own: Grid, default_protocol: str) -> list[Grid]:
    """The user's grid; with experiments, each of theirs under it; and under all that, a protocol's."""
    grids = _over_presets("experiment", own)
    unsaid = {"protocol": Setting("protocol", (default_protocol,))}
    return [whole for grid in grids for whole in _over_presets("protocol", unsaid | dict(grid))]


def _over_presets(group: str, own: Grid) -> list[Grid]:
    """The grids of each preset that `own` names, with `own` on top; what it names stays in `own`."""
    names = own[group].values if group in own else (None,)
    if names == (None,):
        return [own]
    return [
        under(preset, {**own, group: Setting(group, (name,))})
        for name in names
        for preset in _presets(group, name)
    ]


def _preset(group: str, name: Any) -> Preset:
    preset: Preset = _build(_checked(Choice(group, name, _file(group, name), Preset)), {})
    return preset


def _presets(group: str, name: Any) -> Iterator[Grid]:
    """The grids of one preset. A protocol's settings are for whoever has them: it fits any run."""
    preset = _preset(group, name)
    for lines in preset.grids or [[]]:
        grid = under(parse(preset.overrides), parse(lines))
        if group in grid:
            raise UserError(f"conf/{group}/{name}.yaml: can't name another {group}")
        required = group != "protocol"
        yield {key: replace(setting, required=required) for key, setting in grid.items()}


def _choices(group: str, grid: Grid, default: str) -> Iterator[Choice]:
    """What the grid lists of a group; a class given in `_target_` takes from a file what it knows."""
    names = grid[group].values if group in grid else (default,)
    targets = grid.get(f"{group}._target_", Setting("", ())).values
    for name in names:
        values = _file(group, name)
        own = values.pop("_target_", None)
        if not targets:
            yield _checked(Choice(group, name, values, _class(group, own)))
        for cls in (_class(group, target) for target in targets):
            yield Choice(group, cls.__name__, values, cls)


def _file(group: str, name: Any) -> dict[str, Any]:
    names = catalog.choices(group)
    if name not in names:
        raise UserError(f"{group}={name}: unknown; {offer(str(name), names)}")
    values = OmegaConf.to_container(
        OmegaConf.create(_load(f"{group}/{name}").get(group) or {}), resolve=False
    )
    defaults = {"name": name} if group == "model" else {}
    return defaults | cast(dict[str, Any], values)


def _checked(choice: Choice) -> Choice:
    """The choice, unless its file has a setting that its class has not."""
    for key in choice.values:
        if key not in choice.keys:
            where = f"conf/{choice.group}/{choice.name}.yaml"
            raise UserError(f"{where}: {key}: unknown; {offer(key, choice.keys)}")
    return choice


def _class(group: str, target: Any) -> type[Any]:
    """The dataclass at a dotted path, of the kind that the group needs."""
    key = f"{group}._target_"
    base, cls = _import(key, BASES[group]), _import(key, target)
    if not (isinstance(cls, type) and issubclass(cls, base) and is_dataclass(cls)):
        raise UserError(f"{key}={target}: not a dataclass derived from {BASES[group]}")
    return cls


def _import(key: str, path: Any) -> Any:
    module, _, name = str(path).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever a module of the user's raises as it is imported
        raise UserError(
            f"{key}={path}: can't be imported, is its folder on PYTHONPATH? ({kind_and_line(error)})"
        ) from error


def _check_keys(grids: list[Grid], menus: list[Menu]) -> None:
    """Each setting must have a taker in one grid at least."""
    for setting in {s.key: s for grid in grids for s in grid.values() if s.required}.values():
        if setting.name in ("", "_target_"):
            continue
        listed = [choice for menu in menus for choice in menu[setting.group]]
        if not any(choice.has(setting) for choice in listed):
            names = ", ".join(dict.fromkeys(choice.name for choice in listed))
            keys = list(dict.fromkeys(key for choice in listed for key in choice.keys))
            hint = offer(setting.name, keys) if keys else "it has none"
            raise UserError(f"{setting.key}: no such setting of {names}; {hint}")


def _points(choice: Choice, grid: Grid) -> Iterator[dict[str, Any]]:
    """Each point of the grid, as values for the settings that the choice has."""
    settings = [setting for setting in grid.values() if choice.has(setting)]
    for values in product(*(setting.values for setting in settings)):
        yield {setting.name: value for setting, value in zip(settings, values, strict=True)}


def _build(choice: Choice, point: dict[str, Any]) -> Any:
    """The choice as an object, with the point's values in place of its own."""
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
    if choice.group == "model" and "path" in point:  # another model than the one that gave its name
        point = {"name": point["path"], **point}
    for key, value in {**choice.values, **point}.items():
        if key not in choice.keys:
            continue
        if get_type_hints(choice.cls)[key] in LISTS and isinstance(value, str | int):
            value = [value]  # task.subset=vt
        if key in point and value == MISSING:
            raise UserError(f"{choice.group}.{key}: give a value, not {MISSING}")
        try:
            config = OmegaConf.merge(config, {key: value})
        except OmegaConfBaseException as error:
            expected = _type_name(get_type_hints(choice.cls)[key])
            raise UserError(f"{choice.group}.{key}={value}: expected {expected}") from error
    return cast(DictConfig, config)


def _type_name(hint: Any) -> str:
    """How an error names a type."""
    if hint in LISTS:
        return f"a list such as {'[2048,4096]' if hint == list[int] else '[vt,cwe]'}"
    return hint.__name__ if type(hint) is type else str(hint).replace("typing.", "")


def _results_dir(grids: list[Grid], default: str) -> str:
    """The one folder that all grids write to."""
    unsaid = Setting("results_dir", (default,))
    folders = [folder for grid in grids for folder in grid.get("results_dir", unsaid).values]
    if not all(isinstance(f, str | int) and f != "" and f == folders[0] for f in folders):
        raise UserError("results_dir: give one folder")
    return str(folders[0])
