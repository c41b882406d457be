"""The commands that make stored cells again: out of their resolved settings, not of what was once typed."""

from __future__ import annotations

import importlib
import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import groupby
from math import prod

from structkv_bench.catalog import choices
from structkv_bench.config import compose
from structkv_bench.errors import UserError
from structkv_bench.origin import Made
from structkv_bench.overrides import GROUPS, KEYS, typed
from structkv_bench.plan import cells_of, plan
from structkv_bench.provenance import NO_COMMIT, source
from structkv_bench.store import Row

BASE = {"model": "custom", "method": "full", "task": "niah"}
"""What stands for a model or class that no file of conf/ names; all settings are then given."""
UNSAID = {"_target_", "calibration_sha256"}
"""Follows from what is said."""
EXTENT = {"task.lengths", "task.subset"}
"""Lists, whose values don't follow one another but stand side by side."""

Settings = dict[str, str]
"""Overrides by key, each value as it is typed."""


@dataclass
class Again:
    """How cells can be made again."""

    commands: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    """A line for each cell that the code here does not make any more."""


def again(cells: Sequence[Made], results_dir: str) -> Again:
    """A command for each grid among the cells, since those of one command share their prefills.

    Each command has been composed, and makes exactly its cells; what it leaves out is in conf/ here.
    """
    found = Again()
    ordered = sorted(cells, key=lambda cell: (_block(cell), cell.about["config"]["length"], cell.folder.name))
    for _, block in groupby(ordered, key=_block):
        _add(list(block), results_dir, found)
    return found


def cautions(cells: Sequence[Made]) -> list[str]:
    """A line for each state of the code that made rows and is not that of the code here."""
    here, found = source(), Counter[str]()
    for cell in cells:
        sessions = cell.about["sessions"]
        found.update({line for session in sessions if (line := _caution(session, here)) is not None})
    return [f"{count} of {len(cells)} cells: {line}" for line, count in found.items()]


def _caution(session: Row, here: Row | None) -> str | None:
    if "git" not in session:
        return "what made the rows was lost with their cell.json"
    git = session["git"]
    if git is None or not git.get("commit"):
        return f"{NO_COMMIT}: no commit is known that made the rows"
    if {"diff": None, **git} == here:
        return None
    made = f"made by commit {git['commit']}"
    if git.get("dirty"):
        made += " and changes to it, which are not stored"
    if here is None or here["commit"] != git["commit"]:
        return f"{made}; git checkout {git['commit']} first, and ask again there"
    return made if git.get("dirty") else f"{made}; the source here has changes, git stash them first"


def _block(cell: Made) -> str:
    """Equal for cells that may stand in one command."""
    apart = {"method", "subtask", "length"}
    parts = [{k: v for k, v in cell.about[part].items() if k not in apart} for part in ("names", "config")]
    return json.dumps([*parts, cell.samples], sort_keys=True)


def _add(cells: list[Made], results_dir: str, found: Again) -> None:
    """The command of these cells; where they are no grid, those of their parts."""
    values = _values(cells)
    overrides = [_override(key, values[key]) for key in values]
    fault = _fault(overrides, cells) if _size(cells, values) == len(cells) else "no grid"
    if fault is None:
        command = ["structkv-bench", "run", *overrides, f"results_dir={typed(results_dir)}"]
        found.commands.append(shlex.join(command))
    elif len(cells) == 1:
        found.refused.append(f"{cells[0].folder.name}: {fault}")
    else:
        for part in _parts(cells):
            _add(part, results_dir, found)


def _parts(cells: list[Made]) -> Iterator[list[Made]]:
    """The cells by the first thing in which they differ: a method, its settings, a length, a subtask."""
    things = [
        [cell.about["names"]["method"], *(cell.about["config"][of] for of in ("method", "length", "subtask"))]
        for cell in cells
    ]
    for its in zip(*things, strict=True):
        parts: dict[str, list[Made]] = {}
        for thing, cell in zip(its, cells, strict=True):
            parts.setdefault(json.dumps(thing), []).append(cell)
        if len(parts) > 1:
            yield from parts.values()
            return


def _fault(overrides: list[str], cells: Sequence[Made]) -> str | None:
    """Why a command does not make these cells."""
    try:
        made = {cell.key: cell.config for group in plan(compose(overrides)) for cell in group.cells}
    except UserError as error:
        return str(error)
    if made.keys() == {cell.about["key"] for cell in cells}:
        return None
    told = "the code here does not make this cell any more"
    others = _differing(cells[0].about["config"], *made.values()) if len(made) == 1 else []
    return f"{told}: it makes one with another {', '.join(others)}" if others else told


def _differing(one: Row, other: Row) -> list[str]:
    """Settings that two cells do not have in common."""
    found = []
    for part in sorted(one.keys() | other.keys()):
        its, others = one.get(part), other.get(part)
        if isinstance(its, dict) and isinstance(others, dict):
            found += [f"{part}.{key}" for key in _differing(its, others)]
        elif its != others:
            found.append(part)
    return found


def _values(cells: Sequence[Made]) -> dict[str, list[str]]:
    """What has to be said, with the values of all cells: whatever is not conf/'s own for one of them."""
    settings, usual = [_settings(cell) for cell in cells], [_usual(cell) for cell in cells]
    said = {k for its, known in zip(settings, usual, strict=True) for k in its if known.get(k) != its[k]}
    keys = sorted(dict.fromkeys(key for its in settings for key in its if key in said), key=_place)
    return {key: list(dict.fromkeys(its[key] for its in settings if key in its)) for key in keys}


def _place(key: str) -> int:
    return KEYS.index(key.partition(".")[0])


def _size(cells: Sequence[Made], values: dict[str, list[str]]) -> int:
    """How many cells a command of these values makes: each method takes those of the settings it has."""
    methods = {its["method"]: its for its in map(_settings, cells)}
    of_methods = [
        prod(len(values.get(key, "1")) for key in its if key.startswith("method."))
        for its in methods.values()
    ]
    return sum(of_methods) * prod(len(values.get(key, "1")) for key in EXTENT)


def _override(key: str, values: list[str]) -> str:
    text = ",".join(values)
    return f"{key}=[{text}]" if key in EXTENT else f"{key}={text}"


def _settings(cell: Made) -> Settings:
    """Everything that there is to say of one cell."""
    names, config = cell.about["names"], cell.about["config"]
    told = {key: value for group in GROUPS for key, value in _group(group, names[group], config[group])}
    told["task.lengths"] = str(config["length"])
    if "subset" in _fields_of(config["task"]["_target_"]):
        told["task.subset"] = typed(config["subtask"])
    if cell.samples:
        told["task.samples"] = str(cell.samples)
    return {**told, "protocol": typed(names["protocol"])}


def _group(group: str, name: str, values: Row) -> Iterator[tuple[str, str]]:
    """A choice and its settings. A class that was given as `_target_` gave its own name to the choice."""
    target = str(values.get("_target_", ""))
    if target.rpartition(".")[2] == name:
        yield from ((group, BASE[group]), (f"{group}._target_", target))
    else:
        yield group, name if group != "model" or name in choices("model") else BASE["model"]
    if group == "model":
        yield "model.name", typed(name)
    yield from ((f"{group}.{key}", typed(value)) for key, value in values.items() if key not in UNSAID)


def _usual(cell: Made) -> Settings:
    """What of these settings needs no saying: conf/ has the same."""
    said, usual = _settings(cell), Settings()
    for group in GROUPS:
        if f"{group}._target_" not in said:
            usual |= _of_conf(said["protocol"], group, said[group])
    return usual


@cache
def _of_conf(protocol: str, group: str, name: str) -> Settings:
    chosen = {"protocol": protocol, "method": "full", group: name}
    if name == "custom":
        chosen["model.path"] = "unknown"
    with suppress(UserError):  # a choice that is no more; the command is going to say so
        [setup] = compose([f"{key}={value}" for key, value in chosen.items()])
        cell = cells_of(setup)[0]
        return {key: text for key, text in _group(group, name, cell.config[group]) if key != group}
    return {}


@cache
def _fields_of(target: str) -> frozenset[str]:
    module, _, name = target.rpartition(".")
    with suppress(Exception):  # whatever a class of the user's raises; the command is going to say so
        return frozenset(f.name for f in fields(getattr(importlib.import_module(module), name)))
    return frozenset()
