"""Every command and every method that the README and docs/ show works as shown."""

from __future__ import annotations

import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from structkv_bench.bench import measure
from structkv_bench.bench.measure import Wish
from structkv_bench.cli import main
from structkv_bench.config import compose
from tests.tasks.longbench_rows import lay, row
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(fence: str) -> list[str]:
    """The commands in blocks of this kind."""
    blocks = [
        block
        for page in PAGES
        for block in re.findall(rf"```{fence}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return sorted({line for line in lines if line.startswith("structkv-bench ")})


COMMANDS = shown("console")
NOT_HERE = [
    line for line in shown("bash") if line.split()[1] in ("run", "show", "fetch", "bench", "calibrate")
]
"""Need a cluster, a GPU, a network or an hour: that they are understood is tested."""
SMALL = {"model": "custom", "model.name": "tiny", "task.lengths": "[1500]", "task.samples": "4"}
"""In place of what a command says, so that it takes a second: a tiny model and short samples."""
READERS = dict.fromkeys(("results", "report", "score", "status", "provenance"), "")
READERS |= {"table": "table", "figure": "fig"}
"""Commands that need rows, and how the experiment is called that they name by a number."""
TASKS = {
    "niah": {"task.haystack": "noise"},
    "ruler": {"task.subset": "[niah_single_1]"},
    "longbench": {"task.subset": "[qasper]", "task.source": "."},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), layers=16)  # the pages speak of a layer 13


def shrunk(command: str, model: Path, results: Path) -> list[str]:
    """The command on a tiny model and texts of the working directory; what needs a network only composes."""
    name, *arguments = shlex.split(command)[1:]
    if name not in ("run", "show", "fetch"):
        return [name, *arguments]
    options = arguments[arguments.index("--sample") :] if "--sample" in arguments else []
    overrides = dict(argument.split("=", 1) for argument in arguments[: len(arguments) - len(options)])
    task = "ruler" if "experiment" in overrides else overrides.get("task", "niah")
    overrides |= SMALL | TASKS[task] | {"model.path": str(model), "results_dir": str(results)}
    return [name, *(f"{key}={value}" for key, value in overrides.items()), *options]


def test_there_are_commands() -> None:
    """The pages are read: a pattern that finds nothing would pass every test below."""
    assert len(COMMANDS) >= 8
    assert len(NOT_HERE) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_command(
    command: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Each command of a page ends with exit code 0 and prints something, or writes it."""
    monkeypatch.chdir(tmp_path)
    lay(tmp_path, "qasper", row(context="One sentence of many. " * 100))
    predictions = tmp_path / "PREDICTIONS_DIR"
    predictions.mkdir()
    lay(predictions, "qasper", row(pred="you"))
    asked = shlex.split(command)[1:]
    if asked[0] in READERS:  # they read what the default folder holds
        kind, named = READERS[asked[0]], asked[1] if asked[0] in ("table", "figure") else "quickstart"
        experiment = f"{kind}{named}" if named.isdigit() else named
        runs = f"structkv-bench run experiment={experiment}"
        main(shrunk(runs, model_folder, Path("results/runs")))
    arguments = shrunk(command, model_folder, tmp_path)
    if arguments[0] == "fetch":  # what it does needs a network; that it is understood does not
        assert compose(shlex.split(command)[2:])
        return
    capsys.readouterr()
    assert main(arguments) == 0
    assert capsys.readouterr().out or (tmp_path / "vt.jsonl").is_file()


@pytest.mark.parametrize("command", NOT_HERE)
def test_what_cannot_run_here_is_understood(command: str) -> None:
    typed = shlex.split(command)[2:]
    overrides = list(takewhile(lambda text: not text.startswith("--"), typed))
    own = [text for text in overrides if not text.startswith("calibration")]
    assert compose(measure.overrides(own, Wish()) if command.split()[1] == "bench" else own)


def test_no_page_is_unfinished() -> None:
    """No placeholder is left, and each linked file of the project exists."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r"\b[A-Z]+_(?:TABLE|S)\b|\bRATIO\b|TODO", text)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (page.parent / link).exists(), (page.name, link)


def test_the_method_that_the_readme_writes_runs(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The example of 'Add a method' is taken from the page and run as it says."""
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_method.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_method", raising=False)
    target = "structkv-bench run method=snapkv method._target_=my_method.EveryOther method.kv_ratio=0.5"
    assert main(shrunk(target, model_folder, tmp_path / "results")) == 0
    assert "EveryOther" in capsys.readouterr().out


def test_the_make_targets_that_the_readme_names_exist() -> None:
    """`make x` in a page is a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:`|^ {4})make (\w+)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert {"run", "test"} <= named
    for name in named:
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), name
