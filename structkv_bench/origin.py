"""What made the rows of a run, told from its cell.json files alone."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError
from structkv_bench.manifest import read_manifests
from structkv_bench.overrides import GROUPS
from structkv_bench.paths import expanded
from structkv_bench.provenance import NO_COMMIT
from structkv_bench.store import CELL_FILE, Row, cell_folders, read_about, read_rows

OF_CELL = ("ended", "sources")
"""What a session says of one cell; the rest holds for all cells that it ran."""
NAMES = {*GROUPS, "protocol"}
CONFIG = {*NAMES, "subtask", "length"}
"""What a cell.json says at least."""
MISSING = object()
WIDTH = 110

Facts = dict[str, Any]


@dataclass(frozen=True)
class Made:
    """One cell: what ran, and how much of it was asked for."""

    folder: Path
    about: Row
    """As in cell.json, with the sessions of shards."""
    samples: int
    """Asked for; where no manifest says that, as many as there are."""


def read_run(run: Path) -> list[Made]:
    """The cells of a results folder, or the one whose folder is given.

    Raises:
        UserError: it is neither, or a file in it is damaged.
    """
    place = expanded(run)
    folders = [place] if (place / CELL_FILE).exists() else cell_folders(place)
    if not folders:
        near = difflib.get_close_matches(
            place.name, [folder.name for folder in cell_folders(place.parent)], 1
        )
        hint = f"did you mean {near[0]}?" if near else "give a results folder, or that of one of its cells"
        raise UserError(f"{run}: no {CELL_FILE} there; {hint}")
    asked: dict[str, int] = {}
    for manifest in read_manifests(folders[0].absolute().parent):
        for name, cell in manifest.cells.items():
            asked[name] = max(cell["samples"], asked.get(name, 0))
    return [_made(folder, asked) for folder in folders]


def _made(folder: Path, asked: Mapping[str, int]) -> Made:
    about, name = read_about(folder / CELL_FILE), folder.absolute().name
    if not _is_whole(about):
        raise UserError(
            f"{folder / CELL_FILE}: damaged; delete it, and the next run of this cell writes it anew"
        )
    return Made(folder, about, asked.get(name) or len(read_rows(folder)[0]))


def _is_whole(about: Row) -> bool:
    names, config = about["names"], about["config"]
    if not all(isinstance(part, dict) for part in (*about["sessions"], names, config)):
        return False
    groups = [config.get(group) for group in GROUPS]
    if not all(isinstance(its, dict) for its in groups):
        return False
    classes = all("_target_" in config[group] for group in ("method", "task"))
    if not (classes and names.keys() >= NAMES and config.keys() >= CONFIG):
        return False
    texts = [about["key"], *names.values(), *(config[group]["_target_"] for group in ("method", "task"))]
    kinds = all(isinstance(text, str) for text in texts) and type(config["length"]) is int
    return kinds and all(
        isinstance(session.get("command", []), list) and isinstance(session.get("git") or {}, dict)
        for session in about["sessions"]
    )


def as_text(cells: Sequence[Made]) -> str:
    """All that is known of their origin, as YAML: what they share once, then what is each one's own."""
    import yaml

    text = yaml.safe_dump(
        _told(cells), sort_keys=False, allow_unicode=True, default_flow_style=None, width=WIDTH
    )
    return str(text).rstrip()


def _told(cells: Sequence[Made]) -> Facts:
    sessions: dict[str, Facts] = {}
    for session in (session for cell in cells for session in cell.about["sessions"]):
        sessions.setdefault(_key(session), _of_all(session))
    numbers = {key: number for number, key in enumerate(sessions, 1)}
    facts = [_facts(cell, numbers) for cell in cells]
    shared, always = common(facts), common(list(sessions.values()))
    its = shared.pop("sessions", {})
    if len(sessions) > 1:
        told = {"all": always} | {
            n: without(sessions[key], always) | its.get(n, {}) for key, n in numbers.items()
        }
    else:
        told = {n: sessions[key] | its.get(n, {}) for key, n in numbers.items()}
    if len(cells) == 1:
        return {"cell": cells[0].folder.absolute().name, **shared, "sessions": told}
    own = {
        cell.folder.name: without(fact, shared | {"sessions": its})
        for cell, fact in zip(cells, facts, strict=True)
    }
    return {"cells": len(cells), **shared, "sessions": told, "each cell": own}


def _facts(cell: Made, numbers: Mapping[str, int]) -> Facts:
    """What there is to tell of one cell; of a session its number, and what is the cell's own."""
    about = cell.about
    its = {
        numbers[_key(session)]: {name: session[name] for name in OF_CELL if name in session}
        for session in about["sessions"]
    }
    kept = {name: about[name] for name in ("key", "names", "config")}
    return {**kept, "samples": cell.samples, "sessions": its}


def _of_all(session: Facts) -> Facts:
    """A session without what is one cell's own, in words where JSON has none."""
    told = {name: value for name, value in session.items() if name not in OF_CELL}
    if "git" in told:
        told["git"] = told["git"] or NO_COMMIT
    if "command" in told:
        told["command"] = shlex.join(map(str, told["command"]))
    return told


def _key(session: Facts) -> str:
    return json.dumps({name: value for name, value in session.items() if name not in OF_CELL}, sort_keys=True)


def common(facts: Sequence[Facts]) -> Facts:
    """What all say, also within what they say differently."""
    found: Facts = {}
    for name, value in (facts[0] if facts else {}).items():
        values = [its.get(name, MISSING) for its in facts]
        if all(other == value for other in values):
            found[name] = value
        elif all(isinstance(other, dict) for other in values) and (within := common(values)):
            found[name] = within
    return found


def without(facts: Facts, shared: Facts) -> Facts:
    """What is left of them beside `shared`."""
    left: Facts = {}
    for name, value in facts.items():
        if name not in shared:
            left[name] = value
        elif value != shared[name]:
            left[name] = without(value, shared[name])
    return left
