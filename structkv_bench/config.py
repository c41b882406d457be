"""Overrides as typed on a command line -> setups: Hydra composition of conf/, typed, one line per mistake.

A comma list makes a grid; a setting goes to each listed choice that has it. A protocol and an experiment
are files of overrides that stand before the user's own.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from structkv_bench import catalog
from structkv_bench.bounds import DEFAULT, SETTINGS, Bounds
from structkv_bench.choice import Choice, build, checked
from structkv_bench.errors import UserError, kind_and_line, offer, one_line
from structkv_bench.launch.settings import HERE, Launcher
from structkv_bench.model_spec import ModelSpec
from structkv_bench.overrides import CHOSEN, GROUPS, Grid, Setting, parse, under

if TYPE_CHECKING:
    from structkv_bench.engine.method import Method
    from structkv_bench.task import Task

BASES = {
    "model": "structkv_bench.model_spec.ModelSpec",
    "method": "structkv_bench.engine.method.Method",
    "task": "structkv_bench.task.Task",
    "launcher": "structkv_bench.launch.settings.Launcher",
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
    experiment: str | None = None
    """The file of conf/experiment/ that asked for it."""
    results_dir: str = ""
    """The same for every setup of a run, as are the launcher and the bounds."""
    launcher: Launcher = HERE
    bounds: Bounds = DEFAULT


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
    columns: str | None = "subtask"
    """What has a column of its own in that table: subtask, length, or a setting such as method.decay; None:
    the experiment is for a figure alone."""
    paper: str | None = None
    """Table of the paper whose numbers stand beside ours, as results/paper/ calls it."""


COMPOSED = re.compile(r"^defaults:|^# @package", re.MULTILINE)
"""Of a config file that Hydra has to compose, which takes thirty times as long as reading one."""

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
        menus = [{group: list(_choices(group, grid, default[group])) for group in CHOSEN} for grid in grids]
    _check_keys(grids, menus)
    results_dir = _results_dir(grids, config.results_dir)
    launcher = _launcher(grids, menus)
    bounds = Bounds.of(*(_one(grids, key, OmegaConf.select(config, key), "number") for key in SETTINGS))
    setups = [
        replace(setup, results_dir=results_dir, launcher=launcher, bounds=bounds)
        for grid, menu in zip(grids, menus, strict=True)
        for setup in _setups(grid, menu)
    ]
    return list({repr(setup): setup for setup in setups}.values())  # lists among the settings have no hash


def _setups(grid: Grid, menu: Menu) -> Iterator[Setup]:
    from structkv_bench.calibrate.method import on_model  # only now: it imports torch

    built = (
        [(choice.name, build(choice, point)) for choice in menu[group] for point in choice.points(grid)]
        for group in GROUPS
    )
    for (_, model), (method_name, method), (task_name, task) in product(*built):
        protocol = grid["protocol"].values[0]
        experiment = grid["experiment"].values[0] if "experiment" in grid else None
        on = on_model(method, model)
        yield Setup(model, method_name, on, task_name, task, protocol, experiment)


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra's compose API over conf/, whatever Hydra the process had open before."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(catalog.conf_dir()), version_base=None):
        yield


def _load(name: str) -> DictConfig:
    try:
        text = (catalog.conf_dir() / f"{name}.yaml").read_text(encoding="utf-8")
        if COMPOSED.search(text):
            return hydra.compose(name, return_hydra_config=True)
        return OmegaConf.create({name.partition("/")[0]: OmegaConf.create(text)})
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
    preset: Preset = build(checked(Choice(group, name, _file(group, name), Preset)), {})
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
            yield checked(Choice(group, name, values, _class(group, own)))
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
        if setting.name in ("", "_target_") or setting.key in SETTINGS:
            continue
        listed = [choice for menu in menus for choice in menu[setting.group]]
        if not any(choice.has(setting) for choice in listed):
            names = ", ".join(dict.fromkeys(choice.name for choice in listed))
            keys = list(dict.fromkeys(key for choice in listed for key in choice.keys))
            hint = offer(setting.name, keys) if keys else "it has none"
            raise UserError(f"{setting.key}: no such setting of {names}; {hint}")


def _launcher(grids: list[Grid], menus: list[Menu]) -> Launcher:
    """The one launcher of a run."""
    points = [
        (choice, point)
        for grid, menu in zip(grids, menus, strict=True)
        for choice in menu["launcher"]
        for point in choice.points(grid)
    ]
    if any(point != points[0] for point in points):
        raise UserError("launcher: give one, with one value for each of its settings")
    launcher: Launcher = build(*points[0])
    return launcher


def _results_dir(grids: list[Grid], default: str) -> str:
    """The one folder that all grids write to."""
    folder = _one(grids, "results_dir", default, "folder")
    if not isinstance(folder, str | int) or folder == "":
        raise UserError("results_dir: give one folder")
    return str(folder)


def _one(grids: list[Grid], key: str, default: Any, kind: str) -> Any:
    """The one value that all grids have for a setting of the whole run."""
    values = [value for grid in grids for value in grid.get(key, Setting(key, (default,))).values]
    if any(value != values[0] for value in values):
        raise UserError(f"{key}: give one {kind}")
    return values[0]
