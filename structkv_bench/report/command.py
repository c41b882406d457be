"""The commands that read stored rows."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from structkv_bench.paths import write_whole
from structkv_bench.report.render import Format
from structkv_bench.report.results import render, results

Results = Annotated[
    list[Path] | None, typer.Option("--results", help="Results folder; give it again to merge several.")
]
Mixed = Annotated[
    bool, typer.Option("--allow-mixed", help="Put rows of different protocols or texts side by side.")
]
Reference = Annotated[str, typer.Option(help="The method that others are tested against.")]
DEFAULT_RESULTS = (Path("results/runs"),)


def print_results(
    format: Annotated[Format, typer.Option(help="How to print them.")] = Format.TABLE,
    results_dirs: Results = None,
) -> None:
    """Print a row per cell of the results, and one per average."""
    say_results(results_dirs or DEFAULT_RESULTS, format)


def table(
    experiment: Annotated[str, typer.Argument(help="Number of the paper's table, or an experiment's name.")],
    format: Annotated[Format, typer.Option(help="How to print it.")] = Format.TABLE,
    compare: Annotated[bool, typer.Option("--compare", help="The paper's numbers below ours.")] = False,
    intervals: Annotated[bool, typer.Option("--intervals", help="Each score's 95 % interval.")] = False,
    reference: Reference = "structkv",
    columns: Annotated[
        str | None, typer.Option(help="subtask, length or method.SETTING, if not the experiment's own.")
    ] = None,
    allow_mixed: Mixed = False,
    results_dirs: Results = None,
) -> None:
    """Print a table of the paper, or of any experiment, from the stored rows."""
    from structkv_bench.report.printed import Wish, named, print_table

    wish = Wish(reference, compare, intervals, allow_mixed, columns)
    name = named(experiment, "table")
    print(print_table(name, results_dirs or DEFAULT_RESULTS, format, wish, _terminal()))


def figure(
    experiment: Annotated[str, typer.Argument(help="Number of the paper's figure: 1, or 3 to 8.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the files, if not figures/ in the first results folder.")
    ] = None,
    allow_mixed: Mixed = False,
    results_dirs: Results = None,
) -> None:
    """Draw a figure of the paper from the stored rows: PNG, SVG, and the data behind it as CSV."""
    from structkv_bench.report.drawn import save  # only now: it imports matplotlib

    places = results_dirs or DEFAULT_RESULTS
    for file in save(experiment, places, out or places[0] / "figures", allow_mixed):
        print(file)


def report(
    results_dirs: Results = None,
    out: Annotated[Path, typer.Option(help="Where to.")] = Path("results/report.html"),
    reference: Reference = "structkv",
    allow_mixed: Mixed = False,
) -> None:
    """Write one HTML page with all tables and figures, settings, provenance and failures.

    It opens from disk, without a network.
    """
    from structkv_bench.report.page import page
    from structkv_bench.report.printed import Wish

    wish = Wish(reference, compare=True, allow_mixed=allow_mixed)
    text = page(results_dirs or DEFAULT_RESULTS, wish)
    write_whole(out, text)
    print(f"{out}: {len(text.encode()) / 1e6:.2f} MB")


def say_results(
    results_dirs: Sequence[str | Path], format: Format, keys: Collection[str] | None = None
) -> None:
    """Print results, and on stderr what they leave out; see `results.results`."""
    lines, note = results(results_dirs, keys)
    print(render(lines, format, _terminal()))
    if note:
        print(note, file=sys.stderr)


def _terminal() -> int | None:
    """Columns of the terminal; None: the output goes elsewhere."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None
