"""A verdict of the regression gate as text, Markdown, JSON or JUnit XML."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from structkv_bench.gate.regress import EVERY_CHECK, Judged, Verdict

NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 can't hold."""


NOT_COMPARED = "not compared"


def rendered(verdict: Verdict, format: str) -> str:
    """The verdict as text, markdown, json or junit, no line break at its end."""
    return {"text": _text, "markdown": _markdown, "json": _json, "junit": _junit}[format](verdict)


def findings(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Every obstacle and fault: cell, check, what it says."""
    return [
        *((obstacle.label, NOT_COMPARED, obstacle.says) for obstacle in verdict.obstacles),
        *((cell.label, fault.check, fault.says) for cell in verdict.cells for fault in cell.faults),
    ]


def _text(verdict: Verdict) -> str:
    lines = [f"{cell}: {check}: {says}" for cell, check, says in findings(verdict)]
    compared = f"{verdict.baseline} -> {verdict.current}: {verdict.headline}"
    return "\n".join([*lines, *verdict.notes, compared])


def _markdown(verdict: Verdict) -> str:
    sign = {0: "✅", 1: "❌", 2: "⚠️"}[verdict.exit_code]
    lines = [
        f"### {sign} KV-cache regression gate",
        "",
        f"{verdict.headline[:1].upper()}{verdict.headline[1:]}.",
        "",
    ]
    if found := findings(verdict):
        lines += _table(("cell", "check", "what"), found)
    rows = [
        (cell.label, str(cell.samples), _score(cell), str(cell.ties), _checks(cell)) for cell in verdict.cells
    ]
    lines += ["<details><summary>All cells</summary>", ""]
    lines += _table(("cell", "samples", "score", "near ties", "checks that failed"), rows)
    lines += ["</details>", "", f"`{verdict.baseline}` against `{verdict.current}`"]
    return "\n".join([*lines, *(f"- {note}" for note in verdict.notes)])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines), ""]


def _score(cell: Judged) -> str:
    if cell.score_before is None or cell.score_after is None:
        return ""
    before, after = f"{cell.score_before:.2f}", f"{cell.score_after:.2f}"
    return before if before == after else f"{before} → {after}"


def _checks(cell: Judged) -> str:
    return ", ".join(fault.check for fault in cell.faults)


def _json(verdict: Verdict) -> str:
    told: dict[str, Any] = {"exit_code": verdict.exit_code, "headline": verdict.headline}
    return json.dumps(told | asdict(verdict), ensure_ascii=False, indent=2)


def _junit(verdict: Verdict) -> str:
    """A test case for each check of each cell; a cell that can't be compared is one error."""
    faults = sum(len(cell.faults) for cell in verdict.cells)
    tests = len(verdict.cells) * len(EVERY_CHECK) + len(verdict.obstacles)
    counts = {"tests": str(tests), "failures": str(faults), "errors": str(len(verdict.obstacles))}
    root = Element("testsuites", counts)
    suite = SubElement(root, "testsuite", {"name": "structkv-bench regress", **counts})
    said = {(cell, check): says for cell, check, says in findings(verdict)}
    labels = [cell.label for cell in verdict.cells]
    cases = [(label, check, "failure") for label in labels for check in EVERY_CHECK]
    cases += [(cell, check, "error") for cell, check in said if check == NOT_COMPARED]
    for cell, check, kind in cases:
        case = SubElement(suite, "testcase", {"classname": NO_XML.sub("?", cell), "name": check})
        if (cell, check) in said:
            SubElement(case, kind, {"message": NO_XML.sub("?", said[cell, check])})
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode")
