"""Stored rows -> figures.

Rules protected here:
- Each figure's experiment runs, on a tiny model, and its CSV holds what one computes by hand from the rows.
- A figure is drawn from the lines of its CSV alone, with the same bytes each time.
- What is missing is said and never drawn as a number; rows that lack what a figure shows are refused.
- Methods are told apart without colour; heat maps of needles have the official colours.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from structkv_bench.cli import main
from structkv_bench.report.drawn import figures_of
from structkv_bench.report.figures import FIGURES, fig7, fig8
from structkv_bench.report.figures.style import METHODS, as_bytes, looks, styled
from structkv_bench.report.stored import load
from tests.tiny import save_tiny

LAYERS = 8
SHORT = ["task=niah", "task.haystack=noise", "task.lengths=[500,700]", "task.samples=4", "task.depths=4"]
SHORT += ["task.max_new_tokens=2"]
TWO = "method.kv_ratio=0.1,0.4"
SMALL = {"fig1": [*SHORT, TWO], "fig6": [*SHORT, TWO, "method.struct_ratio=0.1,0.4"]}
"""What makes an experiment short; all others: SHORT."""
DRAWN = {"1": ["fig1a", "fig1b"], **{number: [f"fig{number}"] for number in "345678"}}
NUMBERS = list(DRAWN)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), layers=LAYERS)


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The results folder of a figure's experiment; it runs when first asked for."""
    folders: dict[str, Path] = {}

    def folder(number: str) -> Path:
        if number not in folders:
            folders[number] = tmp_path_factory.mktemp(f"fig{number}")
            assert run(model, folders[number], f"experiment=fig{number}") == 0
            partly(folders[number], None, marked)
        return folders[number]

    return folder


def marked(cell: str, rows: list[str]) -> list[str]:
    """Rows with other scores: a random model has no answer right."""
    rng = random.Random(cell)
    return [json.dumps(json.loads(row) | {"score": rng.randrange(12) / 11}) + "\n" for row in rows]


def partly(place: Path, to: Path | None, change: Callable[[str, list[str]], list[str]]) -> Path:
    """Results (a copy, where a place for it is given) whose cells hold other rows."""
    if to is not None:
        shutil.copytree(place, to)
    for file in (to or place).glob("*/rows.jsonl"):
        rows = change(file.parent.name, file.read_text().splitlines(keepends=True))
        file.write_text("".join(rows))
    return to or place


def run(model: Path, place: Path, experiment: str, *more: str) -> int:
    custom = ["model=custom", f"model.path={model}", "model.name=tiny", f"results_dir={place}"]
    chosen = dict(item.split("=", 1) for item in [*SMALL.get(experiment.partition("=")[2], SHORT), *more])
    return main(["run", experiment, *custom, *(f"{key}={value}" for key, value in chosen.items())])


def figure(number: str, place: Path, out: Path, *arguments: str) -> int:
    return main(["figure", number, "--results", str(place), "--out", str(out), *arguments])


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [
        {name: _value(text) for name, text in line.items()}
        for line in csv.DictReader(file.read_text().splitlines())
    ]


def _value(text: str) -> Any:
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def drawn(number: str, place: Path, out: Path, name: str | None = None) -> list[dict[str, Any]]:
    """The lines of the CSV that the command writes."""
    assert figure(number, place, out) == 0
    return lines_of(out / f"{name or 'fig' + number}.csv")


def rows_of(place: Path) -> list[dict[str, Any]]:
    """Every row as it lies there, with its method's settings, task and length."""
    found = []
    for file in sorted(place.glob("*/rows.jsonl")):
        about = json.loads((file.parent / "cell.json").read_text())
        cell = {"method": about["names"]["method"], "config": about["config"]["method"]}
        cell |= {"subtask": about["config"]["subtask"], "length": about["config"]["length"]}
        found += [json.loads(line) | cell for line in file.read_text().splitlines()]
    return found


def of(rows: list[dict[str, Any]], method: str, **settings: Any) -> list[dict[str, Any]]:
    """Rows of a method whose settings or other values are these."""
    return [
        row for row in rows
        if row["method"] == method and all((row | row["config"])[k] == v for k, v in settings.items())
    ]  # fmt: skip


def score(rows: list[dict[str, Any]]) -> float:
    """In percent; each length counts once."""
    lengths = {row["length"] for row in rows}
    return 100 * fmean(fmean(row["score"] for row in rows if row["length"] == length) for length in lengths)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_command_writes_each_file_and_names_it(ran, tmp_path, capsys, number):
    place = ran(number)
    capsys.readouterr()
    assert figure(number, place, tmp_path / "new" / "folder") == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == [
        f"{n}.{kind}" for n in DRAWN[number] for kind in ("png", "svg", "csv")
    ]
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")
        elif file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag.endswith("svg")
            assert b"<dc:date>" not in file.read_bytes()
    again = tmp_path / "again"
    assert figure(f"fig{number}", place, again) == 0
    for file in files:
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("number", NUMBERS)
def test_a_figure_is_drawn_from_its_csv_alone(ran, tmp_path, number):
    place = ran(number)
    assert figure(number, place, tmp_path) == 0
    for one in figures_of(f"fig{number}", load([place], f"fig{number}")):
        read = lines_of(tmp_path / f"{one.name}.csv")
        assert read == [{k: v for k, v in line.items()} for line in one.lines]
        with styled():
            svg = [as_bytes(FIGURES[one.name].draw(lines), "svg") for lines in (read, one.lines)]
        assert svg[0] == svg[1]


def texts_of(figure: Figure) -> list[Text]:
    """All that is seen; ticks beyond an axis' limits are not."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    found += [text for text in (figure._suptitle, figure._supxlabel) if text not in found]
    for axes in figure.axes:
        if not axes.axison:
            continue
        found += [*axes.texts, axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = [tick for tick in axis.get_major_ticks() if min(limits) <= tick.get_loc() <= max(limits)]
            found += [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_text_is_cut_off_or_lies_on_another(ran, number):
    for one in figures_of(f"fig{number}", load([ran(number)], f"fig{number}")):
        with styled():
            FigureCanvasAgg(one.figure).draw()  # lays it out
        width, height = one.figure.bbox.size
        texts = texts_of(one.figure)
        boxes = [(text.get_text(), text.get_window_extent().padded(-1.5)) for text in texts]
        for text, box in boxes:
            assert min(box.x0, box.y0, width - box.x1, height - box.y1) >= 0, (one.name, text)
        for (text, box), (other, its) in itertools.combinations(boxes, 2):
            assert not box.overlaps(its), (one.name, text, other)
        assert all(text.get_fontsize() >= 8 for text in texts)


def test_figure_1(ran, tmp_path):
    rows, lines = rows_of(ran("1")), drawn("1", ran("1"), tmp_path, "fig1a")
    assert len(lines) == 2 + 6 * 2  # full and pyramidinfer have no ratio
    for line in lines:
        ratio = line["kv_nominal_pct"]
        its = of(rows, line["method"], **({} if ratio is None else {"kv_ratio": ratio / 100}))
        assert line["score"] == pytest.approx(score(its), abs=1e-3)
        assert line["n"] == line["asked"] == len(its) == 8
        held = fmean(100 * row["kv_bytes"] / row["kv_bytes_full"] for row in its)
        assert line["kv_pct"] == pytest.approx(held, abs=1e-3)
        assert line["prefill_pct"] == pytest.approx(fmean(row["prefill_pct"] for row in its), abs=1e-3)
    near = lines_of(tmp_path / "fig1b.csv")
    assert near == [line for line in lines if line["kv_nominal_pct"] in (None, 10.0)]
    assert len(near) == 8


def test_figure_3(ran, tmp_path):
    rows, lines = rows_of(ran("3")), drawn("3", ran("3"), tmp_path)
    ours = {(one["length"], one["pivot"]): one["samples"] for one in lines if one["source"] == "measured"}
    assert ours == Counter((row["length"], row["pivot"]) for row in rows)
    assert all(one["depth_pct"] == 100 * one["pivot"] / LAYERS for one in lines if one["n"])
    paper = [(o["model"], o["pivot"], o["layers"]) for o in lines if o["source"] == "paper, secondary"]
    assert paper == [("qwen2_5_7b", 12, 28), ("qwen2_5_14b", 20, 48), ("qwen2_5_32b", 28, 64)]


def test_figure_4(ran, tmp_path):
    rows, lines = rows_of(ran("4")), drawn("4", ran("4"), tmp_path)
    assert len(lines) == 2 * 4 * LAYERS
    for line in lines:
        its = [row for row in rows if row["length"] == line["length"]]
        values = [v for row in its if (v := row["signals"][line["signal"]][line["layer"]]) is not None]
        assert line["n"] == len(values)
        assert line["searched"] == (2 <= line["layer"] <= 5)  # a quarter to two thirds of eight layers
        assert line["pivots"] == sum(row["pivot"] == line["layer"] for row in its)
        if values:
            assert line["mean"] == pytest.approx(fmean(values), abs=1e-4)
            assert (line["least"], line["greatest"]) == (min(values), max(values))


def test_figure_5(ran, tmp_path):
    """A row's list begins at its cut, whose layer thus is the model's layers less the list's length."""
    rows, lines = rows_of(ran("5")), drawn("5", ran("5"), tmp_path)
    assert {line["method"] for line in lines} == {"gemfilter", "fastkv", "structkv"}
    for line in lines:
        its = of(rows, line["method"], length=line["length"])
        begins = {"fastkv": 3, "gemfilter": 3}
        values = []
        for row in its:
            cut = begins.get(row["method"], row["pivot"])
            if line["layer"] >= cut:
                values.append(row["fidelity"][line["layer"] - cut])
        assert line["fidelity"] == pytest.approx(fmean(values), abs=1e-6)
        assert line["n"] == len(values)
    first = [line for line in lines if line["method"] == "fastkv" and line["layer"] == 3]
    assert all(line["fidelity"] == pytest.approx(1, abs=1e-4) for line in first)


def test_figure_6(ran, tmp_path):
    rows, lines = rows_of(ran("6")), drawn("6", ran("6"), tmp_path)
    pairs = {(line["struct_pct"], line["kv_nominal_pct"]): line for line in lines}
    assert set(pairs) == set(itertools.product((10.0, 40.0), (10.0, 40.0)))
    for (struct, kv), line in pairs.items():
        its = of(rows, "structkv", struct_ratio=struct / 100, kv_ratio=kv / 100)
        assert line["score"] == pytest.approx(score(its), abs=1e-3)
        assert line["n"] == len(its) == 8


def test_figure_7(ran, tmp_path):
    rows, lines = rows_of(ran("7")), drawn("7", ran("7"), tmp_path)
    for line in lines:
        its, full = (of(rows, method, length=line["length"]) for method in (line["method"], "full"))
        own, reference = (median(row["prefill_s"] for row in some) for some in (its, full))
        for part in fig7.PARTS:
            seconds = median(row["prefill_parts_s"][part] for row in its)
            assert line[f"{part}_s"] == pytest.approx(seconds, abs=1e-6)
        assert line["prefill_s"] == pytest.approx(own, abs=1e-6)
        assert line["speedup_x"] == pytest.approx(reference / own, abs=1e-4)
        chosen = [sum(row["prefill_parts_s"][part] for part in fig7.OVERHEAD) for row in its]
        share = median(100 * part / row["prefill_s"] for part, row in zip(chosen, its, strict=True))
        assert line["overhead_pct"] == pytest.approx(share, abs=1e-4)


def test_figure_8(ran, tmp_path):
    rows, lines = rows_of(ran("8")), drawn("8", ran("8"), tmp_path)
    ran_methods = {line["method"] for line in lines}
    assert len(ran_methods) == 8
    for method in ran_methods:
        its = of(rows, method)
        cells = {(one["length"], one["depth_pct"]): one["score"] for one in lines if one["method"] == method}
        average = cells.pop(("all", "all"))
        assert cells == {(row["length"], row["fields"]["depth"]): round(row["score"], 4) for row in its}
        assert len(cells) == 8
        assert average == pytest.approx(fmean(row["score"] for row in its), abs=1e-3)
    [one] = figures_of("fig8", load([ran("8")], "fig8"))
    panel = one.figure.axes[0]
    assert panel.get_title(loc="left").startswith(f"full: {fmean(r['score'] for r in of(rows, 'full')):.2f}")
    assert panel.get_ylim()[0] > panel.get_ylim()[1]  # depth 0 on top
    assert [text.get_text() for text in panel.get_xticklabels()] == ["500", "700"]


def test_what_is_missing_is_said_and_never_drawn_as_a_number(ran, tmp_path):
    some = partly(ran("8"), tmp_path / "some", lambda cell, rows: rows[:1] if ".structkv" in cell else rows)
    [one] = figures_of("fig8", load([some], "fig8"))
    assert one.title.endswith("niah · tiny · INCOMPLETE: 58 of 64 samples")
    assert "n = 1 to 4 samples" in one.caption
    lines = [line for line in one.lines if line["method"] == "structkv" and line["length"] != "all"]
    assert Counter(line["score"] is None for line in lines) == {True: 6, False: 2}
    panel = one.figure.axes[7]
    assert "2 of 8 cells" in panel.get_title(loc="left")
    assert [text.get_text() for text in panel.texts].count("-") == 6


def test_a_mean_over_a_part_that_has_not_begun_is_no_point(ran, tmp_path):
    def keep(cell: str, rows: list[str]) -> list[str]:
        return [] if "snapkv" in cell and ".700." in cell else rows

    one, other = figures_of("fig1", load([partly(ran("1"), tmp_path / "some", keep)], "fig1"))
    assert all((line["score"] is None) == (line["method"] == "snapkv") for line in one.lines)
    assert [line["n"] for line in one.lines if line["method"] == "snapkv"] == [4, 4]
    assert "INCOMPLETE" in one.title
    [legend] = one.figure.legends
    assert "snapkv" not in [text.get_text() for text in legend.get_texts()]
    assert "4 of 8 samples" in [text.get_text() for text in other.figure.axes[0].texts]


def test_fidelity_without_the_full_pass_beside_it_says_what_to_run(model, tmp_path, capsys):
    assert run(model, tmp_path, "experiment=fig5", "method=structkv") == 0
    capsys.readouterr()
    assert figure("5", tmp_path, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "structkv at 500 has no fidelity, since `full` did not run beside it" in told
    assert "structkv-bench run experiment=fig5 results_dir=" in told


LACKS = {
    "3": ("signals", "no row has signals"),
    "4": ("signals", "no row has signals"),
    "7": ("prefill_parts_s", "no prefill_parts_s"),
    "8": ("fields", "don't tell a needle's depth"),
}


@pytest.mark.parametrize("number", LACKS)
def test_rows_that_lack_what_a_figure_shows_are_refused(ran, tmp_path, capsys, number):
    value, says = LACKS[number]

    def keep(_: str, rows: list[str]) -> list[str]:
        return [json.dumps({k: v for k, v in json.loads(row).items() if k != value}) + "\n" for row in rows]

    some = partly(ran(number), tmp_path / "some", keep)
    capsys.readouterr()
    assert figure(number, some, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert says in told
    assert f"structkv-bench run experiment=fig{number} results_dir=" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("8", "structkv-bench run experiment=fig8"),
        ("2", "fig2: no such experiment"),
        ("table2", "table2: has no figure; choose one of fig1, fig3"),
    ],
)
def test_without_rows_or_such_a_figure_one_line_says_what_to_do(tmp_path, capsys, number, says):
    assert figure(number, tmp_path, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1


def test_a_run_that_has_just_begun_has_no_figure_yet(ran, tmp_path, capsys):
    some = partly(ran("8"), tmp_path / "some", lambda *_: [])
    assert figure("8", some, tmp_path / "out") == 2
    assert "no sample has worked yet" in capsys.readouterr().err


def test_rows_of_two_protocols_are_refused_unless_mixing_is_allowed(ran, tmp_path, capsys):
    mixed = partly(ran("8"), tmp_path / "mixed", lambda _, rows: rows)
    file = next(mixed.glob("*snapkv*/cell.json"))
    file.write_text(file.read_text().replace('"protocol": "official"', '"protocol": "paper"'))
    capsys.readouterr()
    assert figure("8", mixed, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "official and paper" in told
    assert "--allow-mixed" in told
    assert figure("8", mixed, tmp_path / "out", "--allow-mixed") == 0


def luminance(colour: Any) -> float:
    """As seen in grey, from 0 to 1."""
    return sum(part * weight for part, weight in zip(to_rgb(colour), (0.2126, 0.7152, 0.0722), strict=True))


def test_methods_are_told_apart_without_colour():
    assert len({look.dash for look in METHODS.values()}) == len(METHODS)
    assert len({look.marker for look in METHODS.values()}) == len(METHODS)
    assert all(luminance(look.colour) < 0.7 for look in METHODS.values())  # seen on white
    variants = looks(["structkv", *(f"structkv decay={i}" for i in range(9)), "mine", "yours"])
    assert len({(look.marker, look.dash) for look in variants.values()}) == 12
    assert variants["structkv"] == METHODS["structkv"]


def test_parts_of_a_bar_are_told_apart_without_colour():
    neighbours = list(itertools.pairwise(fig7.PARTS.values()))
    assert all(one[1] != other[1] or one[0] != other[0] for one, other in neighbours)
    plain = [luminance(colour) for colour, hatch in fig7.PARTS.values() if not hatch]
    assert min(abs(a - b) for a, b in itertools.combinations(plain, 2)) > 0.1
    hatches = [hatch for _, hatch in fig7.PARTS.values() if hatch]
    assert len(set(hatches)) == len(hatches)


def test_needles_have_the_official_colours_and_scale():
    for place, colour in zip((0.0, 0.5, 1.0), ("#F0496E", "#EBB839", "#0CD79F"), strict=True):
        assert fig8.COLOURS(fig8.SCALE(place))[:3] == pytest.approx(to_rgb(colour), abs=0.01)
    assert (fig8.SCALE.vmin, fig8.SCALE.vmax) == (0, 1)


def test_figures_need_no_torch_no_window_and_nothing_of_the_users_style(ran, tmp_path, monkeypatch):
    (tmp_path / "matplotlibrc").write_text("font.size: 40\nsvg.fonttype: none\nfigure.facecolor: black\n")
    code = (
        "import sys; from structkv_bench.cli import main; code = main(sys.argv[1:]);"
        "sys.exit(code or bool({'torch', 'transformers', 'matplotlib.pyplot'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, "figure", "6", "--results", str(ran("6")), "--out", "styled"]
    assert subprocess.run(command, check=False, cwd=tmp_path).returncode == 0
    assert figure("6", ran("6"), tmp_path / "plain") == 0
    for kind in ("png", "svg", "csv"):
        one, other = (tmp_path / folder / f"fig6.{kind}" for folder in ("styled", "plain"))
        assert one.read_bytes() == other.read_bytes()


def test_help_imports_no_matplotlib():
    code = (
        "import sys; from structkv_bench.cli import main; main(['figure', '--help']);"
        "sys.exit('matplotlib' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
