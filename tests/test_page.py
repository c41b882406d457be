"""Stored rows -> one HTML page.

Rules protected here:
- The page needs no other file and no network, and can't be made to run what came out of a row.
- Same rows, same bytes; prompts, predictions and host names stay out of it.
- What is incomplete, failed or can't be compared is said where it stands, and stops nothing else.
- Its words are computed: better, worse and not distinguishable are those of the table's own tests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from structkv_bench.cli import main
from structkv_bench.plan import Cell
from structkv_bench.report.origins import LONGEST_TRACEBACK, MOST_FAILURES, MOST_PLACES
from structkv_bench.report.page import page
from structkv_bench.report.printed import Wish
from structkv_bench.report.render import Grid, html
from tests.pages import FIG8, PRIVATE, SESSION, TABLE2, TABLE3, N, failed, lay, row

HOSTILE = "</script><img src=x onerror=alert(1)>"
VOID = {"meta", "img", "link", "br"}


def made(place: Path, *more: Path, **wish: Any) -> str:
    return page([place, *more], Wish(**({"compare": True} | wish)))


class Reader(HTMLParser):
    """Every element with its attributes, and the text within each section; checks that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self.section = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            said = f"{self.sections.get(self.section, '')} {data}"
            self.sections[self.section] = " ".join(said.split())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three experiments, complete."""
    place = tmp_path_factory.mktemp("results")
    for experiment, overrides in (("fig8", FIG8), ("table3", TABLE3), ("table2", TABLE2)):
        lay(place, experiment, overrides)
    return made(place)


@pytest.fixture(scope="module")
def read(whole: str) -> Reader:
    return Reader(whole)


def test_every_experiment_has_its_table_its_figure_and_a_place_in_the_contents(whole: str, read: Reader):
    headings = re.findall(r"<h2>(.*?) <span", whole)
    assert headings == [
        "Table 2: RULER",
        "Table 3: decay of the centrality",
        "Figure 8: needle in a haystack",
    ]
    assert "90.00" in read.sections["experiment-1"]
    assert "n = 20 samples a task and length" in read.sections["experiment-1"]
    asked = "Asked for: llama3_1_8b; ruler: vt, fwe; 8,192, 16,384 tokens; up to 20 samples a cell."
    assert asked in read.sections["experiment-1"]
    assert sum(tag == "img" for tag, _ in read.elements) == 1
    links = [attributes["href"] for tag, attributes in read.elements if tag == "a"]
    ids = {f"#{attributes['id']}" for _, attributes in read.elements if "id" in attributes}
    assert {"#summary", "#experiment-3", "#protocol", "#provenance", "#failures"} <= set(links) <= ids


def test_the_papers_numbers_stand_where_the_preset_names_a_table(read: Reader):
    assert "ours less paper" in read.sections["experiment-1"]
    assert "90.10" in read.sections["experiment-1"]  # full at 8K
    assert "ours less paper" not in read.sections["experiment-3"]


def test_the_summary_counts_and_says_what_the_tests_of_the_table_say(read: Reader):
    told = read.sections["summary"]
    cells = 4 * 2 * 2 + 2 * 2 * 2 + 4 * 2  # table 3's default stands in table 2 too
    assert f"experiments 3 3 complete cells begun {cells} of {cells}" in told
    assert f"samples {cells * N} of {cells * N} failures 0 samples" in told
    assert "no set budget, against structkv at 10 % better full (+40.5)" in told
    assert "10 % of the KV cache worse streaming_llm (-45.0) not distinguishable snapkv (+4.5)" in told
    assert (
        "10 % of the KV cache, decay, against its default 0.9 not distinguishable 0.5 (0.0), 1 (0.0)" in told
    )
    assert "Of 8 comparisons with structkv" in told
    assert "better in 2 and worse in 2; in 4" in told


def test_another_reference_is_taken_and_one_that_is_not_there_is_said(tmp_path: Path):
    lay(tmp_path, "table2", TABLE2)
    told = Reader(made(tmp_path, reference="snapkv")).sections["summary"]
    assert "not distinguishable structkv (-4.5)" in told
    assert "h2o is not among its rows" in Reader(made(tmp_path, reference="h2o")).sections["summary"]


def test_the_same_rows_give_the_same_bytes(whole: str, tmp_path: Path):
    for experiment, overrides in (("table2", TABLE2), ("table3", TABLE3), ("fig8", FIG8)):
        lay(tmp_path, experiment, overrides)
    assert made(tmp_path) == whole


def test_nothing_is_fetched_and_nothing_runs_but_what_the_page_says(whole: str, read: Reader):
    """No address of another place, and a policy under which a browser would not ask for one."""
    assert not re.findall(r"https?:|@import|url\(|<link|<iframe|<object", whole)
    for _, attributes in read.elements:
        for name in ("src", "href", "data", "action", "srcset", "poster"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/")), attributes
        assert not any(name.startswith("on") or name == "style" for name in attributes)
    [policy] = [a["content"] or "" for t, a in read.elements if a.get("http-equiv")]
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        [text] = re.findall(rf"<{tag}>(.*?)</{tag}>", whole, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_texts_of_data_sets_hosts_and_folders_stay_out(whole: str):
    for secret in (PRIVATE, "a-host-name", "someone", "results_dir"):
        assert secret not in whole


def test_a_reader_that_hears_the_page_finds_its_way(whole: str, read: Reader):
    assert 'lang="en"' in whole
    assert all(a.get("scope") for tag, a in read.elements if tag == "th")
    assert all(a.get("alt") for tag, a in read.elements if tag == "img")
    assert whole.count("<caption>") == whole.count("<table>")
    assert [tag for tag, _ in read.elements].count("h1") == 1


def test_what_is_not_whole_says_so_in_its_heading(tmp_path: Path):
    def half(cell: Cell, sample: int) -> dict[str, Any] | None:
        return row(cell, sample) if sample < 8 or cell.length == 8192 else None

    lay(tmp_path, "table2", TABLE2, half, left_out={"qa_1": "SQuAD is not here"})
    lay(tmp_path, "table3", TABLE3, lambda cell, sample: None)
    told = Reader(made(tmp_path)).sections
    assert "Table 2: RULER INCOMPLETE: 224 of 320 samples" in told["experiment-1"]
    assert "qa_1 (SQuAD is not here)" in told["experiment-1"]
    # the default's cells are table 2's
    assert "INCOMPLETE: 56 of 240 samples" in told["experiment-2"]
    assert "experiments 2 0 complete" in told["summary"]


def test_a_sweep_at_several_budgets_is_compared_with_its_default_at_each(tmp_path: Path):
    lay(tmp_path, "table3", (*TABLE3[:2], "method.kv_ratio=0.1,0.2", *TABLE3[3:]))
    told = Reader(made(tmp_path)).sections["summary"]
    for budget in (10, 20):
        assert f"{budget} % of the KV cache, decay, against its default 0.9 not distinguishable 0.5" in told


def test_columns_are_compared_while_no_average_can_be(tmp_path: Path):
    lay(tmp_path, "table2", TABLE2, lambda cell, i: row(cell, i) if cell.length == 8192 else None)
    told = Reader(made(tmp_path)).sections["summary"]
    assert "10 % of the KV cache, 8192 worse streaming_llm (-45.0)" in told
    assert "16384" not in told


def test_rows_that_cannot_stand_together_show_that_in_their_place(tmp_path: Path):
    lay(tmp_path, "table2", TABLE2)
    lay(tmp_path, "table2", (*TABLE2, "protocol=paper"))
    lay(tmp_path, "table3", TABLE3)
    told = Reader(made(tmp_path)).sections
    assert "No table: different" in told["experiment-1"]
    assert "--allow-mixed" in told["summary"]
    assert "0.95" not in told["experiment-1"]
    assert "49.50" in told["experiment-2"]
    assert "official : each benchmark's own prompts" in told["protocol"]
    assert "No table" not in made(tmp_path, allow_mixed=True)


def test_a_figure_that_cannot_be_drawn_says_why(tmp_path: Path):
    lay(tmp_path, "fig4", (*FIG8[1:], "method=structkv"))
    told = Reader(made(tmp_path)).sections["experiment-1"]
    assert "fig4 can't be drawn" in told


def test_failures_stand_once_each_with_their_traceback(tmp_path: Path):
    trace = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nMemoryError: too long'

    def make(cell: Cell, sample: int) -> dict[str, Any]:
        return (
            failed(cell, sample, trace) if (cell.method_name, sample) == ("snapkv", 3) else row(cell, sample)
        )

    lay(tmp_path, "table2", TABLE2, make)
    text = made(tmp_path)
    told = Reader(text).sections
    assert "4 samples failed" in told["failures"]
    assert '<p class="error">MemoryError: too long</p>' in text
    assert text.count(trace.splitlines()[1].strip().replace('"', "&#34;")) == 1
    assert "llama3_1_8b, snapkv at 10 %, fwe, 16384, sample 0003" in told["failures"]
    assert "INCOMPLETE: 316 of 320" in told["summary"]


def test_many_and_long_failures_keep_the_page_small(tmp_path: Path):
    def make(cell: Cell, sample: int) -> dict[str, Any]:
        return failed(cell, sample, "same" if cell.length == 8192 else "x" * 200_000 + cell.key + str(sample))

    lay(
        tmp_path, "table2", (*TABLE2[:-2], "model=llama3_1_8b", "task.lengths=[8192,16384,32768,65536]"), make
    )
    text = made(tmp_path)
    assert len(text.encode()) < 5e6
    assert text.count('<article class="failure">') == MOST_FAILURES
    assert f"and {8 * N - MOST_PLACES} more" in text
    assert f"And {24 * N + 1 - MOST_FAILURES} other tracebacks" in text
    assert max(map(len, text.splitlines())) < 12 * LONGEST_TRACEBACK


def test_what_came_out_of_a_row_is_text(tmp_path: Path):
    names = {"model": HOSTILE, "method": f"x{HOSTILE}", "protocol": HOSTILE}
    session = SESSION | {
        "device": HOSTILE,
        "git": {"commit": HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "model": {"weights": HOSTILE},
        "sources": {HOSTILE: HOSTILE},
    }
    lay(
        tmp_path, "table2", TABLE2, lambda cell, i: failed(cell, i, HOSTILE) if i else row(cell, i),
        session=session, names=names, left_out={HOSTILE: HOSTILE},
    )  # fmt: skip
    lay(tmp_path, "fig8", FIG8, names=names)
    lay(tmp_path, "run", TABLE3, names=names, session=session)
    text = made(tmp_path)
    assert text.count("onerror") > 20
    reader = Reader(text)
    assert "<img src=x" not in text
    assert [tag for tag, _ in reader.elements].count("script") == 1
    assert all((a["src"] or "").startswith("data:") for tag, a in reader.elements if tag == "img")


def test_protocol_and_provenance_are_those_of_what_ran(read: Reader):
    assert "kv_ratio 0.1" in read.sections["protocol"]
    assert "decay 0.9, 0.5, 1.0" in read.sections["protocol"]
    assert "length 8192, 16384 samples 20" in read.sections["protocol"]
    origin = read.sections["provenance"]
    assert f"commit {'a' * 40}, with changes that are not in it" in origin
    assert "python 3.11.7, torch 2.13.0+cpu" in origin
    assert "device NVIDIA H200" in origin
    assert "llama3_1_8b weights b1c5b552321151dc" in origin
    assert f"ruler squad.json {'5' * 16}" in origin


def test_runs_of_no_experiment_have_a_row_per_cell(tmp_path: Path):
    """Also where the results are older than manifests."""
    lay(tmp_path, "run", TABLE2)
    told = Reader(made(tmp_path)).sections["experiment-1"]
    assert "Runs without an experiment" in told
    assert told.count("streaming_llm") == 4
    (tmp_path / "manifests" / "run.json").unlink()
    assert Reader(made(tmp_path)).sections["experiment-1"].count("streaming_llm") == 4


def test_several_folders_are_one_report(tmp_path: Path):
    lay(tmp_path / "a", "table2", TABLE2, lambda cell, i: row(cell, i) if i < 12 else None)
    lay(tmp_path / "b", "table2", TABLE2, lambda cell, i: row(cell, i) if i > 9 else None)
    told = Reader(made(tmp_path / "a", tmp_path / "b")).sections
    assert "Table 2: RULER 320 samples" in told["experiment-1"]
    assert "32 samples are in several of the results folders" in told["experiment-1"]


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lay(tmp_path, "table2", TABLE2)
    out = tmp_path / "new" / "report.html"
    assert main(["report", "--results", str(tmp_path), "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == made(tmp_path)
    assert str(out) in capsys.readouterr().out


def test_without_results_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "report.html"
    assert main(["report", "--results", str(tmp_path / "none"), "--out", str(out)]) == 2
    assert "structkv-bench run" in capsys.readouterr().err
    assert not out.exists()


def test_an_experiment_of_which_nothing_ran_stands_there_empty(tmp_path: Path):
    lay(tmp_path, "table2", TABLE2, lambda cell, sample: None)
    assert "INCOMPLETE: 0 of 320 samples" in Reader(made(tmp_path)).sections["experiment-1"]


def test_the_report_needs_no_torch(tmp_path: Path):
    lay(tmp_path, "table2", TABLE2)
    lay(tmp_path, "fig8", FIG8)
    code = (
        "import sys; from structkv_bench.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    arguments = ["report", "--results", str(tmp_path), "--out", str(tmp_path / "report.html")]
    assert subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode == 0


@pytest.mark.parametrize(
    ("shown", "number"),
    [
        ("53.30", "53.30"),
        ("53.30≈ [48.1, 58.0]", "53.30"),
        ("53.30≈* 12/20", "53.30"),
        ("87.50†", "87.50"),
        ("10 → 9.95", "9.95"),
        ("-4.50", "-4.50"),
        ("+4.50", "+4.50"),
        ("1e-05", "1e-05"),
        ("12/20", None),
        ("", None),
    ],
)
def test_a_cell_sorts_by_the_number_that_it_shows_first(shown: str, number: str | None):
    text = html(Grid(["method", "score"], [["full", shown]], ("method",)))
    assert re.findall(r'data-sort="(.*?)"', text) == ([] if number is None else [number])
    assert re.sub("<.*?>", "", text).endswith(shown)


def test_groups_are_bodies_of_their_own_and_indented_rows_belong_to_the_one_above():
    rows = [["full", "1"], ["snapkv", "2"], ["  paper", "3"], ["structkv", "4"]]
    text = html(Grid(["method", "score"], rows, ("method",), "A title", ["A note"], {1: "some", 3: "others"}))
    assert [body.count("<tr") for body in re.findall(r"<tbody>(.*?)</tbody>", text, re.DOTALL)] == [1, 3, 2]
    assert '<tr class="under"><th scope="row" class="text">paper</th>' in text
    assert "<caption>A title</caption>" in text
    assert "<p>A note</p>" in text


def test_a_damaged_manifest_stops_the_report(tmp_path: Path):
    """A damaged manifest stops the report with the file's name: what it asked for is not known."""
    lay(tmp_path, "table2", TABLE2)
    (tmp_path / "manifests" / "table2.json").write_text(json.dumps({"x": 1}), encoding="utf-8")
    assert main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 2
