"""What the tests of the regression gate share: a run of a tiny model, changed rows, the gate's answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from structkv_bench.cli import main
from tests.runs import overrides

METHODS = ("full", "h2o", "snapkv", "streaming_llm", "structkv")


def run(model: Path, results: Path, *more: str) -> Path:
    """A results folder of five methods, three samples each."""
    own = (f"method={','.join(METHODS)}", "task.lengths=[500]", "task.samples=3")
    assert main(overrides(model, results, *own, *more)) == 0
    return results


def verdict(capsys: Any, baseline: Path, current: Path, *options: str) -> tuple[int, dict[str, set[str]]]:
    """The exit code, and the checks that failed for each method."""
    capsys.readouterr()
    code = regress(baseline, current, "--format", "json", *options)
    told = json.loads(capsys.readouterr().out)
    cells = {cell["label"].split()[1]: {fault["check"] for fault in cell["faults"]} for cell in told["cells"]}
    return code, {method: faults for method, faults in cells.items() if faults}


def regress(baseline: Path, current: Path, *options: str) -> int:
    return main(["regress", "--baseline", str(baseline), "--current", str(current), *options])


def edit(results: Path, method: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change each row of one method's cell."""
    [folder] = results.glob(f"tiny.{method}[-.]*")
    for file in folder.glob("rows*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        for row in rows:
            change(row)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
