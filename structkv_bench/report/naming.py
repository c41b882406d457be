"""What cells are called in tables and figures: a name, and the settings that its config does not have."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Any

from structkv_bench.catalog import conf_dir
from structkv_bench.store import Row

HASH = re.compile(r"[0-9a-f]{16}")
"""Of a calibration; without one the reason stands in its place."""
OWN_COLUMN = frozenset({"kv_ratio", "_target_"})


def method_label(about: Row, without: Collection[str] = ()) -> str:
    """The method and its settings that differ from conf/method/; KV ratio, target and `without` left out.

    What was calibrated is named by its calibration: another one is another method.
    """
    name, settings = about["names"]["method"], about["config"]["method"]
    label = _named("method", name, settings, name, without)
    calibration = settings.get("calibration_sha256")
    if not calibration:
        return label
    return f"{label} calibration={calibration[:6] if HASH.fullmatch(calibration) else 'none'}"


def task_label(about: Row) -> str:
    """The subtask and the settings that differ from conf/task/."""
    config = about["config"]
    return _named("task", about["names"]["task"], config["task"], config["subtask"], ())


def kv_ratio(about: Row) -> float | None:
    """The nominal share of the KV cache; None: the method has none, a number of entries, or a fidelity."""
    method = about["config"]["method"]
    return None if method.get("budget") or method.get("tau") else method.get("kv_ratio")


def default_of(about: Row, setting: str) -> Any:
    """What conf/method/ says of a setting."""
    return _defaults("method", about["names"]["method"]).get(setting)


def _named(group: str, choice: str, settings: Row, shown: str, without: Collection[str]) -> str:
    """Cells that differ look different."""
    defaults = _defaults(group, choice)
    changed = {
        key: value
        for key, value in settings.items()
        if key in defaults.keys() - OWN_COLUMN - set(without)
        and value != defaults[key]
        and str(value) not in shown
    }
    # of a path its last part, which tells texts apart and fits a table
    return " ".join([shown, *(f"{key}={str(value).rpartition('/')[2]}" for key, value in changed.items())])


@cache
def _defaults(group: str, choice: str) -> Row:
    import yaml

    file = conf_dir() / group / f"{choice}.yaml"
    if not file.is_file():  # a class of the user's
        return {}
    values: Row = yaml.safe_load(file.read_text(encoding="utf-8"))
    return values
