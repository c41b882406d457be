"""The command that measures efficiency."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from structkv_bench.paths import check_writable, write_whole
from structkv_bench.report.render import Format
from structkv_bench.starting import uncollected


def bench(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="As for run; length=2048,4096 for short. The text is niah's essays, or that of task=....",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed prompts per cell, in turn, after one to warm up.")] = 5,
    new_tokens: Annotated[int, typer.Option(help="Decoded tokens per prompt.")] = 32,
    grouped: Annotated[
        bool, typer.Option("--grouped", help="Also time all cells as a group, against the sum of them alone.")
    ] = False,
    format: Annotated[Format, typer.Option(help="How to print it.")] = Format.TABLE,
    out: Annotated[Path | None, typer.Option(help="Where to; the terminal then gets it as a table.")] = None,
) -> None:
    """Measure prefill, time to first token, decode per token, peak memory and kept bytes of each cell alone.

    Medians with quartiles, where a prefill's time goes, and the speed-up beside what its FLOPs allow.
    """
    with uncollected():
        from structkv_bench.bench import measure  # only now: it imports transformers
        from structkv_bench.config import compose
        from structkv_bench.plan import plan

    wish = measure.Wish(repeats, new_tokens, grouped)
    setups = compose(measure.overrides(overrides or [], wish))
    if out:
        check_writable(out)
    from structkv_bench.bench.lines import rendered

    found = []
    for length in measure.bench(plan(setups), wish):
        found.append(length)
        if out:  # after each length, so that a run that is broken off has told what it knows
            write_whole(out, rendered(found, format) + "\n")
    width = shutil.get_terminal_size(fallback=(0, 0)).columns or None
    print(rendered(found, Format.TABLE if out else format, width))
    failed = any(one.error for length in found for one in [*length.alone, *filter(None, [length.group])])
    raise typer.Exit(1 if failed else 0)
