"""One command-line override -> a key and the values it takes in turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, Quote, QuotedString, ValueType
from hydra.errors import HydraException

from structkv_bench import bounds
from structkv_bench.errors import UserError, offer, one_line

GROUPS = ("model", "method", "task")
CHOSEN = (*GROUPS, "launcher")
"""What has choices with settings; of the launcher a run has one, it is no part of a grid."""
KEYS = (*GROUPS, "protocol", "experiment", "results_dir", "launcher", *bounds.SETTINGS)
"""What an override may set, or set something of."""
PLAIN = re.compile(r"([\w.]+)=([^=,\[\]{}()'\"$\\]+)")
"""An override whose value has nothing that Hydra's grammar gives a meaning to."""
NAME = re.compile(r"[A-Za-z_/][\w./-]*", re.ASCII)
"""Text that Hydra's grammar takes for text without quotes, unless it is one of"""
WORDS = {"null", "true", "false", "inf", "nan"}
LISTS = (ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP)


@dataclass(frozen=True)
class Setting:
    """One override: a key and the values it takes in turn."""

    key: str
    values: tuple[Any, ...]
    required: bool = True
    """Whether it is a mistake if no choice has this key."""

    @property
    def group(self) -> str:
        """First part of the key."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """The key within its group; empty for the choice of the group itself."""
        return self.key.partition(".")[2]


Grid = Mapping[str, Setting]
"""Settings by key, in the order typed: their values' product is what runs."""


def parse(overrides: list[str]) -> Grid:
    """The grid of a list of overrides.

    Raises:
        UserError: an override is malformed, its key is unknown or given twice.
    """
    grid: dict[str, Setting] = {}
    for text in overrides:
        setting = _setting(text)
        if setting.key in grid:
            raise UserError(f"{setting.key}: given twice; list several values as {setting.key}=first,second")
        grid[setting.key] = setting
    return grid


def under(preset: Grid, own: Grid) -> Grid:
    """Both, `own` winning; a preset for a choice that `own` replaced may find no taker."""
    replaced = {key.removesuffix("._target_") for key in own}
    kept = {
        key: replace(setting, required=setting.required and setting.group not in replaced)
        for key, setting in preset.items()
    }
    return {**kept, **own}


def _setting(text: str) -> Setting:
    try:
        override = OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        plain = PLAIN.fullmatch(text)
        if plain:  # a path from ~, or letters that Hydra's grammar has no name for
            return _known(Setting(plain[1], (plain[2],)), text)
        why = one_line(str(error).partition("\nSee https://")[0])
        raise UserError(
            f"{one_line(text)}: not of the form key=value; quote a value with special characters ({why})"
        ) from error
    return _known(Setting(override.key_or_group, _values(override)), text)


def _known(setting: Setting, text: str) -> Setting:
    if setting.key not in KEYS and not (setting.name and setting.group in CHOSEN):
        raise UserError(f"{setting.key or text}: unknown; {offer(setting.group, KEYS)}")
    return setting


def _values(override: Override) -> tuple[Any, ...]:
    if override.type == OverrideType.DEL or override.package is not None:
        raise UserError(f"{override.input_line}: write key=value")
    if not override.is_sweep_override():
        return (override.value(),)
    if override.value_type not in LISTS:
        raise UserError(f"{override.input_line}: list the values as {override.key_or_group}=first,second")
    return tuple(v.text if isinstance(v, QuotedString) else v for v in override.sweep_iterator())


def typed(value: Any) -> str:
    """A value as an override has it, in Hydra's grammar."""
    if isinstance(value, str):
        is_plain = NAME.fullmatch(value) and value.lower() not in WORDS
        return value if is_plain else str(QuotedString(value, Quote.double).with_quotes())
    if isinstance(value, list):
        return f"[{','.join(map(typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{typed(item)}' for key, item in value.items())}}}"
    return json.dumps(value)
