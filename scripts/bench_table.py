"""What `make bench` measured beside what was asked for: a line for each key that names a bound. See bench.py.

python scripts/bench_table.py results/smollm2_135m/bench.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BOUND = re.compile(r"(?P<name>.+?) \((?:(?P<field>\w+) )?(?P<how>at most|at least|under) (?P<bound>[\d.]+)\)")
HINT = re.compile(r"\((?:\w+ )?(?:at most|at least|under) ")
HEAD = "| part | figure | asked | median | quartiles | repeats | |\n|---|---|---|---:|---|---:|---|"


def table(content: dict[str, Any]) -> str:
    """Markdown of all bounds in the file."""
    parts = {part: section for part, section in content.items() if isinstance(section, dict)}
    lines = [line for part, section in parts.items() for line in _lines(part, section, section["repeats"])]
    return "\n".join([HEAD, *lines])


def _lines(part: str, section: dict[str, Any], repeats: int) -> Iterator[str]:
    for key, value in section.items():
        if found := BOUND.fullmatch(key):
            yield _line(part, found, value, repeats)
        elif HINT.search(key):
            raise ValueError(f"{part}: {key!r} names a bound in no form that is read here")
        elif isinstance(value, dict):
            yield from _lines(f"{part}, {key}", value, repeats)


def _line(part: str, found: re.Match[str], value: Any, repeats: int) -> str:
    asked, field = f"{found['how']} {found['bound']}", found["field"]
    name = f"{found['name']}: {field}" if field else found["name"]
    number = value[field] if field else value["median"] if isinstance(value, dict) else value
    is_spread = isinstance(value, dict) and not field
    quartiles = f"{value['q1']} to {value['q3']}" if is_spread else ""
    bound = float(found["bound"])
    holds = {"at most": number <= bound, "at least": number >= bound, "under": number < bound}[found["how"]]
    cells = [part, name, asked, str(number), quartiles, str(repeats) if is_spread else "1",
             "" if holds else "missed"]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print it."""
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
