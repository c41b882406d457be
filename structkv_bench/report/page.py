"""Everything that was stored, as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from structkv_bench.catalog import choices, described, preset_values
from structkv_bench.errors import UserError
from structkv_bench.manifest import read_manifests
from structkv_bench.report import origins
from structkv_bench.report.compare import check_alike
from structkv_bench.report.findings import Finding, findings, tally
from structkv_bench.report.layout import grid
from structkv_bench.report.pictures import Picture, pictures
from structkv_bench.report.printed import Wish, table_of
from structkv_bench.report.render import html
from structkv_bench.report.results import line, lines_grid
from structkv_bench.report.stored import Evidence, Stored, load

MOST_CELLS = 1000
"""Of runs without an experiment, a row each."""
EVERYTHING = "everything"
"""Stands for the experiment where the results have no manifest."""


@dataclass
class Section:
    """One experiment."""

    name: str
    title: str
    description: str = ""
    error: str = ""
    """Why it has no table."""
    table: str = ""
    """As HTML."""
    is_figure: bool = False
    """Whether it is for a figure alone."""
    has_reference: bool = False
    findings: list[Finding] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    ran: str = ""
    """Models, tasks and lengths that were asked for."""
    done: int = 0
    asked: int = 0

    @property
    def about(self) -> str:
        """The description without the title's number, as a sentence."""
        text = self.description.removeprefix(f"{self.title.partition(':')[0]}: ")
        return text[:1].upper() + text[1:]

    @property
    def is_compared(self) -> bool:
        """Whether a row could be compared with the reference."""
        return tally(self.findings).total > 0

    @property
    def is_whole(self) -> bool:
        """Whether every sample that was asked for worked."""
        return self.done == self.asked


def page(results_dirs: Sequence[str | Path], wish: Wish) -> str:
    """The report as HTML; the same rows give the same text.

    Args:
        results_dirs: where `structkv-bench run` put them; several are merged.
        wish: the reference method, and whether rows of different protocols may stand in one table.

    Raises:
        UserError: there are no results, or a file is damaged.
    """
    ledger = origins.Ledger()
    names = {one.experiment for place in results_dirs for one in read_manifests(place)} or {EVERYTHING}
    sections = [_section(name, results_dirs, wish, ledger) for name in sorted(names, key=_place)]
    if not ledger.cells:
        load(results_dirs)  # tells what is missing or wrong
    return _rendered(
        sections=sections,
        reference=wish.reference,
        tally=tally(finding for section in sections for finding in section.findings),
        ledger=ledger,
        models=list(dict.fromkeys(cell.about["names"]["model"] for cell in ledger.cells.values())),
        settings={group: origins.settings(ledger, group) for group in ("model", "method", "task")},
        protocols=[(name, dict(described("protocol")).get(name, "")) for name in origins.protocols(ledger)],
        origins=origins.origins(ledger),
        hashes=origins.hashes(ledger),
        failures=origins.failures(ledger),
        most_failures=origins.MOST_FAILURES,
        most_places=origins.MOST_PLACES,
    )


def _place(name: str) -> tuple[int, list[tuple[int, str]]]:
    """Tables, figures, the rest; each by number."""
    kind = 0 if name.startswith("table") else 1 if name.startswith("fig") else 2
    return kind, [(int(part or 0), text) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _section(name: str, results_dirs: Sequence[str | Path], wish: Wish, ledger: origins.Ledger) -> Section:
    if name not in choices("experiment"):
        return _plain_section(name, results_dirs, ledger)
    preset = preset_values(name)
    section = Section(name, preset.get("title") or name, preset.get("description", ""))
    section.is_figure = preset.get("columns", "subtask") is None
    try:
        if section.is_figure:
            evidence = load(results_dirs, name)
            if not wish.allow_mixed:
                check_alike(evidence.cells)
        else:
            table, evidence, style = table_of(name, results_dirs, wish)
            section.table = html(grid(table, evidence, style))
            section.findings = findings(table, wish.reference)
            section.has_reference = any(row.method == wish.reference for row in table.rows)
        section.pictures = list(pictures(name, evidence))
    except UserError as error:
        section.error = str(error)
        evidence = _what_there_is(name, results_dirs)
    _count(section, evidence, ledger)
    return section


def _plain_section(name: str, results_dirs: Sequence[str | Path], ledger: origins.Ledger) -> Section:
    """Runs that name no experiment of ours: a row per cell, since they may not belong together."""
    section = Section(name, "Runs without an experiment" if name == "run" else name)
    try:
        evidence = load(results_dirs, None if name == EVERYTHING else name)
    except UserError as error:
        section.error = str(error)
        return section
    shown = lines_grid([line(cell.about, list(cell.rows.values())) for cell in evidence.cells[:MOST_CELLS]])
    rest = len(evidence.cells) - MOST_CELLS
    more = [f"And {rest} more cells, which `structkv-bench results` lists."] if rest > 0 else []
    shown.title, shown.notes = section.title, [*more, *evidence.notes]
    section.table = html(shown)
    _count(section, evidence, ledger)
    return section


def _what_there_is(name: str, results_dirs: Sequence[str | Path]) -> Evidence:
    """For the counts of an experiment whose rows can't be merged: those of each folder."""
    evidence = Evidence([])
    for place in results_dirs:
        try:
            evidence.cells += load([place], name).cells
        except UserError:  # of this experiment nothing is there, or nothing that can be read
            continue
    return evidence


def _count(section: Section, evidence: Evidence, ledger: origins.Ledger) -> None:
    section.ran = _extent(evidence.cells)
    section.done = sum(len(cell.ok) for cell in evidence.cells)
    section.asked = sum(max(cell.asked, len(cell.rows)) for cell in evidence.cells)
    ledger.add(evidence.cells)


def _extent(cells: Sequence[Stored]) -> str:
    """Models, tasks and lengths, as they were asked for."""
    suites: dict[str, dict[str, None]] = {}
    for cell in cells:
        suites.setdefault(str(cell.about["names"]["task"]), {})[cell.subtask] = None
    tasks = "; ".join(f"{suite}: {', '.join(its)}" for suite, its in suites.items())
    lengths = ", ".join(f"{length:,}" for length in sorted({cell.length for cell in cells}))
    most = max((cell.asked for cell in cells), default=0)
    models = ", ".join(dict.fromkeys(cell.model for cell in cells))
    return f"{models}; {tasks}; {lengths} tokens; up to {most} samples a cell"


def _rendered(**values: object) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    folder = files("structkv_bench.report") / "templates"
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    environment = Environment(
        loader=PackageLoader("structkv_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        style=Markup(style), script=Markup(script), policy=_policy(style, script), **values
    )


def _policy(style: str, script: str) -> str:
    """What a browser lets the page do: these two texts and embedded images, no request, no other script."""
    style_hash, script_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script)
    )
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'; "
        f"script-src 'sha256-{script_hash}'; base-uri 'none'; form-action 'none'"
    )
