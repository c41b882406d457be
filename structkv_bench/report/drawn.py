"""From an experiment's name to its figures on disk: PNG, SVG, and the data behind them as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from structkv_bench.catalog import preset_values
from structkv_bench.errors import UserError
from structkv_bench.paths import expanded
from structkv_bench.report.compare import check_alike
from structkv_bench.report.figures import FIGURES
from structkv_bench.report.figures.lines import Line, asked
from structkv_bench.report.figures.style import as_bytes, framed, styled
from structkv_bench.report.paper import read_csv
from structkv_bench.report.printed import named
from structkv_bench.report.render import Format, lines_text
from structkv_bench.report.stored import Evidence, Stored, load


@dataclass(frozen=True)
class Drawn:
    """One figure."""

    name: str
    """Of its files."""
    title: str
    caption: str
    lines: list[Line]
    """The data behind it."""
    figure: Figure
    """With title and caption."""

    def file(self, kind: str) -> bytes:
        """Its png, svg or csv file; the same rows give the same bytes."""
        if kind == "csv":
            return (lines_text(self.lines, Format.CSV) + "\n").encode()
        return as_bytes(self.figure, kind)


def save(
    number: str, results_dirs: Sequence[str | Path], out_dir: str | Path, allow_mixed: bool = False
) -> list[Path]:
    """Draw an experiment's figures from the stored rows and write them; the files.

    Args:
        number: the paper's (8), or the experiment's name (fig8).
        results_dirs: where `structkv-bench run` put the rows.
        out_dir: where the files go.
        allow_mixed: draw rows of different protocols or texts side by side.

    Raises:
        UserError: there is no such figure, there are no rows, they can't stand side by side, or they lack
            what the figure shows.
        OSError: a file can't be written.
    """
    experiment = named(number, "fig")
    if not _files(experiment):
        known = dict.fromkeys(name.rstrip("ab") for name in FIGURES)
        raise UserError(f"{experiment}: has no figure; choose one of {', '.join(known)}")
    evidence = load(results_dirs, experiment)
    if not allow_mixed:
        check_alike(evidence.cells)
    figures = figures_of(experiment, evidence)
    folder, files = expanded(out_dir), []
    folder.mkdir(parents=True, exist_ok=True)
    for one in figures:
        for kind in ("png", "svg", "csv"):
            files.append(folder / f"{one.name}.{kind}")
            files[-1].write_bytes(one.file(kind))
    return files


def figures_of(experiment: str, evidence: Evidence) -> list[Drawn]:
    """The figures of what was stored for an experiment; none, where it is not one of a figure.

    Raises:
        UserError: no sample has worked yet, or the rows lack what a figure shows.
    """
    names = _files(experiment)
    if names and not any(cell.ok for cell in evidence.cells):
        raise UserError(
            f"{experiment}: no sample has worked yet; "
            f"`structkv-bench run experiment={experiment}` goes on with it"
        )
    return [_drawn(name, experiment, evidence) for name in names]


def _files(experiment: str) -> list[str]:
    return [name for name in FIGURES if name.rstrip("ab") == experiment]


def _drawn(name: str, experiment: str, evidence: Evidence) -> Drawn:
    module, title = FIGURES[name], _title(name, experiment, evidence.cells)
    caption = caption_of(name, experiment, evidence)
    with styled():
        lines = module.data(evidence.cells)
        figure = module.draw(lines)
        framed(figure, title, caption)
    return Drawn(name, title, caption, lines, figure)


def caption_of(name: str, experiment: str, evidence: Evidence) -> str:
    """What a figure's numbers are, on what they rest, and what it lacks."""
    return " ".join([FIGURES[name].CAPTION, *_notes(experiment, evidence)])


def _title(name: str, experiment: str, cells: Sequence[Stored]) -> str:
    title = str(preset_values(experiment).get("title") or experiment)
    title = title.replace(f"Figure {experiment[3:]}:", f"Figure {name[3:]}:")  # 1a, 1b
    what = f"{_list(c.about['names']['task'] for c in cells)} · {_list(c.model for c in cells)}"
    done, wanted = sum(len(cell.ok) for cell in cells), asked(cells)
    return f"{title} · {what}" + (f" · INCOMPLETE: {done} of {wanted} samples" if done < wanted else "")


def _notes(experiment: str, evidence: Evidence) -> Iterator[str]:
    """On what the figure rests, and what it lacks."""
    cells = evidence.cells
    sizes = sorted({len(cell.ok) for cell in cells})
    n = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    yield (
        f"Protocol: {_list(cell.about['names']['protocol'] for cell in cells)}; tasks: "
        f"{_list(cell.subtask for cell in cells)}; "
        f"lengths: {_list(sorted({cell.length for cell in cells}))}; "
        f"n = {n} samples a task, length and setting; {sum(cell.failed for cell in cells)} failed."
    )
    if evidence.left_out:
        yield f"Left out: {_list(f'{name} ({why})' for name, why in evidence.left_out.items())}."
    printed = [row for row in read_csv("figures.csv") if row["figure"] == experiment]
    if printed and experiment != "fig3":  # which draws them
        values = "; ".join(
            f"{row['subject']}: {row['quantity'].replace('_', ' ')} {row['value']}" for row in printed
        )
        yield f"Paper ({_list(row['source'] for row in printed)}): {values}."
    yield from (f"{note}." for note in evidence.notes)


def _list(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))
