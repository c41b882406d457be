"""Each experiment composes what its table or figure needs, and a table's runs to the printed table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from structkv_bench.catalog import choices, preset_values
from structkv_bench.cli import main
from structkv_bench.config import compose
from structkv_bench.report.paper import FILES, read_csv
from structkv_bench.tasks.longbench.catalog import ENGLISH, SPECS
from tests.tasks.longbench_rows import lay, row
from tests.tiny import save_tiny

TABLES = [*(f"table{number}" for number in range(1, 8)), "ablations"]
FIGURES = [f"fig{number}" for number in (1, 3, 4, 5, 6, 7, 8)]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that shrink an experiment to a tiny model, two tasks and two samples of each."""
    texts = tmp_path_factory.mktemp("texts")
    for name in ENGLISH:
        classes = ["me", "you"] if SPECS[name].metric == "classification" else None
        rows = [row(_id=str(i), context="One sentence of many. " * 100, all_classes=classes) for i in (1, 2)]
        lay(texts, name, *rows)
    model = save_tiny(tmp_path_factory.mktemp("model"))
    return [
        *("model=custom", f"model.path={model}", "model.name=tiny", "task.samples=2"),
        f"task.source={texts}",
    ]


def shrunk(experiment: str, tiny_run: list[str]) -> list[str]:
    ruler = "task=ruler" in preset_values(experiment)["overrides"]
    own = ["task.lengths=[1500]", "task.subset=[fwe,niah_single_1]", "task.answer_room=4"]
    longbench = ["task.lengths=[700]", "task.subset=[trec,triviaqa]"]
    kept = [text for text in tiny_run if not (ruler and text.startswith("task.source"))]
    return [f"experiment={experiment}", *kept, *(own if ruler else longbench)]


def test_the_papers_tables_and_figures_all_have_an_experiment() -> None:
    assert set(choices("experiment")) >= {*TABLES, *FIGURES, "quickstart"}


@pytest.mark.parametrize("experiment", [*TABLES, *FIGURES])
def test_it_composes_with_a_title_and_says_which_paper_table(experiment: str) -> None:
    """Each has the paper's methods and budgets of its table; a missing text is an error at once."""
    setups, preset = compose([f"experiment={experiment}"]), preset_values(experiment)
    assert preset["title"]
    printed = [one for file in FILES for one in read_csv(file) if one["table"] == preset.get("paper")]
    assert bool(printed) == experiment.startswith("table")
    ours = {
        (s.method_name, getattr(s.method, "kv_ratio", 1.0) if s.method_name != "full" else 1.0)
        for s in setups
    }
    assert {(one["method"], float(one["kv_pct"]) / 100) for one in printed if one["kv_pct"]} <= ours
    if printed:
        assert {s.task.missing for s in setups} == {"error"}
        assert {one["model"].removesuffix("_instruct") for one in printed} == {setups[0].model.name}


@pytest.mark.parametrize("experiment", TABLES)
def test_it_runs_to_its_table_on_a_tiny_model(
    experiment: str, tiny_run: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert main(["run", *shrunk(experiment, tiny_run), f"results_dir={tmp_path}"]) == 0
    capsys.readouterr()
    name = experiment.removeprefix("table")
    assert main(["table", name, "--results", str(tmp_path), "--compare", "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"**{preset_values(experiment)['title']} · tiny**")
    labels = {line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| ")}
    wanted = {setup.method_name for setup in compose([f"experiment={experiment}"])}
    assert {label.split(" ")[0] for label in labels} >= wanted


def test_an_experiment_for_a_figure_alone_has_no_table_unless_columns_are_asked_for(
    tiny_run: list[str], tmp_path: Path, capsys: Any
) -> None:
    """Its scores say nothing: Figure 7 times prefills and generates one token."""
    own = ["task.haystack=noise", "task.lengths=[700]", "method=full,structkv", f"results_dir={tmp_path}"]
    texts = [text for text in tiny_run if not text.startswith("task.source")]
    assert main(["run", "experiment=fig7", *texts, *own]) == 0
    assert main(["table", "fig7", "--results", str(tmp_path)]) == 2
    assert "structkv-bench figure 7 draws it" in capsys.readouterr().err
    assert main(["table", "fig7", "--columns", "length", "--results", str(tmp_path)]) == 0


def test_one_reason_for_many_tasks_is_said_once(tmp_path: Path, capsys: Any) -> None:
    """Table 1 where LongBench was not fetched: one line, which names the tasks and how to get their texts."""
    assert main(["run", "experiment=table1", "model=smollm2_135m", f"results_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.count("structkv-bench fetch task=longbench") == 1
    assert all(told.count(f"{name}") >= 1 for name in ENGLISH)
