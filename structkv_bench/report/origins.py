"""What the rows of a report came from: settings, code, machines, models and texts; and what failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from structkv_bench.provenance import NO_COMMIT
from structkv_bench.report.naming import kv_ratio, method_label, task_label
from structkv_bench.report.stored import Stored
from structkv_bench.store import Row

LONGEST_LINE, LONGEST_TRACEBACK, MOST_PLACES, MOST_FAILURES = 300, 8000, 20, 100
"""Characters of its last line and of a traceback, samples of one, and tracebacks that a page shows."""


@dataclass
class Known:
    """A cell without its rows: what a page still needs when its table is done."""

    about: Row
    asked: int
    ok: int
    failures: dict[str, str]
    """Tracebacks by sample."""


@dataclass
class Ledger:
    """Every cell of a report once, in however many experiments it stands."""

    cells: dict[str, Known] = field(default_factory=dict)

    def add(self, cells: Iterable[Stored]) -> None:
        """Take in an experiment's cells."""
        for cell in cells:
            key = json.dumps([cell.about["names"], cell.about["config"]], sort_keys=True)
            before = self.cells.get(key)
            asked = max(cell.asked, len(cell.rows), before.asked if before else 0)
            failures = {s: row.get("error") or "" for s, row in cell.rows.items() if row["status"] != "ok"}
            self.cells[key] = Known(cell.about, asked, len(cell.ok), failures)

    def count(self, name: str) -> int:
        """Samples `asked` for, or `ok`, over all cells."""
        return sum(getattr(cell, name) for cell in self.cells.values())

    @property
    def failed(self) -> int:
        """Samples that failed."""
        return sum(len(cell.failures) for cell in self.cells.values())

    @property
    def begun(self) -> int:
        """Cells that have a row."""
        return sum(cell.ok + len(cell.failures) > 0 for cell in self.cells.values())


@dataclass(frozen=True)
class Settings:
    """One choice of a group, and each of its settings with the values that ran."""

    name: str
    values: list[tuple[str, list[str]]]


def settings(ledger: Ledger, group: str) -> list[Settings]:
    """What ran of a group: model, method or task."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for cell in ledger.cells.values():
        config, name = cell.about["config"], str(cell.about["names"][group])
        values = {key: value for key, value in config[group].items() if key != "_target_"}
        if group == "task":
            extent = {"subtask": config["subtask"], "length": config["length"], "samples": cell.asked}
            values = extent | values
        for key, value in values.items():
            found.setdefault(name, {}).setdefault(key, {})[_shown(value)] = None
    return [Settings(name, [(k, list(v)) for k, v in its.items()]) for name, its in found.items()]


def protocols(ledger: Ledger) -> list[str]:
    """Names of the protocols that ran."""
    return list(dict.fromkeys(str(cell.about["names"]["protocol"]) for cell in ledger.cells.values()))


@dataclass
class Origin:
    """One state of the code on one machine, and what it made."""

    facts: list[tuple[str, str]]
    cells: int = 0
    sessions: set[str] = field(default_factory=set)
    """When they started."""

    @property
    def period(self) -> str:
        """From the first session to the last."""
        return " to ".join(dict.fromkeys((min(self.sessions), max(self.sessions)))) if self.sessions else ""


def origins(ledger: Ledger) -> list[Origin]:
    """Code and machines, each once, without the machines' names."""
    found: dict[str, Origin] = {}
    for cell in ledger.cells.values():
        its = {json.dumps(_facts(s)): s for s in cell.about.get("sessions", ())}
        for key, session in its.items():
            found.setdefault(key, Origin(_facts(session))).cells += 1
        for session in cell.about.get("sessions", ()):
            if session.get("started"):
                found[json.dumps(_facts(session))].sessions.add(session["started"])
    return list(found.values())


def _facts(session: Mapping[str, Any]) -> list[tuple[str, str]]:
    git = session.get("git") or {}
    changed = f", with changes that are not in it{_diff(git)}" if git.get("dirty") else ""
    told = {
        "commit": f"{git['commit']}{changed}" if git.get("commit") else NO_COMMIT,
        "versions": _listed(session.get("versions")) or "",
        "CUDA": _listed(session.get("cuda")),
        "device": session.get("device"),
        "CPUs": session.get("cpus"),
        "platform": session.get("platform"),
        "numerics": _listed(session.get("numerics")),
    }
    return [(name, str(value)) for name, value in told.items() if value is not None]


def _diff(git: Mapping[str, Any]) -> str:
    return f" ({git['diff']})" if git.get("diff") else ""


def _listed(facts: Mapping[str, Any] | None) -> str | None:
    """Names and values in a line."""
    return (
        ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None) if facts else None
    )


def hashes(ledger: Ledger) -> list[tuple[str, str, str]]:
    """Model or task, what of it, and its hash."""
    found: dict[tuple[str, str, str], None] = {}
    for cell in ledger.cells.values():
        names = cell.about["names"]
        for session in cell.about.get("sessions", ()):
            model = {**(session.get("model") or {}), "chat template": session.get("template")}
            for of, its in (("model", model), ("task", session.get("sources") or {})):
                for part, value in its.items():
                    if value is not None:
                        found[str(names[of]), _shown(part), str(value)] = None
    return sorted(found)


@dataclass
class Failure:
    """One traceback, and the samples that ended with it."""

    last: str
    """Its last line."""
    traceback: str
    places: list[str] = field(default_factory=list)
    """Cell and sample."""


def failures(ledger: Ledger) -> list[Failure]:
    """What failed, the same traceback once."""
    found: dict[str, Failure] = {}
    for cell in ledger.cells.values():
        for sample, error in cell.failures.items():
            last = (error.strip() or "no traceback was stored").splitlines()[-1]
            failure = found.setdefault(
                error, Failure(_cut(last, LONGEST_LINE), _cut(error, LONGEST_TRACEBACK))
            )
            failure.places.append(f"{cell_label(cell.about)}, sample {sample}")
    return list(found.values())


def cell_label(about: Row) -> str:
    """A cell in words."""
    ratio = kv_ratio(about)
    budget = "" if ratio is None else f" at {100 * ratio:g} %"
    method = f"{about['names']['model']}, {method_label(about)}{budget}"
    return f"{method}, {task_label(about)}, {about['config']['length']}"


def _cut(text: str, most: int) -> str:
    """A text without its middle, if it is long."""
    cut = f" [... {len(text) - most} characters ...] "
    return text if len(text) <= most else text[: most // 2] + cut + text[-(most // 2) :]


def _shown(value: Any) -> str:
    """A setting's value; of a path on the machine that ran its last part."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2] if text[:1] in ("/", "~", "\\") else text
