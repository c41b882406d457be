"""What conf/ offers: names and descriptions, read from the files alone (no Hydra, no torch)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from structkv_bench.errors import UserError, one_line


def conf_dir() -> Path:
    """The folder of configs, in a clone as in an installed wheel."""
    return Path(str(files("structkv_bench.conf")))


def choices(group: str) -> list[str]:
    """Names of a group's configs, sorted."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def described(group: str) -> list[tuple[str, str]]:
    """Name and one-line description of each config of a group.

    Raises:
        UserError: a protocol or an experiment is not valid YAML.
    """
    describe = _description if group in ("protocol", "experiment") else _comment
    return [(name, describe(conf_dir() / group / f"{name}.yaml")) for name in choices(group)]


def preset_values(experiment: str) -> dict[str, Any]:
    """What an experiment's file says, as plain values (config.Preset types them for a run)."""
    import yaml

    text = (conf_dir() / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text) or {}
    return values


def _comment(path: Path) -> str:
    """The comment that opens a file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""


def _description(path: Path) -> str:
    from omegaconf import OmegaConf

    try:
        return " ".join(str(OmegaConf.load(path).description).split())
    except Exception as error:  # YAML, OmegaConf and the codec each have their own kind
        raise UserError(f"{path}: not a valid preset ({one_line(error)})") from error
